"""The weights of a safetensors file or of a Hugging Face folder, each read when its turn comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from twofour.checkpoints import Checkpoint, Entry
from twofour.importing.asp import BUFFER
from twofour.legality.contents import Contents, contents_of
from twofour.legality.expectation import Expectation
from twofour.legality.included import LEFT_OUT, Included
from twofour.legality.kinds import ByModel, ByName, Layer, layers_of
from twofour.legality.packed import Foreign, Ours, Stored
from twofour.legality.subject import JUDGED, Subject
from twofour.patterns import Census, Pattern, parse


def subjects_in(
    path: Path, expectation: Expectation, include: Sequence[str], axes: Mapping[str, int]
) -> tuple[list[Subject], list[tuple[str, str]]]:
    """Collect the weights of a file or folder to examine, and the other tensors with their reasons.

    Raises:
        FormatError: A file is missing, damaged, or promises what does not exist.
        LayerError: A glob or a promise names what is not there.
        SourceError: The folder's model cannot be made.
    """
    contents = contents_of(Checkpoint.open(path))
    names = list(contents.stored)
    included = Included(path, names, include)
    layers = layers_of(contents.checkpoint, names, axes, contents.axes, bool(include))
    subjects: list[Subject] = []
    skipped: list[tuple[str, str]] = []
    for name in names:
        if len(contents.stored[name].shape) < 2 and name not in contents.patterns:
            continue  # a bias or a norm
        found = _subject(name, contents, layers, expectation, bool(include)) if name in included else LEFT_OUT
        if isinstance(found, Subject):
            subjects.append(found)
        else:
            skipped.append((name, found))
    promised = expectation if expectation.named or expectation.everywhere else Expectation(contents.patterns)
    promised.require_known({subject.name for subject in subjects} | {name for name, why in skipped if why == LEFT_OUT})
    return subjects, skipped


def _subject(
    name: str, contents: Contents, layers: ByModel | ByName, expectation: Expectation, named: bool
) -> Subject | str:
    """Make a subject of a tensor, or say why it is none."""
    stored = contents.stored[name]
    shape = tuple(stored.shape)
    if reason := _refusal(name, stored, shape):
        return reason
    layer = layers.find(name, shape)
    if isinstance(layer, str):
        return layer
    mask = contents.masks.get(name)
    promise, by = _promise(name, layer, contents, expectation, named)
    if promise is None and layer.eligible and not named and isinstance(layers, ByModel):
        return layer.eligible
    notes = layer.notes
    if promise is None and layer.eligible and expectation.everywhere:
        notes = (*notes, f"not held to {expectation.everywhere}: {layer.eligible}; --include holds it")
    if mask is not None and promise is None:
        notes = (*notes, f"the mask of apex beside it, `{mask.name}`, keeps every value: nothing was pruned yet")
    keep = mask.read if mask is not None and by == "apex mask" else None
    return Subject(
        name,
        layer.kind,
        shape,
        layer.axis,
        stored.read,
        promise,
        keep,
        layer.other,
        by=by,
        notes=tuple(dict.fromkeys(notes)),
    )


def _refusal(name: str, stored: Stored, shape: tuple[int, ...]) -> str:
    if (buffer := BUFFER.fullmatch(name)) is not None:
        return "apex's mask of another tensor" if buffer["kind"] == "mask" else "what apex pruned of another tensor"
    if min(shape, default=0) < 1:
        return f"shape {shape} is no Linear or convolution weight"
    if not isinstance(stored, Entry) or stored.torch_dtype in JUDGED:
        return ""
    return f"dtype {stored.dtype} is none that a weight is checked in"


def _promise(
    name: str, layer: Layer, contents: Contents, expectation: Expectation, named: bool
) -> tuple[Pattern | None, str | None]:
    """Return what is promised of a weight and by whom; the caller stands above the file."""
    if expectation.named or expectation.everywhere:
        held = named or not layer.eligible
        found = expectation.find(name) or (expectation.everywhere if held else None)
        return found, "expect" if found else None
    stored = contents.stored[name]
    if isinstance(stored, Ours | Foreign) and stored.promise is not None:
        form, said = parse(stored.promise), contents.patterns.get(name)
        return said if said is not None and said.within(form) else form, stored.by
    if name in contents.patterns:
        return contents.patterns[name], "metadata"
    if (mask := contents.masks.get(name)) is not None:
        return (parse("2:4"), "apex mask") if _prunes(mask) else (None, None)
    covered = contents.config is not None and contents.config.covers(name.removesuffix(".weight"), layer.kind)
    return (contents.config.pattern, "compressed-tensors") if contents.config and covered else (None, None)


def _prunes(mask: Entry) -> bool:
    """Whether a mask leaves anything out; ASP starts with masks of ones."""
    values = mask.read()
    return Census.of(values if values.dtype is not torch.uint8 else values.bool()).nonzero < values.numel()
