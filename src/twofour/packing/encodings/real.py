"""Floating-point values, written as torch holds them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.packing.encodings.base import Encoding
from twofour.patterns import NM, Pattern


@dataclass(frozen=True)
class Real(Encoding):
    """Values as they are."""

    def takes(self, pattern: Pattern) -> bool:
        """See `Encoding.takes`; hardware's codes of positions are those of one pattern alone."""
        return self.packed_as is None and (pattern == self.core if self.codes else super().takes(pattern))

    def store(self, values: Tensor) -> Tensor:
        """Return the values; see `Encoding.store`."""
        return values

    def read(self, stored: Tensor, count: int) -> Tensor:
        """Return the values; see `Encoding.read`."""
        return stored


FLOAT32 = Real("float32", torch.float32, 32)
FLOAT16 = Real("float16", torch.float16, 16, NM(2, 4))
BFLOAT16 = Real("bfloat16", torch.bfloat16, 16, NM(2, 4))

FLOAT8 = Real("float8", torch.float8_e4m3fn, 8, NM(2, 4), packed_as="float32")
"""e4m3; its kernels round float32 values themselves."""
