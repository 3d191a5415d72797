"""What stands in a checkpoint: plain tensors, packed weights, masks, and what is said of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from twofour import export
from twofour.checkpoints import Checkpoint, Entry
from twofour.export.file import INDICES, SCALES, VALUES, ZEROS
from twofour.export.metadata import KEY
from twofour.legality.promises import ConfigPromise, apex_masks, from_config, from_metadata, known
from twofour.packing import Packed
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
    stored: Mapping[str, Entry | Packed]
    patterns: Mapping[str, Pattern]
    axes: Mapping[str, int]
    masks: Mapping[str, Entry]
    config: ConfigPromise | None


def contents_of(checkpoint: Checkpoint) -> Contents:
    """Read what a checkpoint says of its weights; the weights themselves are read when their turn comes.

    Raises:
        FormatError: What it says is malformed, or a packed weight is.
    """
    patterns, axes = from_metadata(checkpoint)
    stored: dict[str, Entry | Packed] = dict(checkpoint.entries)
    for file in checkpoint.files:
        if KEY in checkpoint.metadata[file]:
            _add_ours(file, stored, patterns, axes)
    masks = {name: checkpoint.entries[mask] for name, mask in apex_masks(checkpoint.entries).items() if name in stored}
    # Who wrote the promise knew the axes and noted those that are not 1.
    return Contents(
        checkpoint, stored, patterns, {**dict.fromkeys(patterns, 1), **axes}, masks, from_config(checkpoint.config)
    )


def _add_ours(
    file: Path, stored: dict[str, Entry | Packed], patterns: dict[str, Pattern], axes: dict[str, int]
) -> None:
    """Add what a file that `twofour.save` wrote holds: packed weights in the place of their parts, and its settings."""
    ours = export.read(file)
    for name, packed in ours.packed.items():
        for suffix in (VALUES, INDICES, SCALES, ZEROS):
            stored.pop(name + suffix, None)
        stored[name] = packed
        patterns[name], axes[name] = known(file, packed.header.pattern), packed.header.axis
    said, given = ours.settings.get("patterns"), ours.settings.get("axes")
    if isinstance(said, dict):
        patterns |= {name: known(file, text) for name, text in said.items() if isinstance(text, str)}
    if isinstance(given, dict):
        axes |= {name: 0 for name, axis in given.items() if type(axis) is int and axis == 0}
