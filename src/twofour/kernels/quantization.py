"""How activations become whole numbers of 8 or fewer bits, and how an answer leaves: real = scale * (whole - zero)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import isfinite

import torch
from torch import Tensor

from twofour.errors import KernelError

TINY = torch.finfo(torch.float32).tiny
"""Least scale: the smallest normal float32, so that its reciprocal is finite."""

LARGEST_REDUCTION = 1 << 17
"""Inputs up to which a sum fits int32: half of them kept, at most 255 * 128 each."""

OUTPUTS = {None: (0, 0), torch.float32: (0, 0), torch.bfloat16: (0, 0), torch.uint8: (0, 255), torch.int8: (-128, 127)}
"""dtype of the answer -> its least and greatest whole number."""

LEVELS = ("unsigned", "twos", "bipolar")
"""What codes u = 0 ... 2^bits - 1 of an input stand for: u - zero, u - 2^(bits - 1), or the odd 2 u - (2^bits - 1)."""

REAL = "real"
"""In the place of levels: inputs are no codes, they stay floats; products of codes (`bits_matmul`) alone."""


@dataclass(frozen=True)
class Quantization:
    """The input's range, static or found for every token, and the answer's dtype.

    Attributes:
        x_scale: float32 scale of the input as u8; None: dynamic, each token gets its own scale and zero point.
        x_zero: The whole number 0..255 that stands for zero in a static input.
        y_dtype: float32, bfloat16, uint8 or int8; None: the input's dtype (float32 for a uint8 input).
        y_scale: Scale of a uint8 or int8 answer.
        y_zero: Its zero point.
        bits: Of a whole number of the input: products of codes (`bits_matmul`) take 1 to 8, others 8.
        levels: What the input's codes stand for, one of `LEVELS`; those around zero have no zero point to choose.
            `REAL`: inputs are not rounded.

    Raises:
        KernelError: A scale is no positive normal float32, or a zero point or dtype is impossible.
    """

    x_scale: float | None = None
    x_zero: int = 0
    y_dtype: torch.dtype | None = None
    y_scale: float = 1.0
    y_zero: int = 0
    bits: int = 8
    levels: str = "unsigned"

    def __post_init__(self) -> None:
        known = self.levels in LEVELS or (self.real and self.bits == 8 and self.dynamic)
        if self.bits not in range(1, 9) or not known or (self.levels != "unsigned" and self.x_zero):
            raise KernelError(
                "the codes of an input are impossible",
                got=f"{self.bits} bits, levels {self.levels!r}, zero point {self.x_zero}",
                wanted=f"1 to 8 bits, levels {', '.join(LEVELS)}, a zero point of unsigned ones alone",
                remedy="leave the zero point out for levels around zero, or take unsigned ones",
            )
        if self.y_dtype not in OUTPUTS:
            raise KernelError(
                "an int8 product cannot answer in this dtype",
                got=str(self.y_dtype),
                wanted="float32, bfloat16, uint8 or int8",
                remedy="leave the dtype out for that of the input",
            )
        least, most = OUTPUTS[self.y_dtype]
        for what, scale, zero, bounds in (
            ("x", 1.0 if self.x_scale is None else self.x_scale, self.x_zero, (0, self.most)),
            ("y", self.y_scale, self.y_zero, (least, most)),
        ):
            if not (isfinite(scale) and scale >= TINY) or not bounds[0] <= zero <= bounds[1]:
                raise KernelError(
                    f"the quantization of {what} is impossible",
                    got=f"scale {scale}, zero point {zero}",
                    wanted=f"a positive normal float32, a whole number from {bounds[0]} to {bounds[1]}",
                    remedy="take the range from data: twofour.compile(model, example, dtype='int8', data=loader)",
                )

    @property
    def dynamic(self) -> bool:
        """Whether every token gets its own range."""
        return self.x_scale is None

    @property
    def real(self) -> bool:
        """Whether inputs stay floats."""
        return self.levels == REAL

    @property
    def plain(self) -> bool:
        """Whether inputs are the whole numbers 0 ... 255 that every int8 row takes."""
        return self.bits == 8 and self.levels == "unsigned"

    @property
    def most(self) -> int:
        """The greatest code of an input."""
        return (1 << self.bits) - 1

    @property
    def factor(self) -> int:
        """The step from one level to the next: real = scale * (factor * code - zero); 0 where inputs stay floats."""
        return {"bipolar": 2, REAL: 0}.get(self.levels, 1)

    @property
    def zero(self) -> int:
        """The zero point of a static input: `x_zero`, or that of levels around zero."""
        return {"unsigned": self.x_zero, "twos": 1 << (self.bits - 1), "bipolar": self.most, REAL: 0}[self.levels]

    @classmethod
    def of_range(cls, low: float, high: float, bits: int = 8, levels: str = "unsigned") -> Quantization:
        """Return the static quantization of inputs between `low` and `high`, by the rule of the dynamic one."""
        dynamic = cls(bits=bits, levels=levels)
        scale, zero = _spread(torch.tensor([[low, high]], dtype=torch.float32, device="cpu"), dynamic)
        return cls(scale.item(), int(zero.item()) if levels == "unsigned" else 0, bits=bits, levels=levels)

    def output(self, x: Tensor) -> torch.dtype:
        """Return the dtype of the answer to `x`."""
        return self.answer(x.dtype)

    def answer(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the answer to an input of `dtype`."""
        return self.y_dtype or (torch.float32 if dtype is torch.uint8 else dtype)

    @cached_property
    def codes(self) -> tuple[bool, float, int, float, int]:
        """The fields of `Quantization` in matmul.h, of inputs of 8 unsigned bits."""
        return (
            self.x_scale is None,
            1.0 if self.x_scale is None else self.x_scale,
            self.zero,
            self.y_scale,
            self.y_zero,
        )

    @cached_property
    def of_bits(self) -> tuple[bool, float, int, float, int, int, int, bool]:
        """The fields of `Quantization` in matmul.h."""
        return *self.codes, self.most, self.factor, self.levels in ("twos", "bipolar")


