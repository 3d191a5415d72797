"""decode, read, convert: a foreign checkpoint to what it holds, into a model, or to a file of ours."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from twofour import masks
from twofour.errors import FormatError, TwofourError
from twofour.export.file import Contents, untie
from twofour.export.file import write as write_file
from twofour.export.fill import fill_given
from twofour.export.low_bits import LOW_BITS
from twofour.files import named
from twofour.importing.asp import ASP
from twofour.importing.base import Format, LowBitWeight, Sparse
from twofour.importing.bitmask import Bitmask
from twofour.importing.bitnet import BitNet
from twofour.importing.derived_patterns import Zeros
from twofour.importing.marlin import Marlin
from twofour.importing.semi_structured import SemiStructured
from twofour.importing.source import opened
from twofour.layers import Reduction, nearest, reduction_axes, walk
from twofour.packing import Packed, dense_of, pack
from twofour.quantization.carried import WEIGHT_SCALE

FORMATS: tuple[Format, ...] = (Bitmask(), Marlin(), BitNet(), SemiStructured(), ASP(), Zeros())
"""Every format, in the order in which a checkpoint is tried; the last takes what is left."""

HALF = torch.finfo(torch.float16).max
"""The largest float16."""


@dataclass(frozen=True, eq=False)
class Imported:
    """What a foreign checkpoint holds.

    Attributes:
        format: Name of the format, one of `FORMATS`.
        plain: Every tensor that is no sparse weight, by name.
        sparse: The sparse weights, by name.
        notes: What was dropped or could not be told.
        low_bits: The weights of layers that compute in low bits, by name.
    """

    format: str
    plain: Mapping[str, Tensor]
    sparse: Mapping[str, Sparse]
    notes: tuple[str, ...] = ()
    low_bits: Mapping[str, LowBitWeight] = field(default_factory=dict)

    def __repr__(self) -> str:
        low = f", {len(self.low_bits)} of low bits" if self.low_bits else ""
        return f"Imported({self.format!r}, {len(self.sparse)} sparse and {len(self.plain)} plain tensors{low})"

    @property
    def patterns(self) -> dict[str, str]:
        """Pattern of each sparse weight."""
        return {name: found.pattern for name, found in self.sparse.items()}

    @property
    def widths(self) -> dict[str, str]:
        """Widths of the layers of low bits, by the names of their weights."""
        return {name: found.widths.name for name, found in self.low_bits.items()}

    def weights(self) -> dict[str, Tensor]:
        """Return all tensors with the sparse weights dense, zeros included; whole numbers with scales as float32."""
        dense = {name: found.weight for name, found in (*self.sparse.items(), *self.low_bits.items())}
        return {
            **self.plain,
            **{name: dense_of(weight) for name, weight in dense.items()},
        }

    def contents(self, packed: bool = True) -> Contents:
        """Return what a file of ours is written from.

        Packed int4 gets scales in bfloat16, which our kernels read: a weight moves by 2^-8 of itself at most. Where all
        sparse weights are int4, or all int8, `twofour.load` computes in that type, and in float32 otherwise.

        Raises:
            PackingError: A weight has no packed form.
        """
        others = {name: found.axis for name, found in self.sparse.items() if found.axis != 1}
        settings = {"kind": "masked", "patterns": self.patterns, **({"axes": others} if others else {})}
        layers = {name.removesuffix(".weight"): found for name, found in self.low_bits.items()}
        settings |= {LOW_BITS: {layer: found.described() for layer, found in layers.items()}} if layers else {}
        if not packed:
            plain, aliases = untie(self.weights())
            scales = {layer: found.weight.scales for layer, found in layers.items()}
            plain |= {
                f"{layer}.{WEIGHT_SCALE}": found.flatten() for layer, found in scales.items() if found is not None
            }
            return Contents(plain, {}, aliases, settings)
        weights = {name: _packed(name, found) for name, found in self.sparse.items()}
        scaled = {weight.header.encoding if weight.scales is not None else None for weight in weights.values()}
        encoding = scaled.pop() if len(scaled) == 1 else None
        if encoding is not None:
            settings |= {"dtype": encoding.name}
            if encoding.groups:
                settings |= {"group": min(weight.header.group for weight in weights.values()), "symmetric": True}
        plain, aliases = untie(self.plain)
        weights |= {name: found.weight for name, found in self.low_bits.items()}
        return Contents(plain, weights, aliases, settings)


def decode(
    path: str | os.PathLike[str], *, format: str | None = None, axes: Mapping[str, Reduction] | None = None
) -> Imported:
    """Read and validate a checkpoint that another library wrote.

    Args:
        path: A .safetensors file, a folder with one or an index of several, or a file that torch.save wrote.
        format: Name of the format, one of `FORMATS`; default: by the names of the tensors, of BitNet by
            config.json.
        axes: Reduction axis of each weight of the model; without them it is 1, which is right for Linear layers and
            convolutions.

    Raises:
        FormatError: The checkpoint is damaged, of an unknown format, or holds no sparse weight.
    """
    source = replace(opened(path), asked=format)
    known = {entry.name: entry for entry in FORMATS}
    if format is not None and format not in known:
        raise FormatError(
            "the format is not known", got=repr(format), wanted=", ".join(known), remedy=nearest(format, known)
        )
    chosen = next(entry for entry in FORMATS if entry.recognises(source)) if format is None else known[format]
    if not chosen.recognises(source):
        raise FormatError(
            f"the checkpoint is not of the format {chosen.name}",
            got=f"{source.path}: {', '.join(list(source.tensors)[:4])}, ...",
            wanted="a checkpoint with the tensors of that format",
            remedy="leave the format out, so that it is told by the names of the tensors",
        )
    described = source.config.get("quantization_config")
    if isinstance(described, Mapping) and described.get("transform_config"):  # SpinQuant, QuIP
        raise FormatError(
            "the checkpoint's weights were rotated, and its model undoes that while it runs",
            got=f"{source.path}: a transform_config in config.json",
            wanted="weights that a plain model can take",
        )
    found = chosen.decode(source, axes)
    return Imported(chosen.name, found.plain, found.sparse, found.notes, found.low_bits)


def read(path: str | os.PathLike[str], model: nn.Module, *, format: str | None = None) -> nn.Module:
    """Fill a model with the weights of another library's sparse checkpoint and attach the masks, in place.

    Args:
        path: As in `decode`.
        model: A model of the architecture that was saved; it may be on the meta device.
        format: As in `decode`.

    Returns:
        The same model, ready for training, `twofour.compile` and `twofour.save`.

    Raises:
        FormatError: The checkpoint is damaged or does not fit the model, which is then left as it was.
    """
    imported = decode(path, format=format, axes=reduction_axes(model))
    contents = imported.contents(packed=False)
    _require_range(path, model, contents)
    fill_given(path, model, contents)
    _attach_exact(model, imported)
    return model


def convert(
    path: str | os.PathLike[str], out: str | os.PathLike[str], *, format: str | None = None, packed: bool = True
) -> Imported:
    """Write another library's sparse checkpoint as a file of ours, which `twofour.load` and `twofour check` read.

    Args:
        path: As in `decode`.
        out: File to write; it is replaced only once the new one is complete.
        format: As in `decode`.
        packed: False writes plain weights with their zeros, as any other tool reads them.

    Returns:
        What the checkpoint holds.

    Raises:
        FormatError: The checkpoint is damaged, or the file cannot be written.
        PackingError: A weight has no packed form.
    """
    out = named(out, FormatError)
    imported = decode(path, format=format)
    write(imported, out, packed=packed)
    return imported


def write(imported: Imported, out: str | os.PathLike[str], *, packed: bool = True) -> None:
    """Write what was decoded as a file of ours; see `convert`.

    Raises:
        FormatError: `imported` was not decoded, or the file cannot be written.
        PackingError: A weight has no packed form.
    """
    if not isinstance(imported, Imported):
        raise FormatError(
            "there is nothing that was decoded",
            got=type(imported).__name__,
            wanted="what twofour.importing.decode returned",
            remedy="twofour.importing.convert(path, out) decodes and writes",
        )
    write_file(named(out, FormatError), imported.contents(packed))


def _packed(name: str, found: Sparse) -> Packed:
    if not isinstance(found.weight, Packed):
        try:
            return pack(found.weight, found.pattern, axis=found.axis)
        except TwofourError as error:
            raise error.for_layer(name) from None
    weight = found.weight
    if weight.header.encoding.groups and weight.scales is not None:
        return replace(weight, scales=weight.scales.bfloat16().float())
    return weight


def _require_range(path: str | os.PathLike[str], model: nn.Module, contents: Contents) -> None:
    """Refuse values that a float16 model cannot hold."""
    for name, parameter in model.state_dict().items():
        found = contents.plain.get(name)
        if found is None or parameter.dtype != torch.float16 or not found.is_floating_point() or not found.numel():
            continue
        if found.dtype != torch.float16 and (largest := float(found.float().abs().max())) > HALF:
            raise FormatError(
                "a value of the checkpoint overflows the model's dtype",
                got=f"{path}: {largest:g} for a float16 tensor",
                wanted=f"magnitudes <= {HALF:g}",
                remedy="read it into the model in bfloat16 or float32: model.to(torch.bfloat16)",
                layer=name,
            )


def _attach_exact(model: nn.Module, imported: Imported) -> None:
    """Attach the masks of a source that says which zeros are kept; those found in a plain weight are the tie rule's."""
    by_name = walk(model, eligibility="any", tied="*").by_name
    for name, found in imported.sparse.items():
        if found.keep is not None:
            masks.attach(by_name[name], found.keep.to(by_name[name].parameter.device), found.pattern)
