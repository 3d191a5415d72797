"""Progress of the runs on the terminal: one bar per run, loss, time left."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Display:
    """Bars for the runs inside `with Display(shown):`; does nothing unless `shown`; the loop need not ask."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Display:
        if self._shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]}"),
                TimeRemainingColumn(),
                TextColumn("left"),
                console=Console(stderr=True),
            )
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()

    def begin(self, name: str, epochs: int, per_epoch: int | None, epoch: int, step: int) -> None:
        """Start the bar of one run at the step where it starts or continues."""
        if self._progress is not None:
            total = None if per_epoch is None else epochs * per_epoch
            done = 0 if per_epoch is None else epoch * per_epoch + step
            self._task = self._progress.add_task(name, total=total, completed=done, loss="-")

    def advance(self, loss: float) -> None:
        """One step done."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=1, loss=f"{loss:.4f}")
