"""A weight's zeros, counted from one pass over its values: what every check of a pattern needs, at a bit a value.

The values come in pieces in the order of memory, so that a weight need not be in memory as a whole. Which groups are
legal, along any axis and for any N:M, is then a matter of the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from twofour import native
from twofour.errors import PatternError, one_of
from twofour.patterns.nm import NM
from twofour.patterns.pairs import PairedNM
from twofour.shapes import Bool, Real

_FORMS = {
    torch.float64: (0x7FFFFFFFFFFFFFFF, 0x7FEFFFFFFFFFFFFF),
    torch.float32: (0x7FFFFFFF, 0x7F7FFFFF),
    torch.bfloat16: (0x7FFF, 0x7F7F),
    torch.float16: (0x7FFF, 0x7BFF),
    torch.float8_e4m3fn: (0x7F, 0x7E),
    torch.float8_e5m2: (0x7F, 0x7B),
    torch.int64: (-1, 0x7FFFFFFFFFFFFFFF),
    torch.int32: (-1, 0x7FFFFFFF),
    torch.int16: (-1, 0x7FFF),
    torch.int8: (-1, 0x7F),
    torch.uint8: (-1, 0x7F),
    torch.bool: (-1, 0x7F),
}
"""Type -> the bits of a value's magnitude, and the largest finite one (IEEE 754; OCP OFP8 for the 8-bit floats).

Of whole numbers every bit counts, and no signed number is above the largest.
"""

_BY_FLOAT32 = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
"""Types without -0.0, whose bits are NaN: widened first."""

COUNTED_DTYPES = (*_FORMS, *_BY_FLOAT32)
"""Types whose zeros can be counted."""

_SIGN_BIT, _COMPLEMENT, _UNSIGNED = range(3)
_ONES = np.array([bin(byte).count("1") for byte in range(256)], dtype=np.uint8)


class GroupStrides(NamedTuple):
    """How groups lie in memory: of a weight seen as (outer, length, inner) they lie along `length`."""

    outer: int
    length: int
    inner: int

    @classmethod
    def along(cls, shape: Sequence[int], axis: int, parts: int = 1) -> GroupStrides:
        """Return how groups lie along an axis of a contiguous tensor; `parts` cuts it in as many reductions."""
        return cls(prod(shape[:axis]) * parts, shape[axis] // parts, prod(shape[axis + 1 :]))


@dataclass(frozen=True)
class GroupCounts:
    """What the bits say of one pattern along one axis.

    Attributes:
        groups: How many groups there are.
        offending: How many have too many non-zero values.
        spare: How many have fewer non-zero values than the pattern allows: which zero is kept is then open.
        first: Place in memory of the first value of the first offending group, None without one.
    """

    groups: int
    offending: int
    spare: int
    first: int | None


class NonzeroBits:
    """Which values of a weight are not zero, one bit each.

    Attributes:
        count: Values seen.
        nonzero: Those that are not zero; -0.0 is zero.
        negative: Those that are -0.0.
        broken: Those that are NaN or infinite.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        one_of(
            "the zeros of this type cannot be counted",
            dtype,
            COUNTED_DTYPES,
            PatternError,
            "convert it first: weight.float()",
        )
        self.count = self.nonzero = self.negative = self.broken = 0
        self._size = size
        # the kernels read 8 bytes ahead
        self._bits = torch.zeros((size + 63) // 64 * 8 + 8, dtype=torch.uint8, device="cpu")

    @classmethod
    def of(cls, weight: Tensor) -> NonzeroBits:
        """Count a whole tensor, in the order of its indices."""
        bits = cls(weight.numel(), weight.dtype)
        bits.add(weight)
        return bits

    def add(self, values: Tensor) -> None:
        """Count the values that follow in memory. Pieces but the last hold a multiple of 8 values."""
        assert self.count % 8 == 0 and self.count + values.numel() <= self._size, (self.count, values.numel())
        values = values.detach().to(torch.float32) if values.dtype in _BY_FLOAT32 else values.detach()
        values = values.cpu().contiguous()
        magnitude, finite = _FORMS[values.dtype]
        found = native.extension().nm_nonzero(
            nonzero_row(values.dtype.itemsize),
            values,
            self._bits,
            self.count,
            magnitude,
            finite,
            native.threads(),
        )
        self.count += values.numel()
        self.nonzero, self.negative, self.broken = (
            before + now for before, now in zip((self.nonzero, self.negative, self.broken), found, strict=True)
        )

    def count_groups(self, pattern: NM | PairedNM, strides: GroupStrides) -> GroupCounts:
        """Count the groups of `pattern` that lie so; `strides.length` is a multiple of the group."""
        offending, spare, first = self._groups(pattern, strides, False)
        return GroupCounts(self._size // pattern.m, offending, spare, None if first < 0 else first)

    def obeys(self, pattern: NM | PairedNM, strides: GroupStrides) -> bool:
        """Tell whether no group offends; where one does, those behind it are not looked at."""
        return self._groups(pattern, strides, True)[0] == 0

    def _groups(self, pattern: NM | PairedNM, strides: GroupStrides, stop: bool) -> tuple[int, int, int]:
        assert prod(strides) == self._size == self.count, (strides, self._size, self.count)
        pairs = isinstance(pattern, PairedNM)
        return native.extension().nm_groups(self._bits, *strides, pattern.n, pattern.m, pairs, stop)

    def outside(self, keep: NonzeroBits) -> int:
        """Count the values that are not zero where those of `keep` are."""
        bits, kept = (one._bits[: (self._size + 7) // 8].numpy() for one in (self, keep))
        return int(_ONES[bits & ~kept].sum(dtype=np.int64))

    def values(self) -> Bool[Tensor, " count"]:
        """Return the same as a bool tensor, True where a value is not zero."""
        bits = self._bits[: (self._size + 7) // 8].numpy()
        nonzero = np.unpackbits(bits, count=self._size, bitorder="little").view(np.bool_)
        return torch.as_tensor(nonzero, dtype=torch.bool, device="cpu")


def ties(values: Tensor, pattern: NM, strides: GroupStrides) -> int:
    """Count the groups whose n-th and (n + 1)-th largest magnitudes are equal and not zero.

    The lowest index stays there, as in any tie; another tool may keep the other.

    Args:
        values: Whole groups, contiguous on the CPU; every type of `COUNTED_DTYPES`.
        pattern: The pattern.
        strides: How the groups of `values` lie.
    """
    assert values.is_contiguous() and values.numel() == prod(strides), (values.shape, strides)
    values = values.to(torch.float32) if values.dtype in _BY_FLOAT32 else values
    sign = _SIGN_BIT if values.is_floating_point() else _UNSIGNED if values.dtype is torch.uint8 else _COMPLEMENT
    size = f"{8 * values.dtype.itemsize} bits"
    row = native.best("nm_ties", pattern=f"{pattern.n}:{pattern.m}", dtype=size)
    return native.extension().nm_ties(row.index, values, sign, *strides, pattern.n, pattern.m)


def ties_reference(view: Real[Tensor, "*rows reduction"], n: int, m: int) -> int:
    """Count the same in plain torch, for groups along the last axis: the reference of `ties`."""
    sizes = torch.unflatten(view, -1, (-1, m)).double().abs().sort(-1, descending=True).values
    return int(((sizes[..., n - 1] == sizes[..., n]) & (sizes[..., n] != 0)).sum())


def nonzero_row(width: int) -> int:
    """Return the index of the fastest kernel for values of `width` bytes that may run here (TWOFOUR_ISA caps it)."""
    return native.best("nm_nonzero", dtype=f"{8 * width} bits").index
