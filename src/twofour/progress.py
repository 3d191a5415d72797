"""How far a long step is: a bar on a terminal, elsewhere plain lines, one in a quarter of a minute at most."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

EVERY = 15.0
"""Seconds between two lines: a log of an hour stays short, and nobody takes a working process for a dead one."""


Left = Callable[[], float]
"""What knows how many seconds of a step are left."""


class Lines:
    """Plain lines on standard error about one step, for a file or a pipe; a step of less than `EVERY` writes none."""

    _since: ClassVar[float] = 0.0
    """When the last line was written, or the first of the steps that have been silent since began."""

    _ended: ClassVar[float] = float("-inf")
    _open: ClassVar[list[Lines]] = []
    """Steps that are shown, each inside the one before: the innermost speaks."""

    def __init__(self, title: str = "", total: int | None = None, done: int = 0, shown: bool = True) -> None:
        self._shown, self._stop = shown, threading.Event()
        self._thread: threading.Thread | None = None
        self.begin(title, total, done)

    def begin(self, title: str, total: int | None = None, done: int = 0, left: Left | None = None) -> None:
        """Go on with another step; `left`: who knows the seconds left better than the parts that are done."""
        self._title, self._total, self._done, self._what, self._left = title, total, done, "", left
        self._first, self._began = done, time.monotonic()

    def move(self, done: int | None = None, total: int | None = None, what: str | None = None) -> None:
        """Say how many steps are done, how many there are in all, and what is done now; None: as before."""
        self._done = self._done if done is None else done
        self._total = self._total if total is None else total
        self._what = self._what if what is None else what

    def text(self, now: float) -> str:
        """Return the line for a moment on the monotonic clock."""
        spent = now - self._began
        parts = [f"{self._title}: {self._done:,} of {self._total:,}" if self._total else self._title, self._what]
        parts.append(f"{spoken(spent)} so far")
        if self._left is not None and self._total:
            parts.append(f"about {spoken(self._left())} left")
        elif self._total and self._first < self._done < self._total:
            left = spent / (self._done - self._first) * (self._total - self._done)
            parts.append(f"about {spoken(left)} left")
        return ", ".join(filter(None, parts))

    def __enter__(self) -> Lines:
        if self._shown:
            now = time.monotonic()
            if now - Lines._ended > EVERY:  # else the silence of short steps, one after the other, adds up
                Lines._since = now
            Lines._open.append(self)
            self._thread = threading.Thread(target=self._write, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            Lines._open.remove(self)
            Lines._ended = time.monotonic()

    def _write(self) -> None:
        while not self._stop.wait(max(Lines._since + EVERY - time.monotonic(), EVERY / 10)):
            now = time.monotonic()
            if now >= Lines._since + EVERY and Lines._open[-1] is self:
                Lines._since = now
                print(self.text(now), file=sys.stderr, flush=True)


class Progress:
    """Long steps inside `with Progress() as progress:`, one after the other; one inside another adds to its bars.

    Args:
        shown: False shows nothing; whoever moves it need not ask.
        stays: Leave the bars on the terminal when all is done; elsewhere a line for each step that ended.
    """

    _live: ClassVar[Bars | None] = None
    """The bars on the terminal, which has one display at a time."""

    def __init__(self, shown: bool = True, *, stays: bool = False) -> None:
        self._shown, self._stays = shown, stays
        self._inside = False
        self._lines: Lines | None = None
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        self._tasks: list[TaskID] = []
        self._begun, self._done = False, 0

    def __enter__(self) -> Progress:
        if self._shown and sys.stderr.isatty():
            self._inside = Progress._live is not None
            if Progress._live is None:
                Progress._live = _bars(self._stays)
                Progress._live.start()
            self._bars = Progress._live
        elif self._shown:
            self._lines = Lines("working").__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._bars is not None and self._inside:
            for task in self._tasks:
                self._bars.remove_task(task)
        elif self._bars is not None:
            Progress._live = None
            self._bars.stop()
        if self._lines is not None:
            self._end_step()
            self._lines.__exit__(kind, error, trace)

    def _end_step(self) -> None:
        """Leave a line about the step that ends."""
        if self._lines is not None and self._begun and self._stays:
            print(self._lines.text(time.monotonic()), file=sys.stderr, flush=True)

    def begin(self, title: str, total: int | None = None, done: int = 0, left: Left | None = None) -> None:
        """Begin a step.

        Args:
            title: What it is.
            total: Its parts; None: their number is not known.
            done: Those that are done.
            left: Returns the seconds left, where the parts differ so much that their number says little.
        """
        self._end_step()
        self._begun = True
        if self._bars is not None:
            self._task = self._bars.add_task(title, total=total, completed=done, what="", left=left)
            self._tasks.append(self._task)
        if self._lines is not None:
            self._lines.begin(title, total, done, left)
        self._done = done

    def move(self, done: int | None = None, total: int | None = None, what: str | None = None) -> None:
        """Say how many parts are done, how many there are, and what is done now; None: as before."""
        self._done = self._done if done is None else done
        if self._bars is not None and self._task is not None:
            said = {} if what is None else {"what": what}
            self._bars.update(self._task, completed=self._done, total=total, **said)  # pyright: ignore[reportArgumentType]
        if self._lines is not None:
            self._lines.move(done, total, what)

    def say(self, what: str) -> None:
        """Say what is done now."""
        self.move(what=what)

    def advance(self, what: str | None = None) -> None:
        """One part done."""
        self.move(self._done + 1, what=what)


def _bars(stays: bool) -> Bars:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars
    from rich.text import Text

    class Remaining(TimeRemainingColumn):
        def render(self, task: Task) -> Text:
            known: Left | None = task.fields["left"]
            if known is None or task.finished:
                return super().render(task)
            return Text(str(timedelta(seconds=round(known()))), style="progress.remaining")

    return Bars(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        Remaining(),
        TextColumn("left  {task.fields[what]}", markup=False),
        console=Console(stderr=True),
        transient=not stays,
    )


def spoken(seconds: float) -> str:
    """Return a duration as people say it: 42 s, 3 min 5 s, 1 h 20 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
