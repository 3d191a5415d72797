"""Whole numbers of 8 bits, one scale a row: s = max |w| / 127, q = round(w / s)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.packing.encodings.base import Encoding, nonzero_scales
from twofour.patterns import NM
from twofour.shapes import Float32, Int

INT8_LARGEST = 127
"""Largest magnitude of a symmetric int8 value; -128 is not used, so that a weight and its negative round alike."""


@dataclass(frozen=True)
class Int8(Encoding):
    """One value a byte, two's complement; a file's groups of inputs may be of any size."""

    def quantize(
        self, values: Float32[Tensor, "rows count"], per_scale: int = 0, symmetric: bool = True
    ) -> tuple[Int[Tensor, "rows count"], Float32[Tensor, "rows runs"], None]:
        """Round each row symmetrically; see `Encoding.quantize`. A row of zeros has scale 1."""
        scales = nonzero_scales(values.abs().amax(1, keepdim=True) / INT8_LARGEST)
        return (values / scales).round().to(torch.int8), scales, None


INT8 = Int8("int8", torch.int8, 8, NM(2, 4), scaled=True, rounds_inputs=True)
