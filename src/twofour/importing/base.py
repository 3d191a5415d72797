"""The protocol of the importers: what a foreign checkpoint is to them, and what they find in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from twofour.errors import FormatError
from twofour.layers import Reduction
from twofour.packing import Packed, pack
from twofour.quantization import Widths

REAL = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Types of weights that can be looked at as they are; torch neither compares nor counts float8."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, eq=False)
class Source:
    """A checkpoint that another library wrote.

    Attributes:
        path: The file or folder.
        tensors: What it holds by name: tensors, or torch's semi-structured ones as they were saved.
        config: The folder's config.json; empty for a file.
        promises: Names of weights that the file's metadata calls sparse, and their patterns.
        asked: Name of the format that the caller says it is of, None where nothing is said.
    """

    path: Path
    tensors: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    promises: Mapping[str, str] = field(default_factory=dict)
    asked: str | None = None


@dataclass(frozen=True, eq=False)
class Sparse:
    """A sparse weight that was found.

    Attributes:
        weight: The dense weight with its zeros, or whole numbers with scales in our packed form.
        pattern: The pattern that it obeys, "2:4".
        axis: Its reduction axis.
        keep: Which values the source calls kept, bool of the weight's shape, a kept zero among them; None where it
            does not say.
    """

    weight: Tensor | Packed
    pattern: str = "2:4"
    axis: int = 1
    keep: Tensor | None = None


@dataclass(frozen=True, eq=False)
class LowBitWeight:
    """A weight of whole numbers whose layer rounds its inputs too.

    Attributes:
        weight: Its codes and a scale for each output.
        widths: What the layer computes in; each token has a range of its own.
    """

    weight: Packed
    widths: Widths

    def described(self) -> dict[str, object]:
        """Return what the settings of a file say of the layer: `low_bits` in docs/formats.md."""
        inputs = self.widths.inputs
        return {"weights": self.widths.weights.name, "inputs": inputs and inputs.name, "static": False}


@dataclass(frozen=True, eq=False)
class Found:
    """What an importer found.

    Attributes:
        plain: Every tensor that is no sparse weight, by the name that the model's state dict has for it.
        sparse: The sparse weights, likewise.
        notes: What a reader should know: what was dropped, what could not be told.
        low_bits: The weights of layers that compute in low bits, by name.
    """

    plain: dict[str, Tensor]
    sparse: dict[str, Sparse]
    notes: tuple[str, ...] = ()
    low_bits: dict[str, LowBitWeight] = field(default_factory=dict)


class Format(Protocol):
    """One foreign format."""

    @property
    def name(self) -> str:
        """Name of the format, as the option `format` takes it."""
        ...

    def recognises(self, source: Source) -> bool:
        """Tell whether the names and types of tensors, or config.json, are this format's; no value is read."""
        ...

    def decode(self, source: Source, axes: Mapping[str, Reduction] | None) -> Found:
        """Read every tensor and validate it.

        Args:
            source: A checkpoint that this format recognises.
            axes: Reduction axis of each weight of the model, by name; None where there is no model.

        Raises:
            FormatError: The checkpoint is malformed; nothing that it claims is taken on trust.
        """
        ...


def malformed(source: Source, layer: str, got: str, wanted: str) -> FormatError:
    """Build the error for a weight that contradicts its format."""
    return FormatError(
        "a sparse weight of the checkpoint is malformed",
        got=f"{source.path}: {got}",
        wanted=wanted,
        remedy="fetch or write the checkpoint again: a broken copy is the usual cause",
        layer=layer,
    )


def stems(source: Source, part: str) -> list[str]:
    """Return the names in front of `.part`, of the tensors that end so."""
    return [name.removesuffix(f".{part}") for name in source.tensors if name.endswith(f".{part}")]


def shown(tensor: object) -> str:
    """Describe a tensor by its shape and type; anything else by its class."""
    return f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__


def may_be_weight(tensor: Tensor) -> bool:
    """Tell whether a tensor has the axes and the type of a layer's weight, and values."""
    return 2 <= tensor.ndim <= 5 and tensor.dtype in REAL and tensor.numel() > 0


def require_finite(source: Source, layer: str, values: Tensor) -> None:
    """Refuse NaN and infinity.

    Raises:
        FormatError: There is one.
    """
    if values.is_floating_point() and not bool(torch.isfinite(values.float()).all()):
        raise malformed(source, layer, "a value that is NaN or infinite", "finite values")


def spread(values: Tensor, keep: Tensor) -> Tensor:
    """Return a dense tensor that holds `values` in order where `keep` is True, and 0 elsewhere."""
    dense = torch.zeros(keep.shape, dtype=values.dtype, device="cpu")
    bits = _BITS[values.itemsize]  # since numpy has neither bfloat16 nor float8; its masks are 5 times as quick
    dense.view(bits).numpy()[keep.numpy()] = values.reshape(-1).view(bits).numpy()
    return dense


def pack_integers(dense: Tensor) -> Packed:
    """Pack whole numbers (out, in) that are 2:4 as int8 without scales, by the native way, which is float32's."""
    packed = pack(dense.float(), "2:4", axis=1)
    return replace(packed, header=replace(packed.header, dtype="int8"), values=packed.values.to(torch.int8))


def kept_of(packed: Packed) -> Tensor:
    """Return where a packed (out, in) weight keeps values: bool of its shape."""
    positions = packed.positions()
    keep = torch.zeros(*positions.shape[:2], packed.header.parsed().group, dtype=torch.bool, device="cpu")
    return keep.scatter_(-1, positions, True).view(packed.header.shape)
