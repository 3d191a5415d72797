"""Floating-point values, written as torch holds them."""

from __future__ import annotations

import torch

from twofour.packing.encodings.base import Encoding
from twofour.patterns import NM

FLOAT32 = Encoding("float32", torch.float32, 32)
FLOAT16 = Encoding("float16", torch.float16, 16, NM(2, 4))
BFLOAT16 = Encoding("bfloat16", torch.bfloat16, 16, NM(2, 4))

FLOAT8 = Encoding("float8", torch.float8_e4m3fn, 8, NM(2, 4), packed_as="float32")
"""e4m3; its kernels round float32 values themselves."""
