"""The bytes of a tensor in the order of its values, whatever its strides."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour.shapes import Shaped, UInt8


def bytes_of(tensor: Shaped[Tensor, " ..."]) -> UInt8[Tensor, " bytes"]:
    """Return the bytes of a tensor (...) in the order of its values: uint8 (bytes,), of the same memory where it can.

    torch calls an axis of one value contiguous whatever its stride, and `Tensor.view(torch.uint8)` refuses that stride.
    """
    values = tensor.detach().contiguous()
    return values.as_strided((values.numel(),), (1,)).view(torch.uint8)
