"""Checkpoints of a training run: one file per run, replaced in one step, tensors and plain values only.

A file is written under a temporary name in the same folder, flushed to the disk and renamed, so that at any
moment the named file is either the previous checkpoint or the next one, whole.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from twofour.errors import FormatError, TrainingError, explained
from twofour.files import locked, remove_left, replacing, require_sound

FORMAT = "twofour training checkpoint"
VERSION = 1
PARTS: dict[str, type | tuple[type, ...]] = {
    "run": dict,
    "position": dict,
    "history": list,
    "before": object,
    "model": dict,
    "masks": dict,
    "optimizer": dict,
    "schedule": (dict, type(None)),
    "random": dict,
}


@contextmanager
def alone(path: Path | None) -> Iterator[None]:
    """Keep other runs out of a checkpoint's folder while the block runs; None for a run without checkpoints.

    Raises:
        TrainingError: Another run uses it, or it cannot be made.
    """
    if path is None:
        yield
        return
    with locked(path, TrainingError, remedy="pass another `checkpoint` folder, or wait for the other run"):
        remove_left(path, lambda name: name.endswith(".pt"))
        yield


def write(path: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint at `path`, whose folder is made when missing; killed at any moment, it leaves it whole.

    Raises:
        TrainingError: The state holds an object that is neither a tensor nor plain, so that reading it back
            would need pickle; or the file cannot be written.
    """
    content = plain({"format": FORMAT, "version": VERSION, **state})
    try:
        with replacing(path) as temporary:
            torch.save(content, temporary)
    except (OSError, RuntimeError) as error:  # RuntimeError is what torch's own writer says of a full disk
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: Exception) -> TrainingError:
    return TrainingError(
        f"checkpoint `{path}` cannot be written",
        got=explained(error),
        wanted="a folder that may be written to, with room for model, masks and optimiser state",
        remedy="free some space or pass another `checkpoint` folder; an earlier checkpoint there is still whole",
    )


START: dict[str, type | tuple[type, ...]] = {"run": dict, "model": dict, "masks": dict, "notes": list}
"""Parts of `start.pt`: what a dense model was pruned to before its run."""


def read(path: Path, parts: Mapping[str, type | tuple[type, ...]] = PARTS) -> dict[str, Any] | None:
    """The state stored at `path`, of `parts` by name and type; None without such a file. No code in it is ever run.

    Raises:
        FormatError: The file is truncated, damaged, or not a checkpoint of this library and version. It is
            left untouched.
    """
    if not path.exists():
        return None
    try:
        require_sound(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises a dozen kinds for broken files
        raise _malformed(path, explained(error)) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise _malformed(path, "a file of another program")
    if state.get("version") != VERSION:
        raise _malformed(path, f"version {state.get('version')!r}")
    wrong = [part for part, kind in parts.items() if part not in state or not isinstance(state[part], kind)]
    if wrong:
        raise _malformed(path, f"no {', '.join(wrong)}")
    return state


NOBODY = "nobody"


def teacher_of(folder: Path | None) -> str | None:
    """Return who teaches in the run that a folder holds, or `NOBODY`; None where it does not tell.

    Raises:
        FormatError: As `read`.
    """
    for name, parts in (("sparse.pt", PARTS), ("start.pt", START)):
        state = None if folder is None else read(folder / name, parts)
        if state is not None and (name == "sparse.pt" or "teacher" in state):
            return (state["run"] if name == "sparse.pt" else state).get("teacher") or NOBODY
    return None


def require_teacher(folder: Path | None, begun: str | None, teacher: str | None) -> None:
    """Refuse to go on, by a teacher or without, with a run that has `begun` otherwise.

    Raises:
        TrainingError: It has.
    """
    if begun is not None and begun != (teacher or NOBODY):
        raise TrainingError(
            f"the checkpoint in `{folder}` is of another run; it is left as it is",
            got=f"teacher: {begun}",
            wanted=f"teacher: {teacher or NOBODY}",
            remedy="pass `control` and `teacher` as the interrupted run had them, or another checkpoint folder",
        )


def plain(value: Any, where: str = "") -> Any:
    """The value rebuilt from plain containers, or a refusal that names the first object that is none."""
    match value:
        case torch.Tensor() | bool() | int() | str() | bytes() | None:
            return value
        case float():
            return float(value)  # np.float64 is a float too, and would need pickle
        case np.generic():
            return value.item()
        case collections.Counter():
            return value
        case dict():
            return {key: plain(item, f"{where}.{key}") for key, item in value.items()}
        case list():
            return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
        case tuple():
            return tuple(plain(item, f"{where}[{i}]") for i, item in enumerate(value))
    raise TrainingError(
        "the state of this run cannot be written into a checkpoint",
        got=f"{where.lstrip('.')}: {type(value).__module__}.{type(value).__qualname__}",
        wanted="tensors, numbers, strings and containers of them, readable without running code",
        remedy="choose an optimiser and a schedule with a plain state dict, or run without `checkpoint`",
    )


def equal(one: Any, other: Any) -> bool:
    """Whether two plain states are the same, tensors compared by value and type."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        same = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.dtype == other.dtype
        return same and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def _malformed(path: Path, got: str) -> FormatError:
    return FormatError(
        f"checkpoint `{path}` cannot be read; it is left as it is",
        got=got,
        wanted=f"a whole {FORMAT}, version {VERSION}",
        remedy="move the file away to start the run anew, or pass another checkpoint folder",
    )
