"""What stands in a checkpoint: plain tensors, packed weights, masks, and what is said of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from twofour.checkpoints import Checkpoint, Entry
from twofour.errors import FormatError
from twofour.export.file import joined_aliases, require_one_save
from twofour.export.metadata import KEY, Description, read_description
from twofour.legality.packed import Foreign, Ours, Stored, foreign, ours
from twofour.legality.promises import ConfigPromise, apex_masks, from_config, from_metadata, known
from twofour.patterns import Pattern


@dataclass(frozen=True, eq=False)
class Contents:
    """The weights of a checkpoint and what it promises of them.

    Attributes:
        checkpoint: The file or folder.
        stored: Tensors and packed weights by name.
        patterns: Names of weights that its own metadata promises, and their patterns.
        axes: Reduction axes that are known.
        masks: Masks of apex by their weights' names.
        config: What config.json promises.
    """

    checkpoint: Checkpoint
    stored: Mapping[str, Stored]
    patterns: Mapping[str, Pattern]
    axes: Mapping[str, int]
    masks: Mapping[str, Entry]
    config: ConfigPromise | None


def contents_of(checkpoint: Checkpoint) -> Contents:
    """Read what a checkpoint says of its weights; the weights themselves are read when their turn comes.

    Raises:
        FormatError: What it says is malformed, as `twofour.load` would find it.
    """
    patterns, axes = from_metadata(checkpoint)
    entries = checkpoint.entries
    whole: list[Ours | Foreign] = list(foreign(checkpoint.path, entries))
    described = {file: read_description(file, said[KEY]) for file, said in checkpoint.metadata.items() if KEY in said}
    for file, said in described.items():
        whole += ours(file, said.packed, entries)
        _add_settings(file, said, patterns, axes)
    parts = {name for one in whole for name in one.parts}
    if described:
        packed = [one.name for one in whole if isinstance(one, Ours)]
        require_one_save(checkpoint.path, checkpoint.files, described)
        joined_aliases(checkpoint.path, described.values(), entries.keys() - parts, packed)
    stored: dict[str, Stored] = {name: entry for name, entry in entries.items() if name not in parts}
    stored |= {one.name: one for one in whole}
    axes |= {one.name: one.header.axis for one in whole if isinstance(one, Ours)}
    masks = {name: entries[mask] for name, mask in apex_masks(entries).items() if name in stored}
    for name, mask in masks.items():
        if mask.shape != tuple(stored[name].shape):
            raise FormatError(
                "a mask of apex does not fit its weight",
                got=f"{checkpoint.path}: `{mask.name}` is {mask.shape}, `{name}` is {tuple(stored[name].shape)}",
                wanted="one shape",
            )
    # Who wrote the promise knew the axes and noted those that are not 1.
    known_axes = {**dict.fromkeys((*patterns, *(one.name for one in whole)), 1), **axes}
    return Contents(checkpoint, stored, patterns, known_axes, masks, from_config(checkpoint.config))


def _add_settings(file: Path, said: Description, patterns: dict[str, Pattern], axes: dict[str, int]) -> None:
    """Add what `twofour.save` wrote of the plain weights."""
    named, given = said.settings.get("patterns"), said.settings.get("axes")
    if isinstance(named, dict):
        patterns |= {name: known(file, text) for name, text in named.items() if isinstance(text, str)}
    if isinstance(given, dict):
        axes |= {name: 0 for name, axis in given.items() if type(axis) is int and axis == 0}
