"""The product of codes in plain torch, in 64-bit whole numbers: what the kernels are compared with, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour.kernels.bits_matmul.codes import BitWeight
from twofour.kernels.quantization import DYNAMIC, Quantization, quantize_input, quantize_output
from twofour.shapes import Float32, Int64, Shaped


def whole_product(
    x: Shaped[Tensor, "*tokens in"], weight: BitWeight, quantization: Quantization = DYNAMIC
) -> tuple[Int64[Tensor, "*tokens out"], Float32[Tensor, "*tokens 1"]]:
    """Return sum_k x_k w_k of the levels that inputs and weights are rounded to, and the scale of each token."""
    codes, scale, zero = quantize_input(x, quantization)
    levels = codes.long() * quantization.factor - zero.long()
    return levels @ weight.values().long().T, scale


def bits_matmul_reference(
    x: Shaped[Tensor, "*tokens in"],
    weight: BitWeight,
    bias: Float32[Tensor, " out"] | None = None,
    quantization: Quantization = DYNAMIC,
) -> Shaped[Tensor, "*tokens out"]:
    """Return x @ W.T + bias with x rounded to codes by `quantize_input`.

    The sum is exact; it is scaled and shifted in float32 as the kernels do: sum * (x scale * w scale) + bias. Of a
    weight with groups the sum of each is exact, they are scaled and added up in their order in float32, and that is
    scaled by the token. Inputs that stay real are multiplied in float64; kernels are near to it.

    Args:
        x: (..., in), float32 or bfloat16; or uint8 codes, where the range is static.
        weight: Of (out, in) codes.
        bias: float32 (out,) or None.
        quantization: Bits, levels and range of the inputs, and the dtype of the answer.

    Returns:
        (..., out) in the dtype that `quantization` says, that of x by default. A token that is not finite is NaN, with
        a static range one that holds NaN; in answers of bytes NaN is their least number.
    """
    if quantization.real:
        y = (x.double() @ weight.real().double().T).float()
    elif weight.group:
        sums, scale = _of_groups(x, weight, quantization)
        y = sums * scale
    else:
        whole, scale = whole_product(x, weight, quantization)
        y = whole.float() * (scale * weight.scales)
    y = lost_tokens(x, y if bias is None else y + bias, quantization)
    return quantize_output(y, quantization) if quantization.y_dtype else y.to(quantization.output(x))


def _of_groups(x: Tensor, weight: BitWeight, quantization: Quantization) -> tuple[Tensor, Tensor]:
    codes, scale, zero = quantize_input(x, quantization)
    levels, values = codes.long() * quantization.factor - zero.long(), weight.values().long()
    y = torch.zeros(*x.shape[:-1], len(values), dtype=torch.float32, device="cpu")
    for g in range(weight.scales.shape[1]):
        here = slice(g * weight.group, (g + 1) * weight.group)
        y = y + (levels[..., here] @ values[:, here].T).float() * weight.scales[:, g]
    return y, scale


def lost_tokens(
    x: Shaped[Tensor, "*tokens in"], y: Float32[Tensor, "*tokens out"], quantization: Quantization
) -> Float32[Tensor, "*tokens out"]:
    """Return answers that are NaN for tokens that hold NaN, which one range for all tokens would round to a code.

    Where inputs stay real infinities are lost too: they have no scale in which others are whole numbers.
    """
    if not x.is_floating_point():
        return y
    lost = ~torch.isfinite(x) if quantization.real else x.isnan()
    return y.masked_fill(lost.any(-1, keepdim=True), torch.nan)
