"""The journal of a long run: what it was asked, the steps that are done, and what they left for the steps to come."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from twofour import measure
from twofour.errors import TwofourError, cut
from twofour.files import LARGEST_LIST, bytes_of, is_temporary, json_or_none, locked, remove_left, writing
from twofour.progress import Progress

WORK = "work"
"""The folder, in that of the run, of what steps leave for the steps to come."""

Done = TypeVar("Done")


_TRUST = 0.25
"""Share of a run after which what it took counts as much as what such runs take elsewhere."""


_FEW = 2.0
"""Seconds of a run after which what it waited for a processor counts as much as that usually nothing is waited for."""


class Pace:
    """Seconds that the steps of a run still take.

    Args:
        kinds: The kind of each step to come, in their order.
        usual: Kind -> seconds of such a step elsewhere, on a machine that has nothing else to do. What steps take here
            corrects them, by as much as is done; before that, how long this process waits for a processor.
    """

    def __init__(self, kinds: Sequence[str], usual: Mapping[str, float]) -> None:
        self._ahead, self._usual = list(kinds), dict(usual)
        self._known = _TRUST * sum(self._usual[kind] for kind in kinds) or 1.0
        self._took: defaultdict[str, list[float]] = defaultdict(list)
        self._began: tuple[float, float] | None = None
        self._whole, self._busy = _FEW, _FEW

    def begin(self) -> None:
        """The next step begins."""
        self._began = time.monotonic(), time.process_time()

    def end(self) -> None:
        """It ended; one that did not begin was done by an earlier run and says nothing."""
        if not self._ahead:
            return
        kind = self._ahead.pop(0)
        if self._began is not None:
            whole, busy = self._running()
            self._took[kind].append(whole)
            self._whole, self._busy = self._whole + whole, self._busy + busy
        self._began = None

    def seconds(self, kind: str) -> float:
        """Return what a step of a kind is expected to take."""
        if took := self._took.get(kind):
            return sum(took) / len(took)
        spent = sum(sum(took) for took in self._took.values())
        usual = sum(self._usual[kind] * len(took) for kind, took in self._took.items())
        known = self._known * self.waiting()
        return self._usual[kind] * (spent + known) / (usual + self._known)  # one short step says little

    def waiting(self) -> float:
        """Return the seconds that go by while a processor works one second for this process, 1 at the least.

        What children of the process work counts as waiting, and a time box that is kept to.
        """
        whole, busy = self._running()
        return max(1.0, (self._whole + whole) / (self._busy + busy))

    def _running(self) -> tuple[float, float]:
        """Return the seconds of the step that runs, and the processor time that it had."""
        if self._began is None:
            return 0.0, 0.0
        whole, busy = self._began
        return time.monotonic() - whole, time.process_time() - busy

    def left(self) -> float:
        """Return the seconds left; a step that takes longer than expected is expected to take a quarter longer still.

        So what is said grows with a step that nobody knows the end of, and does not stand at a moment for minutes.
        """
        whole = [self.seconds(kind) for kind in self._ahead]
        if self._began is not None and whole:
            running, _ = self._running()
            whole[0] = max(whole[0] - running, running / 4)
        return sum(whole)


@dataclass
class Journal:
    """The steps of a run, each made once, however often the run is stopped.

    Attributes:
        folder: Where the run writes; None: nothing is written, and the steps last as long as the journal.
        name: Of the file in it that notes the steps.
        asked: What the run was asked, JSON-ready.
        display: The progress that is shown.
        done: Steps that are done and what they found.
        pace: What knows the time left.
    """

    folder: Path | None = None
    name: str = "journal.json"
    asked: Mapping[str, Any] = field(default_factory=dict)
    display: Progress = field(default_factory=lambda: Progress(False))
    done: dict[str, Any] = field(default_factory=dict)
    pace: Pace = field(default_factory=lambda: Pace((), {}))

    def begin(self, title: str, kinds: Sequence[str], usual: Mapping[str, float]) -> None:
        """Begin a run of steps of these kinds, which usually take so many seconds."""
        self.pace = Pace(kinds, usual)
        self.display.begin(title, total=len(kinds), left=self.pace.left)

    def passed(self) -> None:
        """One step is done, now or by an earlier run, or is left out."""
        self.pace.end()
        self.display.advance()

    def step(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what a step found, of an earlier run or now: JSON-ready values, noted before the next step begins."""
        if name not in self.done:
            self.display.say(name)
            self.pace.begin()
            self.done[name] = json.loads(json.dumps(measure.without_nan(make())))
            self.write()
        self.passed()
        return self.done[name]

    def write(self) -> None:
        """Write the journal, whole or not."""
        if self.folder is not None:
            measure.write_json(self.folder / self.name, {"asked": self.asked, "done": self.done})

    def work(self, name: str) -> Path:
        """Return where a step leaves a file of tensors for the steps to come; two names may share a place."""
        assert self.folder is not None
        letters = "".join(letter if letter.isalnum() else "-" for letter in name)
        return self.folder / WORK / f"{letters}.safetensors"

    def clear(self) -> None:
        """Remove what the steps left."""
        if self.folder is not None:
            shutil.rmtree(self.folder / WORK, ignore_errors=True)


