"""The weights of a safetensors file or of a Hugging Face folder: which layer each belongs to, and what is promised."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from twofour.checker.sources.packed import (
    ConfigPromise,
    Foreign,
    Ours,
    Stored,
    apex_masks,
    foreign,
    from_config,
    from_metadata,
    known,
    ours,
)
from twofour.checker.weights import (
    FIRST,
    JUDGED,
    KINDS,
    LEFT_OUT,
    Expectation,
    Skipped,
    Weight,
    named_by,
    require_names,
    unaligned,
)
from twofour.checkpoints import Checkpoint, Entry, Structure, structure
from twofour.errors import FormatError, LayerError, SourceError
from twofour.export.file import joined_aliases, require_one_save
from twofour.export.fit import require_layers
from twofour.export.low_bits import LOW_BITS, parse_low_bits, require_header
from twofour.export.metadata import KEY, Description, read_description
from twofour.importing.asp import BUFFER
from twofour.layers import Reduction, matches
from twofour.patterns import NonzeroBits, Pattern, parse


def checkpoint_weights(
    path: Path, expectation: Expectation, include: Sequence[str], axes: Mapping[str, int]
) -> tuple[list[Weight], Skipped]:
    """Collect the weights of a file or folder to examine, and the other tensors with their reasons.

    Raises:
        FormatError: A file is missing, damaged, or promises what does not exist.
        LayerError: A glob or a promise names what is not there.
        SourceError: The folder's model cannot be made.
    """
    contents = contents_of(Checkpoint.open(path))
    names = list(contents.stored)
    require_names("include", include, names, path)
    layers = layers_of(contents, axes, bool(include))
    weights: list[Weight] = []
    skipped: Skipped = []
    for name in names:
        if len(contents.stored[name].shape) < 2 and name not in contents.patterns:
            continue  # a bias or a norm
        found = _weight(name, contents, layers, expectation, bool(include)) if named_by(include, name) else LEFT_OUT
        if isinstance(found, Weight):
            weights.append(found)
        else:
            skipped.append((name, found))
    promised = expectation or Expectation(contents.patterns)
    promised.require_known({weight.name for weight in weights} | {name for name, why in skipped if why == LEFT_OUT})
    return weights, skipped


def _weight(
    name: str, contents: Contents, layers: ByModel | ByName, expectation: Expectation, named: bool
) -> Weight | str:
    """Describe a tensor as a weight, or say why it is none."""
    stored = contents.stored[name]
    shape = tuple(stored.shape)
    if reason := _refusal(name, stored, shape):
        return reason
    layer = layers.find(name, shape)
    if isinstance(layer, str):
        return layer
    mask = contents.masks.get(name)
    promise, by = _promise(name, layer, contents, expectation, named)
    if promise is None and layer.ineligible and not named and isinstance(layers, ByModel):
        return layer.ineligible
    notes = layer.notes
    if promise is None and layer.ineligible and expectation.everywhere:
        notes = (*notes, f"not held to {expectation.everywhere}: {layer.ineligible}; --include holds it")
    if mask is not None and promise is None:
        notes = (*notes, f"the mask of apex beside it, `{mask.name}`, keeps every value: nothing was pruned yet")
    keep = mask.read if mask is not None and by == "apex mask" else None
    told = tuple(dict.fromkeys(notes))
    kind = EMBEDDING if layer.table and promise is None and not named else layer.kind
    given = (name, kind, shape, layer.axis, stored.read, promise, keep, layer.other)
    return Weight(*given, by=by, notes=told, width=contents.widths.get(name))


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
    if expectation:
        held = named or not layer.ineligible
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
    return NonzeroBits.of(values if values.dtype is not torch.uint8 else values.bool()).nonzero < values.numel()


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
        widths: Widths of the weights of low bits.
    """

    checkpoint: Checkpoint
    stored: Mapping[str, Stored]
    patterns: Mapping[str, Pattern]
    axes: Mapping[str, int]
    masks: Mapping[str, Entry]
    config: ConfigPromise | None
    widths: Mapping[str, str] = field(default_factory=dict)


