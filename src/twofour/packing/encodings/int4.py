"""Whole numbers of 4 bits, two a byte: with one scale a group of inputs, or bare pairs as hardware reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.errors import PackingError
from twofour.packing.encodings.base import Encoding, nonzero_scales
from twofour.patterns import Block, Hybrid, PairedNM, Pattern
from twofour.shapes import Float32, Int, UInt8

INT4_LARGEST = 7
INT4_LEAST = -8

GROUPS = (32, 64, 128)
"""Inputs that share one scale of an int4 weight."""


@dataclass(frozen=True)
class Int4(Encoding):
    """Two values a byte, two's complement, the first in the low half."""

    def takes(self, pattern: Pattern) -> bool:
        """See `Encoding.takes`; it takes pairs too."""
        return not isinstance(pattern, Block | Hybrid)

    def store(self, values: Int[Tensor, "rows count"]) -> UInt8[Tensor, "rows width"]:
        """Put two whole numbers from -8 to 7 into a byte; behind an odd number the high half is zero."""
        if int(values.min()) < INT4_LEAST or int(values.max()) > INT4_LARGEST:
            raise PackingError(
                "the weight cannot be written as int4",
                got=f"values from {int(values.min())} to {int(values.max())}",
                wanted=f"whole numbers from {INT4_LEAST} to {INT4_LARGEST}",
            )
        nibbles = values.to(torch.uint8) & 0xF
        nibbles = torch.nn.functional.pad(nibbles, (0, nibbles.shape[1] % 2))
        return nibbles[:, 0::2] | nibbles[:, 1::2] << 4

    def read(self, stored: UInt8[Tensor, "rows width"], count: int) -> Int[Tensor, "rows {count}"]:
        """Take the bytes apart again: int8; see `Encoding.read`."""
        nibbles = torch.stack((stored & 0xF, stored >> 4), -1).flatten(1)[:, :count].to(torch.int8)
        return torch.where(nibbles > INT4_LARGEST, nibbles - 16, nibbles)

    def quantize(
        self, values: Float32[Tensor, "rows count"], per_scale: int = 0, symmetric: bool = True
    ) -> tuple[Int[Tensor, "rows count"], Float32[Tensor, "rows runs"], Float32[Tensor, "rows runs"] | None]:
        """Round runs of kept values; see `Encoding.quantize`.

        Symmetric: q = round(w / s), s = max |w| / 7. Asymmetric: q = round(w / s) + z, s = (max - min) / 15 over the
        run and zero, z = -8 - round(min / s): zero is exact, so pruned and kept zeros stay what they are. s is rounded
        up to a bfloat16, the two bytes that kernels read it as.
        """
        runs = values.view(len(values), -1, per_scale or values.shape[1])
        if symmetric:
            scales = _up_to_bfloat16(nonzero_scales(runs.abs().amax(-1) / INT4_LARGEST))
            zeros = None
        else:
            low, high = runs.amin(-1).clamp(max=0), runs.amax(-1).clamp(min=0)
            scales = _up_to_bfloat16(nonzero_scales((high - low) / (INT4_LARGEST - INT4_LEAST)))
            zeros = INT4_LEAST - (low / scales).round()
        whole = (runs / scales.unsqueeze(-1)).round()
        if zeros is not None:
            whole = whole + zeros.unsqueeze(-1)
        return whole.clamp(INT4_LEAST, INT4_LARGEST).to(torch.int8).view_as(values), scales, zeros


def _up_to_bfloat16(scales: Tensor) -> Tensor:
    """Round positive scales up to 8 significant bits, so that the largest value still fits: at most 0.8 % more.

    A scale that is one already stays, also where a quotient put it a rounding error above: rounding what is rounded
    changes nothing.
    """
    return (((scales * (1 - 2**-22)).view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)


INT4 = Int4("int4", torch.int8, 4, PairedNM(4, 8), scaled=True, groups=GROUPS)
