"""The element types of Sparse Tensor Cores: bits in a register, and how many of how many values they keep.

PTX ISA 9.0, 9.7.14.6.1 "Sparse matrix storage": a chunk of a row is what one 4-bit code of the metadata describes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.errors import PackingError, one_of

WORD = 32
"""Bits of a register."""


@dataclass(frozen=True)
class Element:
    """A type of matrix A's or B's elements.

    Attributes:
        name: As PTX spells it, without the dot.
        bits: Bits of an element in a register.
        chunk: Dense values of a row that one code describes.
        unit: Neighbours that are kept or dropped together: 2 for 4-bit types, else 1.
        dtype: What tensors hold the values in; 4-bit types take a byte each, tf32 a float32.
        integer: Whether values are whole numbers.
    """

    name: str
    bits: int
    chunk: int
    unit: int
    dtype: torch.dtype
    integer: bool = False

    @property
    def kept(self) -> int:
        """Values that a chunk keeps: half of them."""
        return self.chunk // 2

    @property
    def per_word(self) -> int:
        """Elements in a 32-bit register."""
        return WORD // self.bits

    def raw(self, values: Tensor) -> Tensor:
        """Return the bits of `values` (of `dtype`, any shape) as int64, below 2**bits."""
        return self.stored(values).to(torch.int64) & ((1 << self.bits) - 1)

    def stored(self, values: Tensor) -> Tensor:
        """View `values` as integers of their own size; 4-bit values, a byte each, as they are."""
        views = {16: torch.int16, 32: torch.int32, 8: torch.uint8}
        return values if self.bits == 4 else values.contiguous().view(views[self.bits])

    def from_raw(self, bits: Tensor) -> Tensor:
        """Return the values that `bits` (int64, any shape) stand for, in `dtype`."""
        if self.bits == 4:
            signed = bits - ((bits & 8) << 1) if self.name == "s4" else bits
            return signed.to(self.dtype)
        if self.bits == 8:
            return bits.to(torch.uint8).view(self.dtype)
        narrow = torch.int16 if self.bits == 16 else torch.int32
        return _wrapped(bits, self.bits).to(narrow).view(self.dtype)

    def numbers(self, bits: Tensor) -> Tensor:
        """Return what the unit multiplies: int64 of whole numbers, else float64; tf32 drops the 13 lowest bits.

        PTX asks for tf32 operands that were converted (`cvt.rna.tf32.f32`), and says nothing of other float32 values.
        """
        if self.name == "tf32":
            bits = bits & ~0x1FFF
        values = self.from_raw(bits)
        return values.to(torch.int64) if self.integer else values.to(torch.float64)


ELEMENTS = {
    element.name: element
    for element in (
        Element("f16", 16, 4, 1, torch.float16),
        Element("bf16", 16, 4, 1, torch.bfloat16),
        Element("tf32", 32, 2, 1, torch.float32),
        Element("s8", 8, 4, 1, torch.int8, integer=True),
        Element("u8", 8, 4, 1, torch.uint8, integer=True),
        Element("s4", 4, 8, 2, torch.int8, integer=True),
        Element("u4", 4, 8, 2, torch.uint8, integer=True),
        Element("e4m3", 8, 4, 1, torch.float8_e4m3fn),
        Element("e5m2", 8, 4, 1, torch.float8_e5m2),
    )
}
"""Name in PTX -> element type."""


def element(name: str | Element) -> Element:
    """Look an element type up by its name in PTX.

    Raises:
        PackingError: There is no such type.
    """
    if isinstance(name, Element):
        return name
    remedy = 'PTX names without the dot: "bf16", "s8", "e4m3"'
    one_of("Sparse Tensor Cores have no such element type here", name, ELEMENTS, PackingError, remedy)
    return ELEMENTS[name]


def to_words(bits: Tensor, width: int) -> Tensor:
    """Put neighbours of the last axis into words, the first lowest: (..., n) -> int32 (..., n * width / 32)."""
    per_word = WORD // width
    fields = bits.unflatten(-1, (-1, per_word)) << (torch.arange(per_word, device="cpu") * width)
    return _wrapped(fields.sum(-1), WORD).to(torch.int32)


def from_words(words: Tensor, width: int) -> Tensor:
    """Take words apart again: int32 (..., n) -> int64 (..., n * 32 / width), each below 2**width."""
    fields = words.to(torch.int64).unsqueeze(-1) >> (torch.arange(WORD // width, device="cpu") * width)
    return (fields & ((1 << width) - 1)).flatten(-2)


def _wrapped(bits: Tensor, width: int) -> Tensor:
    """Read unsigned fields of `width` bits as two's complement."""
    return bits - ((bits >> (width - 1) & 1) << width)
