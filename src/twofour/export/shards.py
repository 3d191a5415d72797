"""A model in several files with an index, in the form of Hugging Face's hub, each of them a twofour file by itself."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from twofour.checkpoints import INDEX, WEIGHTS
from twofour.checkpoints.checkpoint import read_index
from twofour.errors import FormatError
from twofour.export.file import Contents, parts_of, require_distinct, write
from twofour.files import replacing


def write_folder(folder: str | os.PathLike[str], contents: Contents, max_shard_bytes: int | None = None) -> None:
    """Write contents into a folder: model.safetensors, or several files and model.safetensors.index.json.

    New files stand beside the old ones until the index (or model.safetensors) is replaced, which is one rename; then
    the old ones go. A process killed at any moment leaves the old model or the new one.

    Args:
        folder: Made when missing; other files in it stay.
        contents: What is written.
        max_shard_bytes: Bytes of tensors in a file at most; a tensor that has more gets a file of its own. None: one
            file.

    Raises:
        FormatError: Two tensors have one name, or the folder cannot be written to.
    """
    target = Path(folder)
    require_distinct(contents)
    shards = list(_split(contents, max_shard_bytes))
    old = _old(target)
    try:
        if len(shards) == 1:
            new = [WEIGHTS]
            write(target / WEIGHTS, contents)
            (target / INDEX).unlink(missing_ok=True)
        else:
            new = _write_shards(target, shards)
            (target / WEIGHTS).unlink(missing_ok=True)  # readers prefer it to the index
        for name in old:
            if name not in new:  # an index may name model.safetensors
                (target / name).unlink(missing_ok=True)
    except OSError as error:
        raise FormatError(
            "the folder cannot be written",
            got=f"{target}: {error}",
            wanted="a writable folder",
            remedy="choose another place, or free space on the disk",
        ) from error


def _write_shards(target: Path, shards: list[Contents]) -> list[str]:
    names = _free_names(target, len(shards))
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


def _free_names(target: Path, count: int) -> list[str]:
    """Return names for the files, of which none is taken: those of the hub, else with a number behind "model"."""
    for number in range(10_000):
        stem = "model" if number == 0 else f"model.{number}"
        names = [f"{stem}-{index + 1:05}-of-{count:05}.safetensors" for index in range(count)]
        if not any((target / name).exists() for name in names):
            return names
    raise FormatError(
        "the folder is full of earlier models",
        got=str(target),
        wanted="a new or tidied folder",
        remedy="name another folder",
    )


def _old(target: Path) -> list[str]:
    """Return the files that the folder's index names; a malformed one names none."""
    with suppress(FormatError):
        return sorted(set(read_index(target / INDEX).values()))
    return []
