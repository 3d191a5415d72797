"""Answers of a product as codes of the next one's inputs: rows of bytes with a mark, and how numbers get there."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import torch
from torch import Tensor

from twofour.errors import KernelError
from twofour.kernels.problem import MaybeTensor, Problem
from twofour.kernels.quantization import Quantization, quantize_input
from twofour.shapes import Bool, Float32, Int32, UInt8

ROW = 256
"""Floats around a change of code of which each has a bit of its own, in a row of bits: kBitsOfRow of coded_answer.h."""

MOST_ROWS = 255
"""Rows of bits of a table at most."""

MOST_STEPS = 1 << 12
"""Steps of a table at most: 32 KB of it, which stay in a cache beside a product's operands."""

_HEAD = struct.Struct("<2f2i")


def order_of(numbers: Float32[Tensor, "*any"]) -> Int32[Tensor, "*any"]:
    """Return the numbers of floats in their order: 0 of 0.0, -1 of -0.0, one more for the next greater float."""
    bits = numbers.contiguous().view(torch.int32)
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


def float_of(order: Tensor) -> Tensor:
    """Return the inverse of `order_of`, of whole numbers of any type."""
    bits = order.to(torch.int32)
    return (bits ^ (bits >> 31 & 0x7FFFFFFF)).view(torch.float32)


@dataclass(frozen=True, eq=False)
class CodeSteps:
    """The code of any function of one number: a line in steps of one width, each with at most one change of code.

    The step of y is clamp(nearest even(y * factor + offset), 0, steps - 1) in float32, each operation rounded. In a
    step the code is `below` up to float number `begin` (`order_of`), `above` from `rows` rows of bits behind that on,
    and between them what these bits say: there the operators' own roundings go to and fro.

    Attributes:
        factor: Steps in a unit.
        offset: Step of zero.
        begin: int32 (steps,).
        below: uint8 (steps,).
        above: uint8 (steps,).
        row: uint8 (steps,), the first row of `bits`.
        rows: uint8 (steps,).
        bits: bool (all rows, ROW).
    """

    factor: float
    offset: float
    begin: Int32[Tensor, " steps"]
    below: UInt8[Tensor, " steps"]
    above: UInt8[Tensor, " steps"]
    row: UInt8[Tensor, " steps"]
    rows: UInt8[Tensor, " steps"]
    bits: Bool[Tensor, "all row"]

    def codes(self, numbers: Float32[Tensor, "*any"]) -> UInt8[Tensor, "*any"]:
        """Return the codes of numbers."""
        step = step_of(numbers, self.factor, self.offset).clamp(0, len(self.begin) - 1).long()
        place, width = order_of(numbers).long() - self.begin.long()[step], ROW * self.rows.long()[step]
        inside = (place >= 0) & (place < width)
        bit = self.bits.flatten()[ROW * self.row.long()[step] + place.where(inside, 0)]
        above = torch.where(inside, bit, place >= width)
        return torch.where(above, self.above[step], self.below[step])

    def table(self) -> UInt8[Tensor, " bytes"]:
        """Return it as kernels read it: coded_answer.h."""
        parts = torch.stack([self.below, self.above, self.row, self.rows], 1).contiguous().view(torch.int32)
        steps = torch.cat([self.begin[:, None], parts], 1).contiguous()
        places = (1 << torch.arange(8, device="cpu")).to(torch.uint8)
        rows = (self.bits.view(len(self.bits), -1, 8) * places).sum(2, dtype=torch.uint8)
        head = _HEAD.pack(self.factor, self.offset, len(steps), len(rows))
        first = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        return torch.cat([first, steps.view(torch.uint8).flatten(), rows.flatten()])


def step_of(numbers: Tensor, factor: float, offset: float) -> Tensor:
    """Return the steps of numbers on an endless line, float32: NaN stands in the first one."""
    one = torch.tensor([factor, offset], dtype=torch.float32, device="cpu")
    return (numbers * one[0] + one[1]).nan_to_num(0.0).round()


