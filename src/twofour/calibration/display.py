"""Progress of calibration on the terminal: how many weights are solved, what is being done, the time left."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Display:
    """A bar over the weights inside `with Display(total):`; quiet when not shown or standard error is no terminal."""

    def __init__(self, total: int, shown: bool = True) -> None:
        self._total, self._shown = total, shown and sys.stderr.isatty()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Display:
        if self._shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._progress = Progress(
                TextColumn("pruning"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("weights"),
                TimeRemainingColumn(),
                TextColumn("left  {task.description}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._progress.start()
            self._task = self._progress.add_task("", total=self._total)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()

    def say(self, what: str) -> None:
        """Show what is being done now."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=what)

    def advance(self) -> None:
        """One weight done."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=1)
