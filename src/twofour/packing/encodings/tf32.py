"""float32 for the tf32 units of Sparse Tensor Cores: 1:2, with the hardware's codes (PTX ISA, "Sparse matrix storage").

The unit multiplies the 19 highest bits of each value; what is stored is not rounded.
"""

from __future__ import annotations

import torch

from twofour.packing.encodings.base import Encoding
from twofour.patterns import NM

TF32_CODES = (0b0100, 0b1110)
"""4-bit code for keeping the first or the second value of a pair."""

TF32 = Encoding("tf32", torch.float32, 32, NM(1, 2), codes=TF32_CODES)