@dataclass(frozen=True, eq=False)
class CodedAnswer:
    """How a real answer becomes codes: normalised, then rounded and clipped, or by a table.

    Attributes:
        after: Bits, levels and static range of the next product's inputs.
        least: The least code of a rounded number.
        most: The greatest one.
        affine: float32 (2, out), scales and shifts of a normalisation, one multiply-add; None: there is none.
        steps: The codes of numbers that are not rounded ones.
        activation: What the steps are of, where kernels have a formula for it: a key of `epilogue.ACTIVATIONS`.
        margin: How far from a whole number that formula's answer, in steps of codes, says that code.
        operands: Normalisation and table as kernels take them.

    Raises:
        KernelError: The range is found for each token, or codes and sizes are impossible.
    """

    after: Quantization
    least: int = 0
    most: int = 255
    affine: Float32[Tensor, "two out"] | None = None
    steps: CodeSteps | None = None
    activation: str = "none"
    margin: float = 0.0
    operands: tuple[MaybeTensor, MaybeTensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        known = self.steps is not None or self.after.levels in ("unsigned", "twos")
        if self.after.dynamic or not known or not 0 <= self.least <= self.most <= self.after.most:
            raise KernelError(
                "an answer cannot become such codes",
                got=f"{self.after.levels} levels, codes from {self.least} to {self.most} of {self.after.bits} bits, "
                f"{'a range for each token' if self.after.dynamic else 'one range'}",
                wanted="one range for all tokens, codes of its bits, a table of steps for odd levels",
            )
        table = None if self.steps is None else self.steps.table()
        object.__setattr__(self, "operands", (self.affine, table))

    def codes(self, y: Float32[Tensor, "*tokens out"]) -> UInt8[Tensor, "*tokens out"]:
        """Return the codes of real answers, their bias added: what kernels do, bit for bit; of NaN anything."""
        if self.affine is not None:  # the product is exact in float64, the sum is rounded once more
            y = (y.double() * self.affine[0].double() + self.affine[1].double()).float()
        return self.steps.codes(y) if self.steps is not None else self.rounded(y)

    def range_of(self, quantization: Quantization) -> tuple[bool, float, int, float, int, int, int, bool]:
        """Return `Quantization.of_bits` of a product with this answer."""
        dynamic, scale, zero, _, _, most, factor, centred = quantization.of_bits
        return dynamic, scale, zero, self.after.codes[1], self.after.zero, most, factor, centred

    def rounded(self, y: Tensor) -> Tensor:
        """Return numbers rounded and clipped."""
        return quantize_input(y, self.after)[0].clamp(self.least, self.most)

    def rows(self, y: Float32[Tensor, "*tokens out"]) -> UInt8[Tensor, "*tokens row"]:
        """Return answers as they leave: the codes of a token, and 1 behind them where it is NaN, else 0."""
        return torch.cat([self.codes(y), y.isnan().any(-1, keepdim=True).to(torch.uint8)], -1)


@dataclass(frozen=True)
class BitsProblem(Problem):
    """A product of codes between others.

    Attributes:
        coded: Whether the input is rows of codes with marks, as `CodedAnswer.rows` makes them: uint8 (..., in + 1).
        answer: What makes such rows of the answer, uint8 (..., out + 1); None: it is real.
    """

    coded: bool = False
    answer: CodedAnswer | None = None

    @property
    def handing(self) -> tuple[MaybeTensor, MaybeTensor, bool, tuple[int, int], float]:
        """What the native call is told of it."""
        if self.answer is None:
            return None, None, self.coded, REAL_ANSWER, 0.0
        return *self.answer.operands, self.coded, (self.answer.least, self.answer.most), self.answer.margin


REAL_ANSWER = 0, -1
"""Codes of an answer that is none."""

PLAINLY = None, None, False, REAL_ANSWER, 0.0
"""`BitsProblem.handing` of a product that stands alone."""