def contents_of(checkpoint: Checkpoint) -> Contents:
    """Read what a checkpoint says of its weights; their values are read when their turn comes.

    Raises:
        FormatError: What it says is malformed, as `twofour.load` would find it.
    """
    patterns, axes = from_metadata(checkpoint)
    entries = checkpoint.entries
    whole: list[Ours | Foreign] = list(foreign(checkpoint.path, entries, checkpoint.config))
    described = {file: read_description(file, said[KEY]) for file, said in checkpoint.metadata.items() if KEY in said}
    for file, said in described.items():
        whole += ours(file, said.packed, entries)
        _add_settings(file, said, patterns, axes)
    widths = {one.name: one.width for one in whole if one.width is not None}
    for file, said in described.items():
        found = parse_low_bits(file, said.settings.get(LOW_BITS))
        low = {f"{layer}.weight".lstrip("."): (layer, held) for layer, held in found.items()}
        widths |= {name: held.widths.name for name, (_, held) in low.items()}
        for one in whole:
            if isinstance(one, Ours) and one.name in low:
                require_header(file, *low[one.name], one.header)
    parts = {name for one in whole for name in one.parts}
    if described:
        packed = [one.name for one in whole if isinstance(one, Ours)]
        require_one_save(checkpoint.path, checkpoint.files, described)
        aliases = joined_aliases(checkpoint.path, described.values(), entries.keys() - parts, packed)
        names = entries.keys() - parts | {*packed} | aliases.keys()
        require_layers(checkpoint.path, next(iter(described.values())).settings, names)
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
    return Contents(checkpoint, stored, patterns, known_axes, masks, from_config(checkpoint.config), widths)


def _add_settings(file: Path, said: Description, patterns: dict[str, Pattern], axes: dict[str, int]) -> None:
    """Add what `twofour.save` wrote of the plain weights."""
    named, given = said.settings.get("patterns"), said.settings.get("axes")
    if isinstance(named, dict):
        patterns |= {name: known(file, text) for name, text in named.items() if isinstance(text, str)}
    if isinstance(given, dict):
        axes |= {name: 0 for name, axis in given.items() if type(axis) is int and axis == 0}


EMBEDDING = "embedding"
"""What the report calls a tensor that is a table by its name, and that nobody promises anything of."""

_EMBEDDING = re.compile(
    r"(^|[._])(embed(ding)?s?|emb|wte|wpe|shared|lookup|relative_attention_bias)([._]|$)|embed_(tokens|positions)"
    r"|(word|token|position|type)s?_emb",
    re.IGNORECASE,
)
"""Names that embeddings have: (entries, width), looked up and not multiplied; or the input side of a tied head."""
_CONV1D = re.compile(r"(^|\.)(c_attn|c_proj|c_fc|q_attn)\.weight$")
"""Names that Hugging Face's Conv1D (in, out) has in GPT-2 and its kin, and Linear (out, in) in others."""

_HIDDEN = re.compile(r"weight_hh(?P<at>_l\d+(_reverse)?)?$")
"""How torch names the weight of the hidden state of a recurrent layer, or of a cell, which has no `_l0`."""
_GATES = {4: "lstm", 3: "gru", 1: "rnn"}