DYNAMIC = Quantization()
"""Every token gets its own range; the answer has the input's dtype."""


def quantize_input(x: Tensor, quantization: Quantization = DYNAMIC) -> tuple[Tensor, Tensor, Tensor]:
    """Return `x` as whole numbers: the reference of what the native kernels do, bit for bit.

    most = 2^bits - 1. Dynamic, in float32: low = min(x, 0), high = max(x, 0), scale = max((high - low) / most, TINY),
    zero = round(-low / scale) of each token; a token with a NaN or an infinity has scale NaN, and so has in effect one
    whose high - low overflows float32: its scale is infinite, and 0 times that is NaN. Then
    q = round(clamp(x * (1 / scale), -zero, most - zero)) + zero, a NaN giving 0. Rounding is to nearest even.
    Levels "twos": zero = 2^(bits - 1), scale = max(max |x| / (most - zero), TINY), of one bit max |x|. "bipolar":
    scale = max(max |x| / most, TINY), q = floor(clamp(x * (0.5 / scale) + 2^(bits - 1), 0, most)), and zero = most in
    x = scale * (2 q - zero).

    Args:
        x: (..., in), float32 or bfloat16; or uint8, which is quantized already.
        quantization: Its input range.

    Returns:
        uint8 (..., in), float32 scale (..., 1), int32 zero points (..., 1).
    """
    if quantization.x_scale is not None:
        size = (*x.shape[:-1], 1)
        scale = torch.full(size, quantization.x_scale, dtype=torch.float32, device=x.device)
        zero = torch.full(size, quantization.zero, dtype=torch.int32, device=x.device)
    else:
        scale, zero = _spread(x.float(), quantization)
    if x.dtype is torch.uint8:
        return x, scale, zero
    if quantization.levels == "bipolar":
        scaled = x.float() * (0.5 / scale) + 2.0 ** (quantization.bits - 1)
        return scaled.nan_to_num(0).clamp(0, quantization.most).to(torch.uint8), scale, zero
    return _quantize(x.float(), scale, zero, torch.uint8, (0, quantization.most)), scale, zero


def quantize_output(y: Tensor, quantization: Quantization) -> Tensor:
    """Return a float32 answer in `quantization.y_dtype`, rounded like an input where that is a whole type."""
    dtype = quantization.y_dtype or y.dtype
    if dtype.is_floating_point:
        return y.to(dtype)
    return _quantize(
        y.float(),
        torch.tensor(quantization.y_scale, dtype=torch.float32, device=y.device),
        torch.tensor(quantization.y_zero, dtype=torch.int32, device=y.device),
        dtype,
    )


def _spread(x: Tensor, quantization: Quantization = DYNAMIC) -> tuple[Tensor, Tensor]:
    """Return scale and zero point of each row; those of a row that is not finite are NaN and 0, or the levels' own."""
    return spread_over(x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0), quantization)


def spread_over(low: Tensor, high: Tensor, quantization: Quantization) -> tuple[Tensor, Tensor]:
    """Return scale and zero point, int32, of dynamic ranges from `low`, at most zero, to `high`, at least zero.

    NaN and 0, or the zero point of the levels, where they are not finite.
    """
    finite, most, fixed = torch.isfinite(low) & torch.isfinite(high), quantization.most, quantization.zero
    if quantization.levels == "unsigned":
        scale = ((high - low) / most).clamp(min=TINY)
        zero = torch.where(finite, (-low / scale).nan_to_num().round(), 0).to(torch.int32)
    else:
        above = most if quantization.levels == "bipolar" else max(most - fixed, 1)
        scale = (torch.maximum(-low, high) / above).clamp(min=TINY)
        zero = torch.full_like(scale, fixed, dtype=torch.int32)
    return torch.where(finite, scale, float("nan")), zero


def _quantize(
    x: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype, bounds: tuple[int, int] | None = None
) -> Tensor:
    least, most = bounds or OUTPUTS[dtype]
    scaled = torch.maximum(torch.minimum(x * (1 / scale), (most - zero).float()), (least - zero).float())
    return (torch.where(scaled.isnan(), (least - zero).float(), scaled).round() + zero).to(dtype)