@contextmanager
def opened(
    folder: Path,
    name: str,
    asked: Mapping[str, Any],
    kind: type[TwofourError],
    *,
    beside: Collection[str] = (),
    display: Progress | None = None,
    option: str = "--out",
) -> Iterator[Journal]:
    """Give the journal of a run, of one that was stopped with the steps that it had done.

    Args:
        folder: New or empty, or one that the same run left, stopped or whole.
        name: Of the journal's file.
        asked: What the run is asked.
        kind: The error to raise.
        beside: Names of further files that the run writes there.
        display: The progress to show.
        option: What names the folder, for messages.

    Raises:
        TwofourError: The folder holds something else or another run, another process writes there, or it cannot be
            made; of the kind that was asked for.
    """
    remedy = f"choose another {option}, or wait for the other run"
    with locked(folder, kind, remedy=remedy), writing(folder, kind, "the result"):
        done = _earlier(folder, name, asked, {name, WORK, *beside}, kind, f"choose another {option}")
        journal = Journal(folder, name, asked, display or Progress(False), done)
        journal.write()
        (folder / WORK).mkdir(exist_ok=True)
        for place in (folder, folder / WORK):
            remove_left(place)
        yield journal


def _earlier(
    folder: Path, name: str, asked: Mapping[str, Any], known: Collection[str], kind: type[TwofourError], remedy: str
) -> dict[str, Any]:
    """Return the steps that an earlier run did; refuse a folder that holds anything else."""
    found = sorted(path.name for path in folder.iterdir() if not is_temporary(path.name))
    if not found:
        return {}
    stored = json_or_none(folder / name, LARGEST_LIST)
    foreign = [one for one in found if one not in known]
    if not isinstance(stored, dict) or not isinstance(stored.get("done"), dict) or foreign:
        raise kind(
            f"{folder} holds something else, which is not overwritten",
            got=", ".join((foreign or found)[:6]),
            wanted="a new or an empty folder, or that of the same run",
            remedy=remedy,
        )
    if stored.get("asked") != asked:
        before = stored.get("asked")
        changed = sorted(key for key in asked if not isinstance(before, dict) or before.get(key) != asked[key])
        told = {key: before.get(key) if isinstance(before, dict) else None for key in changed}
        raise kind(
            f"{folder} holds another run",
            got=f"it was asked with {cut(json.dumps(told), 200)}",
            wanted=f"the same {', '.join(changed)}",
            remedy=remedy,
        )
    return stored["done"]


def digest(value: nn.Module | object) -> str:
    """Return a checksum of a model's tensors, or of those in data, by which a later run knows the same."""
    found = hashlib.blake2b(digest_size=12)
    leaves = value.state_dict().items() if isinstance(value, nn.Module) else enumerate(tree_leaves(value))
    for name, leaf in leaves:
        found.update(f"{name}:".encode())
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            found.update(bytes_of(leaf.cpu()).numpy().tobytes())
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()


def name_of(function: Callable[..., Any] | None) -> str | None:
    """Return a function's name with a checksum of its code, where it has one, or of a dataclass's values."""
    if function is None:
        return None
    if is_dataclass(function):
        values = [getattr(function, one.name) for one in fields(function)]
        return f"{name_of(type(function).__call__)}:{digest(values)}"
    name = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', type(function).__name__)}"
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return name if code is None else f"{name}:{digest(code_of(code))}"


def code_of(code: CodeType) -> tuple[object, ...]:
    """Return what a function does, alike in every process: its instructions, names and constants, without places."""
    constants = (
        code_of(one) if isinstance(one, CodeType) else sorted(map(repr, one)) if isinstance(one, frozenset) else one
        for one in code.co_consts
    )
    return code.co_code, code.co_names, code.co_varnames, tuple(constants)
