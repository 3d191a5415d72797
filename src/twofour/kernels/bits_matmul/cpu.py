"""Native products of codes on the CPU: rows of bits_matmul.inc."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from twofour import native
from twofour.kernels.base import FLOATS, Prepared, rows_of
from twofour.kernels.bits_matmul.coded import PLAINLY, BitsProblem
from twofour.kernels.bits_matmul.codes import TWO_OF_FOUR, BitWeight, Levels
from twofour.kernels.bits_matmul.layout import GROUPS, LARGEST_SUM, OF_2X4, from_layout, group_limits, to_layout
from twofour.kernels.native_product import NativeProduct, foreign, second_operand
from twofour.kernels.operands import together
from twofour.kernels.problem import MaybeTensor, Problem
from twofour.kernels.quantization import Quantization
from twofour.packing import HEADER_BYTES

PACKED_BITS = 4
"""Bits up to which codes are packed several in a byte."""

LEAST_PACKED = 3
"""Bits from which 2:4 codes are packed so: below, dense ones take fewer bytes."""


@dataclass(frozen=True)
class BitsMatmul(NativeProduct):
    """One row of bits_matmul.inc: y = x @ W.T + bias, W codes of 1 to 8 bits, x rounded to codes of 1 to 8 bits.

    Sums are exact: all rows give the same bits, those of `bits_matmul_reference`. Inputs that stay real
    (`quantization.REAL`) are rounded to 23 bits, within 2^-23 of the greatest of their token: see groups.h.
    """

    def refuses_weight(self, weight: BitWeight, quantization: Quantization) -> str | None:
        """Return why this row cannot multiply by a weight, or None when it can; see `refuses_levels`."""
        asked, how = (weight.levels, weight.shape[1], quantization), (weight.group, weight.shifted, weight.pattern)
        return self.refuses_levels(*asked, group=how[0], shifted=how[1], pattern=how[2])

    def refuses_levels(
        self,
        levels: Levels,
        columns: int,
        quantization: Quantization,
        *,
        group: int = 0,
        shifted: bool = False,
        pattern: str = "dense",
    ) -> str | None:
        """Return why this row cannot multiply `columns` inputs by codes of these levels, or None when it can.

        Args:
            levels: Of the weight.
            columns: Inputs.
            quantization: Theirs.
            group: Inputs that share a scale of the weight, 0 for all of an output.
            shifted: Whether the weight has zero points.
            pattern: Of its values, "2:4" or "dense"; dense rows take both.
        """
        if (reason := self.unavailable()) is not None:
            return reason
        grouped = bool(group or shifted or quantization.real)
        if grouped is not (self.layout == GROUPS):
            of = "scales of groups, zero points of weights and float inputs"
            return f"is for no {of}" if grouped else f"is for {of}"
        if self.layout.endswith("packed") and levels.bits > PACKED_BITS:
            return f"packs codes of at most {PACKED_BITS} bits, the weight has {levels.bits}"
        if self.layout in OF_2X4 and (reason := self._refuses_kept(levels, pattern)) is not None:
            return reason
        if shifted and levels.bits == 8:
            return "takes zero points of at most 7 bits, the weight has 8"
        largest = levels.alpha * levels.most if shifted else levels.largest
        unit, most, most_of_all = group_limits()
        most = min(most, LARGEST_SUM // largest // unit * unit)
        if group % unit or group > most:
            return f"takes groups of {unit}, {2 * unit}, ... to {most} inputs, the weight has groups of {group}"
        longest = levels.longest(quantization, shifted=shifted)
        longest = min(longest, most_of_all) if grouped else longest
        if (group or columns) > longest:
            return f"has sums of {group or columns} inputs, which may exceed int32; at most {longest}"
        return None

    def _refuses_kept(self, levels: Levels, pattern: str) -> str | None:
        """Return why a row of 2:4 weights cannot multiply by codes of these levels and this pattern, or None."""
        if pattern != TWO_OF_FOUR:
            return f"takes {TWO_OF_FOUR} weights, not {pattern}"
        if not levels.fits_bytes:
            return "takes values from -128 to 127, one apart"
        if self.layout == "bits_2x4_packed" and (levels.beta < -8 or levels.most + levels.beta > 7):
            return "takes values from -8 to 7"
        if self.layout == "bits_2x4_packed" and levels.bits < LEAST_PACKED:
            return f"has 11 bits for four weights, more than dense codes of {levels.bits} bits"
        return None

    def prepare(self, weight: BitWeight) -> Prepared:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return a weight in this row's layout behind a 64-byte header: uint8.

        Raises:
            KernelError: The layout has too few bits for its groups: `refuses_levels` says what a row takes.
        """
        return Prepared(self, to_layout(weight, self.layout))

    def restore(self, prepared: Prepared) -> BitWeight:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the weight of a prepared one."""
        return from_layout(prepared.tensor)

    def run(
        self, x: Tensor, weight: Prepared, bias: MaybeTensor, problem: Problem, other: MaybeTensor = None
    ) -> Tensor:
        """Multiply; see `NativeProduct.run`. `problem.quantization` says bits, levels and range of the inputs.

        Of a `BitsProblem` inputs may be rows of codes, and answers become such rows.

        Raises:
            KernelError: As `NativeProduct.run`; an input of codes holds one above those of its bits. Rows that a
                product marked (`coded=True`) are not looked through: kernels made them, within their bits.
        """
        epilogue, quantization = problem.epilogue, problem.quantization
        *leading, in_features = x.shape
        handing, to = PLAINLY, quantization.of_bits
        answer = None
        if isinstance(problem, BitsProblem):
            handing, answer = problem.handing, problem.answer
            in_features -= problem.coded
        if answer is not None:
            y = torch.empty((*leading, problem.rows + 1), dtype=torch.uint8, device="cpu")
            to = answer.range_of(quantization)
        elif type(x) is Tensor and quantization.output(x) is x.dtype:
            y = x.new_empty(*leading, problem.rows)  # a microsecond less than `torch.empty` with dtype and device
        else:
            y = torch.empty((*leading, problem.rows), dtype=quantization.output(x), device="cpu")
        other = None if epilogue.plain else second_operand(epilogue, other, x, y)
        x = x if x.is_contiguous() else together(x)
        arguments = x, weight.tensor, bias, y, *epilogue.codes, other, *handing, *to
        if not self._call()(self.index, *arguments, native.threads()):
            raise foreign(self, weight.tensor, problem.rows, in_features)
        return y

    def _call(self) -> Callable[..., bool]:
        return native.extension().bits_matmul

    @property
    def reads(self) -> tuple[torch.dtype, ...]:
        """What an input may be."""
        return FLOATS

    @property
    def native_product(self) -> None:
        """None: what runs products inside knows no bits of inputs."""
        return None

    def least_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of both headers and of one bit for each weight."""
        return 2 * HEADER_BYTES + out_features * in_features // 8


def bits_rows() -> list[BitsMatmul]:
    """Return the rows of bits_matmul.inc in their order there."""
    return rows_of(BitsMatmul, "bits_matmul", counted=True)
