"""How activations become whole numbers in an int8 product, and how its answer leaves: real = scale * (whole - zero)."""

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


@dataclass(frozen=True)
class Quantization:
    """The input's range, static or found for every token, and the answer's dtype.

    Attributes:
        x_scale: float32 scale of the input as u8; None: dynamic, each token gets its own scale and zero point.
        x_zero: The whole number 0..255 that stands for zero in a static input.
        y_dtype: float32, bfloat16, uint8 or int8; None: the input's dtype (float32 for a uint8 input).
        y_scale: Scale of a uint8 or int8 answer.
        y_zero: Its zero point.

    Raises:
        KernelError: A scale is no positive normal float32, or a zero point or dtype is impossible.
    """

    x_scale: float | None = None
    x_zero: int = 0
    y_dtype: torch.dtype | None = None
    y_scale: float = 1.0
    y_zero: int = 0

    def __post_init__(self) -> None:
        if self.y_dtype not in OUTPUTS:
            raise KernelError(
                "an int8 product cannot answer in this dtype",
                got=str(self.y_dtype),
                wanted="float32, bfloat16, uint8 or int8",
                remedy="leave the dtype out for that of the input",
            )
        least, most = OUTPUTS[self.y_dtype]
        for what, scale, zero, bounds in (
            ("x", 1.0 if self.x_scale is None else self.x_scale, self.x_zero, (0, 255)),
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

    @classmethod
    def of_range(cls, low: float, high: float) -> Quantization:
        """Return the static quantization of inputs between `low` and `high`, by the rule of the dynamic one."""
        scale, zero = _spread(torch.tensor([[low, high]], dtype=torch.float32, device="cpu"))
        return cls(scale.item(), int(zero.item()))

    def output(self, x: Tensor) -> torch.dtype:
        """Return the dtype of the answer to `x`."""
        return self.y_dtype or (torch.float32 if x.dtype is torch.uint8 else x.dtype)

    @cached_property
    def codes(self) -> tuple[bool, float, int, float, int]:
        """The fields of `Quantization` in nm_matmul.h."""
        return (
            self.x_scale is None,
            1.0 if self.x_scale is None else self.x_scale,
            self.x_zero,
            self.y_scale,
            self.y_zero,
        )


DYNAMIC = Quantization()
"""Every token gets its own range; the answer has the input's dtype."""


def quantize_input(x: Tensor, quantization: Quantization = DYNAMIC) -> tuple[Tensor, Tensor, Tensor]:
    """Return `x` as whole numbers: the reference of what the native kernels do, bit for bit.

    Dynamic, in float32: low = min(x, 0), high = max(x, 0), scale = max((high - low) / 255, TINY) and
    zero = round(-low / scale) of each token; a token with a NaN or an infinity has scale NaN. Then
    q = round(clamp(x * (1 / scale), -zero, 255 - zero)) + zero, a NaN giving 0. Rounding is to nearest even.

    Args:
        x: (tokens, in), float32 or bfloat16; or uint8, which is quantized already.
        quantization: Its input range.

    Returns:
        uint8 (tokens, in), float32 scale (tokens, 1), int32 zero points (tokens, 1).
    """
    if quantization.x_scale is not None:
        scale = torch.full((len(x), 1), quantization.x_scale, dtype=torch.float32, device=x.device)
        zero = torch.full((len(x), 1), quantization.x_zero, dtype=torch.int32, device=x.device)
    else:
        scale, zero = _spread(x.float())
    return x if x.dtype is torch.uint8 else _quantize(x.float(), scale, zero, torch.uint8), scale, zero


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


def _spread(x: Tensor) -> tuple[Tensor, Tensor]:
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 255).clamp(min=TINY)
    finite = torch.isfinite(x).all(-1, keepdim=True)
    zero = torch.where(finite, (-low / scale).nan_to_num().round(), 0).to(torch.int32)
    return torch.where(finite, scale, float("nan")), zero


def _quantize(x: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    least, most = OUTPUTS[dtype]
    scaled = torch.maximum(torch.minimum(x * (1 / scale), (most - zero).float()), (least - zero).float())
    return (torch.where(scaled.isnan(), (least - zero).float(), scaled).round() + zero).to(dtype)
