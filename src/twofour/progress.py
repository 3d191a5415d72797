"""How far a long step is: a bar on a terminal, elsewhere plain lines, one in a quarter of a minute at most."""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

EVERY = 15.0
"""Seconds between two lines: a log of an hour stays short, and nobody takes a working process for a dead one."""

FADES = 60.0
"""Seconds after which a pace counts half, or half of the time that a kind of work has taken, where that is longer: what
a neighbour on the machine takes for a while moves the time left a little, and never by a factor."""

Left = Callable[[], float | None]
"""What knows how many seconds of a step are left, None where it does not yet."""


class Work:
    """The work of a step, of several kinds, and the seconds that what is left of it takes.

    One thread works while others, which show the step, ask what is left.

    Args:
        ahead: Kind -> how much there is to do, in a unit that the kinds roughly share: a unit of a kind that has not
            begun is taken to last as long as one of the others.
    """

    def __init__(self, ahead: Mapping[str, float]) -> None:
        self._ahead = dict(ahead)
        self._seconds, self._amount, self._spent = (defaultdict[str, float](float) for _ in range(3))
        self._since, self._longest = time.monotonic(), 0.0
        self._lock = threading.RLock()

    @contextmanager
    def doing(self, kind: str, amount: float) -> Iterator[None]:
        """Do a part of the work inside."""
        self._since = begin = time.monotonic()
        yield
        self.done(kind, amount, time.monotonic() - begin)

    def done(self, kind: str, amount: float, seconds: float) -> None:
        """A part of the work took so many seconds."""
        with self._lock:
            old = 0.5 ** (seconds / max(FADES, self._spent[kind] / 2))
            self._seconds[kind] = old * self._seconds[kind] + seconds
            self._amount[kind] = old * self._amount[kind] + amount
            self._spent[kind] += seconds
            self.skip(kind, amount)
            self._since, self._longest = time.monotonic(), max(self._longest, seconds)

    def skip(self, kind: str, amount: float) -> None:
        """So much of a kind is not to be done; less than nothing is more to do."""
        with self._lock:
            self._ahead[kind] = max(self._ahead.get(kind, 0.0) - amount, 0.0)

    def left(self) -> float | None:
        """Return the seconds left; None before any work is done."""
        with self._lock:
            seconds, amount = sum(self._seconds.values()), sum(self._amount.values())
            if not amount:
                return None
            paces = {kind: self._seconds[kind] / done for kind, done in self._amount.items() if done}
            whole = sum(ahead * paces.get(kind, seconds / amount) for kind, ahead in self._ahead.items())
            return max(whole - min(time.monotonic() - self._since, self._longest), 0.0)


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
        self._parts = Work({"": (total or done) - done})
        self._began = self._moved = time.monotonic()

    def move(
        self, done: int | None = None, total: int | None = None, what: str | None = None, left: Left | None = None
    ) -> None:
        """Say how many steps are done, how many there are in all, what is done now, who knows; None: as before."""
        if done is not None and done != self._done:
            now, gained = time.monotonic(), done - self._done
            self._parts.done("", max(gained, 0), now - self._moved)
            self._parts.skip("", min(gained, 0))  # a step that goes back has more to do, and no pace
            self._done, self._moved = done, now
        if total is not None:
            self._parts.skip("", (self._total or self._done) - total)
            self._total = total
        self._what = self._what if what is None else what
        self._left = self._left if left is None else left

    def left(self) -> float | None:
        """Return the seconds left, None where they are not known."""
        total = self._total  # read once: the working thread may begin another step
        return (self._left or self._parts.left)() if total and self._done < total else None

    def text(self, now: float) -> str:
        """Return the line for a moment on the monotonic clock."""
        total = self._total
        parts = [f"{self._title}: {self._done:,} of {total:,}" if total else self._title, self._what]
        parts.append(f"{spoken(now - self._began)} so far")
        if (left := self.left()) is not None:
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
        self._inside = self._begun = False
        self._lines = Lines("working", shown=False)
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        self._tasks: list[TaskID] = []
        self._done = 0

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
        self._end_step()
        if self._bars is not None and self._inside:
            for task in self._tasks:
                self._bars.remove_task(task)
        elif self._bars is not None:
            Progress._live = None
            self._bars.stop()
        self._lines.__exit__(kind, error, trace)

    def _end_step(self) -> None:
        """Leave a line about the step that ends; on a terminal nobody goes on to count down for it."""
        if not self._begun:
            return
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, left=None)
        elif self._stays and self._shown:
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
        self._lines.begin(title, total, done, left)
        if self._bars is not None:
            self._task = self._bars.add_task(title, total=total, completed=done, what="", left=self._lines.left)
            self._tasks.append(self._task)
        self._done = done

    def move(
        self, done: int | None = None, total: int | None = None, what: str | None = None, left: Left | None = None
    ) -> None:
        """Say how many parts are done, how many there are, what is done now, who knows the time; None: as before."""
        self._done = self._done if done is None else done
        self._lines.move(done, total, what, left)
        if self._bars is not None and self._task is not None:
            said = {} if what is None else {"what": what}
            self._bars.update(self._task, completed=self._done, total=total, **said)  # pyright: ignore[reportArgumentType]

    def say(self, what: str) -> None:
        """Say what is done now."""
        self.move(what=what)

    def advance(self, what: str | None = None) -> None:
        """One part done."""
        self.move(self._done + 1, what=what)


def _bars(stays: bool) -> Bars:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, SpinnerColumn, Task, TextColumn
    from rich.progress import Progress as Bars
    from rich.text import Text

    class Remaining(ProgressColumn):
        max_refresh = 0.5

        def render(self, task: Task) -> Text:
            known: Left | None = task.fields["left"]
            left = 0.0 if task.finished else None if known is None else known()
            return Text("-:--:--" if left is None else str(timedelta(seconds=round(left))), style="progress.remaining")

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
