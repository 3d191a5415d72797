"""A model in several files with an index, in the form of Hugging Face's hub, each of them a twofour file by itself."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from twofour.checkpoints import INDEX, WEIGHTS, read_header
from twofour.checkpoints.checkpoint import read_index
from twofour.errors import FormatError
from twofour.export.file import Contents, parts_of, require_distinct, write
from twofour.export.metadata import KEY
from twofour.files import PATIENCE, locked, remove_left, replacing, writing

_SHARD = re.compile(r"model(\.(?P<save>\d{1,18}))?-\d{5,}-of-\d{5,}\.safetensors")


def write_folder(folder: str | os.PathLike[str], contents: Contents, max_shard_bytes: int | None = None) -> None:
    """Write contents into a folder: model.safetensors, or several files and model.safetensors.index.json.

    New files stand beside the old ones until the index (or model.safetensors) is replaced, which is one rename; then
    the old ones go, and what killed saves left. A process killed at any moment leaves the old model or the new one,
    and one that reads meanwhile gets the old one or the new one. Of the files that were there only those of ours go:
    a model of another program is neither replaced nor removed.

    Args:
        folder: Made when missing; other files in it stay.
        contents: What is written.
        max_shard_bytes: Bytes of tensors in a file at most; a tensor that has more gets a file of its own. None: one
            file.

    Raises:
        FormatError: Two tensors have one name, model.safetensors or the index in the folder is another program's, the
            folder cannot be written to, or another process still saves into it after `PATIENCE` seconds.
    """
    target = Path(folder)
    require_distinct(contents)
    shards = list(_split(contents, max_shard_bytes))
    remedy = "save into another folder, or again a little later"
    with writing(target, FormatError, "the folder"), locked(target, FormatError, remedy=remedy, wait=PATIENCE):
        _replace(target, shards)


def _replace(target: Path, shards: list[Contents]) -> None:
    """Write the new model beside the old one, switch, and remove what is left of the old one and of killed saves."""
    named = _named(target)
    _require_ours(target, named, over=len(shards) == 1)
    if len(shards) == 1:
        new = [WEIGHTS]
        write(target / WEIGHTS, shards[0])
        (target / INDEX).unlink(missing_ok=True)
    else:
        new = _write_shards(target, shards, named)
        (target / WEIGHTS).unlink(missing_ok=True)  # readers prefer it to the index
    remove_left(target, lambda name: name in (WEIGHTS, INDEX) or _SHARD.fullmatch(name) is not None)
    for path in target.iterdir():
        if path.name not in new and (_SHARD.fullmatch(path.name) or path.name in named) and _is_ours(path):
            path.unlink(missing_ok=True)


def _require_ours(target: Path, named: Collection[str], *, over: bool) -> None:
    """Refuse a folder whose model.safetensors or index is not ours; `over`: the former is written over, not removed."""
    weights, index = target / WEIGHTS, target / INDEX
    if os.path.lexists(weights) and not _is_ours(weights, linked=over):
        raise _foreign(weights, "a link, which would be removed" if _is_ours(weights, linked=True) else "a file")
    if os.path.lexists(index):
        there = [target / name for name in sorted(named) if os.path.lexists(target / name)]
        other = next((path for path in there if not _is_ours(path, linked=True)), None)
        if index.is_symlink() or not there or other is not None:
            raise _foreign(index, f"an index that names {other.name}" if other else "an index that names no file here")


def _foreign(path: Path, got: str) -> FormatError:
    return FormatError(
        "the folder holds a model of another program, which is not overwritten",
        got=f"{path}: {got}",
        wanted=f"an empty folder, or a model that `twofour.save` wrote: its files have the metadata key `{KEY}`",
        remedy="save into another folder, or move that model elsewhere",
    )


def _is_ours(path: Path, *, linked: bool = False) -> bool:
    """Whether `save` wrote a file: a user's own, whatever its name, stays; `linked`: what a link leads to counts."""
    try:
        return path.is_file() and (linked or not path.is_symlink()) and KEY in read_header(path).metadata
    except FormatError:
        return False


def _write_shards(target: Path, shards: list[Contents], named: Collection[str]) -> list[str]:
    names = _free_names(target, len(shards), named)
    places: dict[str, str] = {}
    total = 0
    for name, shard in zip(names, shards, strict=True):
        write(target / name, shard)
        for part, tensor in _tensors(shard):
            places[part] = name
            total += tensor.nbytes
    with replacing(target / INDEX) as temporary:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}, indent=2)
        temporary.write_text(text + "\n", encoding="utf-8")
    return names


def _split(contents: Contents, most: int | None) -> Iterator[Contents]:
    """Yield contents of at most `most` bytes each, in the order of names; aliases go with their tensors."""
    sizes = {name: tensor.nbytes for name, tensor in contents.plain.items()}
    sizes |= {name: packed.nbytes for name, packed in contents.packed.items()}
    filled: list[list[str]] = [[]]
    room = most
    for name in sorted(sizes):
        if most is not None and room is not None:
            if filled[-1] and sizes[name] > room:
                filled.append([])
                room = most
            room -= sizes[name]
        filled[-1].append(name)
    for names in map(set, filled):
        yield Contents(
            {name: tensor for name, tensor in contents.plain.items() if name in names},
            {name: packed for name, packed in contents.packed.items() if name in names},
            {alias: name for alias, name in contents.aliases.items() if name in names},
            contents.settings,
        )


def _tensors(contents: Contents) -> list[tuple[str, Tensor]]:
    parts = [part for name, packed in contents.packed.items() for part in parts_of(name, packed).items()]
    return [*contents.plain.items(), *parts]


def _free_names(target: Path, count: int, named: Collection[str]) -> list[str]:
    """Return names for the files, which no file has or had: those of the hub, else with a number behind "model".

    The number is one above the last save's, so that a reader with the old index never finds a new file under an old
    name.
    """
    found = (_SHARD.fullmatch(name) for name in {*named, *(path.name for path in target.iterdir())})
    last = max((int(shard["save"] or 0) for shard in found if shard), default=-1)
    stem = "model" if last < 0 else f"model.{last + 1}"
    return [f"{stem}-{index + 1:05}-of-{count:05}.safetensors" for index in range(count)]


def _named(target: Path) -> set[str]:
    """Return the files that the folder's index names; a malformed one names none."""
    with suppress(FormatError):
        return set(read_index(target / INDEX).values())
    return set()