def recurrent_kinds(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the kinds of the tensors that by name and shape are the weights of recurrent layers of torch.

    `weight_hh` has gates times hidden rows; its columns are the hidden state, or what `weight_hr` (proj, hidden) makes
    of it (torch.nn.LSTM).
    """
    found: dict[str, str] = {}
    for name, shape in shapes.items():
        if (match := _HIDDEN.search(name)) is None or len(shape) != 2:
            continue
        stem, at = name[: match.start()], match["at"] or ""
        hidden = shapes.get(f"{stem}weight_hr{at}", shape)[-1]
        kind = _GATES.get(shape[0] // hidden) if hidden and shape[0] % hidden == 0 else None
        if kind is not None and shapes.get(f"{stem}weight_ih{at}", ())[:1] == shape[:1]:
            parts = [f"{stem}weight_{part}{at}" for part in ("ih", "hh", "hr")]
            found |= dict.fromkeys([part for part in parts if part in shapes], kind if at else f"{kind}_cell")
    return found


_HWIO = (
    "by its shape a kernel of Keras or TensorFlow, (height, width, in, out), whose products sum over axis 2; "
    "it was judged as (out, in, height, width): transpose it with permute(3, 2, 0, 1) first"
)
_LARGEST_KERNEL = 11


def _looks_hwio(shape: tuple[int, ...]) -> bool:
    """Tell whether four axes are a small window first and channels last."""
    return len(shape) == 4 and max(shape[:2]) <= _LARGEST_KERNEL < min(shape[2:])


@dataclass(frozen=True)
class Layer:
    """What a tensor is.

    Attributes:
        kind: Kind of weight.
        axis: Its reduction axis.
        other: Another axis that may be it.
        ineligible: Why it is not one of the weights that a promise about all of them means; "" where it is.
        notes: What the reader should know.
        table: Whether it is a table of an embedding by its name alone: it counts as one unless somebody promises more.
    """

    kind: str
    axis: Reduction
    other: Reduction | None = None
    ineligible: str = ""
    notes: tuple[str, ...] = ()
    table: bool = False


class ByModel:
    """Layers by the model that a folder's config.json describes, on the meta device."""

    def __init__(self, found: Structure) -> None:
        self._found = found
        asp, every = found.walk(), found.walk(eligibility="any", tied="*")
        self._weights = every.by_name
        self._dense = {skip.name: skip.reason for skip in (*every.skipped, *asp.skipped)}

    def _parameter(self, name: str) -> str | None:
        """Return the parameter that a tensor is; one that stands in several packed parts is none of the file's own."""
        if name in self._found.parameters or name in self._found.unknown:
            return self._found.parameters.get(name)
        prefix = f"{getattr(self._found.model, 'base_model_prefix', '')}."
        return next((n for n in (name, prefix + name, name.removeprefix(prefix)) if n in self._weights), None)

    def find(self, name: str, shape: tuple[int, ...]) -> Layer | str:
        """Return what a tensor is, or why no pattern can be laid over it."""
        parameter = self._parameter(name)
        if parameter is None:
            return self._found.unknown.get(name, "the model that config.json describes has no such parameter")
        weight = self._weights.get(parameter)
        if weight is None:
            return self._dense.get(parameter, f"shape {shape} is no weight of a product")
        return Layer(weight.kind, weight.axis, ineligible=self._dense.get(weight.name, ""))


class ByName:
    """Layers of a bare file: by the axes that are given, else by shape; where the name leaves it open, on both axes."""

    def __init__(self, contents: Contents, axes: Mapping[str, int]) -> None:
        require_names("axes", axes, list(contents.stored), contents.checkpoint.path)
        self._axes, self._said = axes, contents.axes
        self._recurrent = recurrent_kinds({name: tuple(stored.shape) for name, stored in contents.stored.items()})

    def find(self, name: str, shape: tuple[int, ...]) -> Layer | str:
        """Return what a tensor is taken for, or why it can be no weight."""
        if len(shape) not in KINDS:
            return f"shape {shape} is no Linear or convolution weight"
        given = next((axis for glob, axis in reversed(list(self._axes.items())) if matches(glob, name)), None)
        axis = self._said.get(name, 1) if given is None else given
        kind = self._recurrent.get(name, KINDS[len(shape)]) if axis else FIRST[len(shape)]
        known = given is not None or name in self._said
        notes = (_HWIO,) if given is None and _looks_hwio(shape) else ()
        small = unaligned(shape[1 - axis], shape[axis])
        if known or len(shape) > 2 or not (_EMBEDDING.search(name) or _CONV1D.search(name)):
            return Layer(kind, Reduction(axis), ineligible=small, notes=notes)
        if _CONV1D.search(name):
            return Layer(kind, Reduction(1), Reduction(0), small, ("by its name a Linear or Hugging Face's Conv1D",))
        looked_up = "by its name it may be an embedding, which is looked up and not multiplied"
        return Layer(kind, Reduction(1), Reduction(0), looked_up, (looked_up,), table=True)


def layers_of(contents: Contents, axes: Mapping[str, int], named: bool) -> ByModel | ByName:
    """Find out how to tell the layers of a checkpoint.

    Args:
        contents: Of the file or folder.
        axes: Globs and their axes, from the caller.
        named: Whether the caller names the weights to look at.

    Raises:
        LayerError: `axes` names what is not there, or is given beside a config.json that tells the axes.
        SourceError: The folder's model cannot be made, and nothing else tells the axes.
    """
    checkpoint = contents.checkpoint
    if checkpoint.config is None:
        return ByName(contents, axes)
    try:
        found = structure(checkpoint, {name: tuple(stored.shape) for name, stored in contents.stored.items()})
    except SourceError as error:
        if axes or named:
            return ByName(contents, axes)
        error.remedy = (
            f"{error.remedy or 'look at the config.json'}; or name the weights: --include GLOB, --axis GLOB=0"
        )
        raise
    if axes:
        raise LayerError(
            "`axes` is for bare files of weights",
            got=f"axes for {checkpoint.path}",
            wanted="no `axes`: the model that config.json describes tells them",
        )
    return ByModel(found)
