"""The protocol of an encoding: how one kept value is written, whichever pattern kept it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.patterns import Block, Dense, Hybrid, PairedNM, Pattern
from twofour.shapes import Float32, Int, Shaped


@dataclass(frozen=True)
class Flaw:
    """What stored values no weight is written with.

    Attributes:
        part: End of the error's code: "padding", "code".
        got: What was found.
        wanted: What a file must hold there.
    """

    part: str
    got: str
    wanted: str


@dataclass(frozen=True)
class Encoding:
    """How kept values are written: as they are, or as a subclass says.

    Attributes:
        name: As headers and `compile(dtype=...)` spell it.
        dtype: What tensors hold the values in, one in each element.
        bits: Bits of a stored value.
        core: Pattern that Sparse Tensor Cores multiply by in this type, None where they have no such type.
        codes: Where hardware has codes of its own for positions, the 4-bit code of each position of a group that keeps
            one value; empty: positions are written as plain numbers.
        packed_as: Encoding that such a weight is packed in where this one has no packed form: its kernels round.
        scaled: Whether values are whole numbers that stand for real ones by scales.
        rounds_inputs: Whether its products round their inputs too, by a range for each token or one that data fix.
        groups: Numbers of inputs that may share a scale; empty: a scale serves a whole row.
        any_group: Whether any divisor of the reduction may share a scale beside a whole row.
    """

    name: str
    dtype: torch.dtype
    bits: int
    core: Pattern | None = None
    codes: tuple[int, ...] = ()
    packed_as: str | None = None
    scaled: bool = False
    rounds_inputs: bool = False
    groups: tuple[int, ...] = ()
    any_group: bool = False

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and greatest zero point."""
        return -8, 7

    @property
    def has_zero(self) -> bool:
        """Whether a zero can be written."""
        return True

    @property
    def stored(self) -> torch.dtype:
        """The dtype of the tensor of stored values."""
        return torch.uint8 if self.bits < 8 * self.dtype.itemsize else self.dtype

    def width(self, count: int) -> int:
        """Return how many elements of `stored` hold `count` values."""
        return -(-count * self.bits // (8 * self.stored.itemsize))

    def takes(self, pattern: Pattern) -> bool:
        """Tell whether values that a pattern keeps can be written so; hardware's codes are those of one pattern."""
        if self.packed_as is not None or isinstance(pattern, PairedNM):
            return False
        if isinstance(pattern, Dense):
            return self.scaled  # a dense weight of floats is a plain tensor
        if isinstance(pattern, Block | Hybrid):
            return not self.codes and not self.groups
        return not self.codes or pattern == self.core

    def store(self, values: Shaped[Tensor, "rows count"]) -> Shaped[Tensor, "rows width"]:
        """Write values (rows, count) of `dtype` as they stand in memory and in files: (rows, width) of `stored`.

        Raises:
            PackingError: A value is outside the range.
        """
        return values

    def read(self, stored: Shaped[Tensor, "rows width"], count: int) -> Shaped[Tensor, "rows {count}"]:
        """Return what `store` was given: the first `count` values of each row."""
        return stored

    def flaw(self, stored: Shaped[Tensor, "rows width"], count: int) -> Flaw | None:
        """Return what is wrong with stored values of `count` a row beside NaN and infinity: bits behind the last."""
        padding = self.width(count) * 8 * stored.itemsize - count * self.bits
        if padding and bool((stored[:, -1] >> 8 * stored.itemsize - padding).any()):
            return Flaw("padding", f"bits behind {count} {self.name} values of a row", "zero bits")
        return None

    def quantize(
        self, values: Float32[Tensor, "rows count"], per_scale: int = 0, symmetric: bool = True
    ) -> tuple[Shaped[Tensor, "rows count"], Float32[Tensor, "rows runs"] | None, Float32[Tensor, "rows runs"] | None]:
        """Round float32 values (rows, count) to whole numbers, where the encoding has scales.

        Args:
            values: Kept values.
            per_scale: Values that share a scale, which divides `count`; 0: all of a row.
            symmetric: Without zero points.

        Returns:
            Values in `dtype`; float32 scales (rows, runs) or None; whole float32 zero points like them, or None.
        """
        return values, None, None


def dequantize(
    whole: Int[Tensor, "rows kept"], scales: Float32[Tensor, "rows runs"], zeros: Float32[Tensor, "rows runs"] | None
) -> Float32[Tensor, "rows kept"]:
    """Return s * (q - z).

    Args:
        whole: Integers (rows, kept).
        scales: float32 (rows, runs); runs divides kept.
        zeros: Shape of `scales`, or None for zero.

    Returns:
        float32 (rows, kept).
    """
    runs = whole.float().view(len(whole), scales.shape[1], -1)
    if zeros is not None:
        runs = runs - zeros.unsqueeze(-1)
    return (runs * scales.unsqueeze(-1)).view(whole.shape)


def nonzero_scales(scales: Tensor) -> Tensor:
    """Give runs of zeros the scale 1; so small that 1 / s overflows counts as zero."""
    tiny = torch.finfo(torch.float32).tiny
    return torch.where(scales < tiny, torch.ones_like(scales), scales)
