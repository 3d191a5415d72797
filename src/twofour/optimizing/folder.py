"""The folder of a run: what it was asked, the steps that are done, and the models they left for the steps to come."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from twofour import measure
from twofour.errors import OptimizeError, cut
from twofour.files import LARGEST_LIST, is_temporary, json_or_none, locked, remove_left, writing
from twofour.progress import Progress
from twofour.report.read import PLAN
from twofour.report.read import RESULTS as RECORD

JOURNAL, WORK = "optimize.json", "work"
MODEL, PAGE = "model.safetensors", "report.html"
RESULTS = (MODEL, PLAN, RECORD, PAGE)
"""What a whole run leaves, beside its journal."""

Done = TypeVar("Done")


@dataclass
class Journal:
    """The steps of a run, each made once, however often the run is stopped.

    Attributes:
        folder: Where the run writes.
        asked: What the run was asked, JSON-ready.
        display: The progress that is shown.
        done: Steps that are done and what they found.
    """

    folder: Path
    asked: Mapping[str, Any]
    display: Progress
    done: dict[str, Any] = field(default_factory=dict)

    def step(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what a step found, of an earlier run or now: JSON-ready values, noted before the next step begins."""
        if name not in self.done:
            self.display.say(name)
            self.done[name] = json.loads(json.dumps(measure.without_nan(make())))
            self.write()
        self.display.advance()
        return self.done[name]

    def write(self) -> None:
        """Write the journal, whole or not."""
        measure.write_json(self.folder / JOURNAL, {"asked": self.asked, "done": self.done})

    def work(self, name: str) -> Path:
        """Return where a step leaves a model for the steps to come."""
        letters = "".join(letter if letter.isalnum() else "-" for letter in name)
        return self.folder / WORK / f"{letters}.safetensors"

    def clear(self) -> None:
        """Remove the models that the steps left."""
        shutil.rmtree(self.folder / WORK, ignore_errors=True)


@contextmanager
def opened(folder: Path, asked: Mapping[str, Any], beside: Collection[str], display: Progress) -> Iterator[Journal]:
    """Give the journal of a run, of one that was stopped with the steps that it had done.

    Args:
        folder: New or empty, or one that the same run left, stopped or whole.
        asked: What the run is asked.
        beside: Names of further files that the run writes there.
        display: The progress to show.

    Raises:
        OptimizeError: The folder holds something else or another run, another process writes there, or it cannot be
            made.
    """
    remedy = "choose another --out, or wait for the other run"
    with locked(folder, OptimizeError, remedy=remedy), writing(folder, OptimizeError, "the result"):
        journal = Journal(folder, asked, display, _earlier(folder, asked, beside))
        journal.write()
        (folder / WORK).mkdir(exist_ok=True)
        for place in (folder, folder / WORK):
            remove_left(place)
        yield journal


def _earlier(folder: Path, asked: Mapping[str, Any], beside: Collection[str]) -> dict[str, Any]:
    """Return the steps that an earlier run did; refuse a folder that holds anything else."""
    found = sorted(path.name for path in folder.iterdir() if not is_temporary(path.name))
    if not found:
        return {}
    stored = json_or_none(folder / JOURNAL, LARGEST_LIST)
    known = {JOURNAL, WORK, *RESULTS, *(Path(name).parts[0] for name in beside)}
    foreign = [name for name in found if name not in known]
    if not isinstance(stored, dict) or not isinstance(stored.get("done"), dict) or foreign:
        raise OptimizeError(
            f"{folder} holds something else, which is not overwritten",
            got=", ".join((foreign or found)[:6]),
            wanted="a new or an empty folder, or that of the same run",
            remedy="choose another --out",
        )
    if stored.get("asked") != asked:
        before = stored.get("asked")
        changed = sorted(key for key in asked if not isinstance(before, dict) or before.get(key) != asked[key])
        told = {key: before.get(key) if isinstance(before, dict) else None for key in changed}
        raise OptimizeError(
            f"{folder} holds another run",
            got=f"it was asked with {cut(json.dumps(told), 200)}",
            wanted=f"the same {', '.join(changed)}",
            remedy="choose another --out",
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
            found.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()


def name_of(function: Callable[..., Any] | None) -> str | None:
    """Return a function's name with a checksum of its code, where it has one; None for none."""
    if function is None:
        return None
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


def of_the_moment(error: BaseException | None) -> bool:
    """Tell whether an error was caused by the disk or the memory, which may serve the next time."""
    return error is not None and (isinstance(error, OSError | MemoryError) or of_the_moment(error.__cause__))
