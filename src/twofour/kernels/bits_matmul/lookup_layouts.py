"""The orders of weights whose bits are looked up, some inputs of a plane in a byte (bits.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour.kernels.bits_matmul.codes import TERNARY, Levels, twos


def padded_codes(codes: Tensor, multiple: int) -> Tensor:
    """Return codes with zeros behind their inputs, up to a multiple."""
    return torch.nn.functional.pad(codes, (0, -codes.shape[1] % multiple)).contiguous()


class Tables:
    """Some bits of a plane in a byte, [panel][plane][inputs / some][vectors][32][2 halves of a vector's outputs]."""

    def __init__(self, inputs: int, vectors: int) -> None:
        self.inputs, self.vectors = inputs, vectors

    def stored(self, levels: Levels) -> tuple[int, int, int]:
        """See `Layout.stored`: the codes themselves."""
        return levels.bits, levels.alpha, levels.beta

    def to_bytes(self, codes: Tensor, levels: Levels) -> Tensor:
        """See `Layout.to_bytes`."""
        outputs = _looked_up(codes, self.inputs, levels.bits)
        return outputs.view(-1, self.vectors, 2, 32, *outputs.shape[1:]).permute(0, 4, 5, 1, 3, 2).flatten()

    def to_codes(self, data: Tensor, out: int, columns: int, levels: Levels) -> Tensor:
        """See `Layout.to_codes`."""
        order = data.view(-1, levels.bits, -(-columns // self.inputs), self.vectors, 32, 2)
        planes = order.permute(0, 3, 5, 4, 1, 2).reshape(out, levels.bits, -1)
        return _codes_looked_up(planes, self.inputs, columns)


class Lookups:
    """Six bits of a plane in a byte, planes in pairs: `bits_lookups` of bits.h."""

    inputs = 6

    def stored(self, levels: Levels) -> tuple[int, int, int]:
        """See `Layout.stored`: of signed levels the values themselves, as the last plane counts the least of them."""
        return (levels.bits, 1, 0) if _signed(levels) else (levels.bits, levels.alpha, levels.beta)

    def to_bytes(self, codes: Tensor, levels: Levels) -> Tensor:
        """See `Layout.to_bytes`."""
        if _signed(levels):
            values = codes.short() + levels.beta
            top = (values < 0).short()
            codes = (values - levels.beta * top + (top << (levels.bits - 1))).to(torch.uint8)
        planes = _looked_up(codes, self.inputs, levels.bits)
        count, panels, groups = levels.bits // 2, len(codes) // 64, planes.shape[2]
        halves = planes.view(panels, 2, 32, levels.bits, groups)
        paired = halves[:, :, :, : 2 * count].reshape(panels, 2, 32, count, 2, groups)
        pairs, last = paired.permute(0, 3, 1, 5, 2, 4), halves[:, :, :, 2 * count :].permute(0, 3, 4, 2, 1)
        return torch.cat([pairs.flatten(1), last.flatten(1)], 1).flatten()

    def to_codes(self, data: Tensor, out: int, columns: int, levels: Levels) -> Tensor:
        """See `Layout.to_codes`."""
        pairs, groups, panels = levels.bits // 2, -(-columns // self.inputs), -(-out // 64)
        parts, end = data.view(panels, -1), pairs * groups * 128
        two = parts[:, :end].view(panels, pairs, 2, groups, 32, 2).permute(0, 2, 4, 1, 5, 3).flatten(3, 4)
        one = parts[:, end:].view(panels, levels.bits % 2, groups, 32, 2).permute(0, 4, 3, 1, 2)
        planes = torch.cat([two, one], 3).reshape(out, levels.bits, groups)
        codes = _codes_looked_up(planes, self.inputs, columns)
        if not _signed(levels):
            return codes
        top = codes.short() >> (levels.bits - 1)
        return (codes.short() - (top << (levels.bits - 1)) + levels.beta * (top - 1)).to(torch.uint8)


def _looked_up(codes: Tensor, inputs: int, bits: int) -> Tensor:
    """Return the bits of so many neighbouring codes in a byte, of each plane: uint8 (out, planes, groups)."""
    some = padded_codes(codes, inputs).view(len(codes), 1, -1, inputs)
    ones = some >> torch.arange(bits, dtype=torch.uint8, device="cpu").view(-1, 1, 1) & 1
    return (ones << torch.arange(inputs, dtype=torch.uint8, device="cpu")).sum(3, dtype=torch.uint8)


def _codes_looked_up(planes: Tensor, inputs: int, columns: int) -> Tensor:
    """Return the inverse of `_looked_up`: uint8 (out, columns)."""
    ones = torch.stack([planes >> i & 1 for i in range(inputs)], -1).flatten(2)[:, :, :columns]
    return (ones << torch.arange(planes.shape[1], dtype=torch.uint8, device="cpu")[:, None]).sum(1, dtype=torch.uint8)


def zero_code(levels: Levels) -> int:
    """Return the code of which `bits_lookups` stores no bit."""
    return -levels.beta if _signed(levels) else 0


def _signed(levels: Levels) -> bool:
    """Tell whether every level is a number that the lower planes hold, or one plus the least level."""
    return levels.bits > 1 and levels in (twos(levels.bits), TERNARY)
