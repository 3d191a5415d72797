"""Which layer a tensor of a file belongs to: by the model of its config.json, or by its shape and name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twofour.checkpoints import Checkpoint, Structure, structure
from twofour.errors import LayerError, SourceError
from twofour.layers import Reduction, matches
from twofour.legality.subject import FIRST, KINDS

_EMBEDDING = re.compile(
    r"(^|[._])(embed(ding)?s?|emb|wte|wpe|shared|lookup)([._]|$)|embed_(tokens|positions)|(word|token|position|type)s?_emb",
    re.IGNORECASE,
)
"""Names that embeddings have: (entries, width), looked up and not multiplied; or the input side of a tied head."""
_CONV1D = re.compile(r"(^|\.)(c_attn|c_proj|c_fc|q_attn)\.weight$")
"""Names that Hugging Face's Conv1D (in, out) has in GPT-2 and its kin, and Linear (out, in) in others."""

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
        eligible: Why it is not one of the weights that a promise about all of them means; "" where it is.
        notes: What the reader should know.
    """

    kind: str
    axis: Reduction
    other: Reduction | None = None
    eligible: str = ""
    notes: tuple[str, ...] = ()


class ByModel:
    """Layers by the model that a folder's config.json describes, on the meta device."""

    def __init__(self, found: Structure) -> None:
        self._found = found
        asp, every = found.walk(), found.walk(eligibility="any", tied="*")
        self._weights = {name: weight for weight in every.weights for name in (weight.name, *weight.aliases)}
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
        return Layer(weight.kind, weight.axis, eligible=self._dense.get(weight.name, ""))


class ByName:
    """Layers of a bare file: by the axes that are given, else by shape; where the name leaves it open, on both axes."""

    def __init__(self, path: object, names: Sequence[str], axes: Mapping[str, int], said: Mapping[str, int]) -> None:
        if unknown := [glob for glob in axes if not any(matches(glob, name) for name in names)]:
            raise LayerError(
                "an axis is given for weights that are not there",
                got=", ".join(unknown[:5]),
                wanted=f"globs of the names in {path}",
                remedy=f"names there: {', '.join(list(names)[:5])}",
            )
        if wrong := {glob: axis for glob, axis in axes.items() if axis not in (0, 1)}:
            raise LayerError(
                "a reduction axis is given that no layer has",
                got=", ".join(f"{glob}={axis}" for glob, axis in wrong.items()),
                wanted="1 for a Linear or a convolution, 0 for Hugging Face's Conv1D or a transposed convolution",
            )
        self._axes, self._said = axes, said

    def find(self, name: str, shape: tuple[int, ...]) -> Layer | str:
        """Return what a tensor is taken for, or why it can be no weight."""
        if len(shape) not in KINDS:
            return f"shape {shape} is no Linear or convolution weight"
        given = next((axis for glob, axis in reversed(list(self._axes.items())) if matches(glob, name)), None)
        axis = self._said.get(name, 1) if given is None else given
        kind = KINDS[len(shape)] if axis else FIRST[len(shape)]
        known = given is not None or name in self._said
        rows, columns = shape[1 - axis], shape[axis]
        notes = (_HWIO,) if given is None and _looks_hwio(shape) else ()
        small = "" if rows % 8 == 0 and columns % 16 == 0 else f"{shape} is not a multiple of (8, 16) (ASP's rule)"
        if known or len(shape) > 2 or not (_EMBEDDING.search(name) or _CONV1D.search(name)):
            return Layer(kind, Reduction(axis), eligible=small, notes=notes)
        if _CONV1D.search(name):
            return Layer(kind, Reduction(1), Reduction(0), small, ("by its name a Linear or Hugging Face's Conv1D",))
        looked_up = "by its name it may be an embedding, which is looked up and not multiplied"
        return Layer(kind, Reduction(1), Reduction(0), looked_up, (looked_up,))


def layers_of(
    checkpoint: Checkpoint, names: Sequence[str], axes: Mapping[str, int], said: Mapping[str, int], named: bool
) -> ByModel | ByName:
    """Find out how to tell the layers of a checkpoint.

    Args:
        checkpoint: The file or folder.
        names: Names of its weights.
        axes: Globs and their axes, from the caller.
        said: Names and their axes, from the file.
        named: Whether the caller names the weights to look at.

    Raises:
        LayerError: `axes` names what is not there, or is given beside a config.json that tells the axes.
        SourceError: The folder's model cannot be made, and nothing else tells the axes.
    """
    if checkpoint.config is None:
        return ByName(checkpoint.path, names, axes, said)
    try:
        found = structure(checkpoint)
    except SourceError as error:
        if axes or named:
            return ByName(checkpoint.path, names, axes, said)
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
