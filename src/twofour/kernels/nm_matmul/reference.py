"""The product with a packed weight in plain torch: what every fast kernel is compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twofour.kernels.base import Kernel, Prepared
from twofour.kernels.epilogue import PLAIN_EPILOGUE, Epilogue
from twofour.kernels.problem import MaybeTensor, Problem
from twofour.kernels.quantization import DYNAMIC, Quantization, quantize_input, quantize_output
from twofour.packing import Packed
from twofour.shapes import Float, Float32, Real


def nm_matmul_reference(
    x: Float[Tensor, "*tokens in"], packed: Packed, bias: Float[Tensor, " out"] | None = None
) -> Float[Tensor, "*tokens out"]:
    """Return x @ W.T + bias with W unpacked.

    Args:
        x: (..., in), a floating dtype.
        packed: Any N:M weight of shape (out, in).
        bias: (out,) or None.

    Returns:
        (..., out) in the dtype of `x`.
    """
    weight = packed.unpack().to(x.dtype)
    return torch.nn.functional.linear(x, weight, bias)


def nm_matmul_int8_reference(
    x: Real[Tensor, "tokens in"],
    packed: Packed,
    bias: Float32[Tensor, " out"] | None = None,
    quantization: Quantization = DYNAMIC,
    epilogue: Epilogue = PLAIN_EPILOGUE,
    other: Real[Tensor, "tokens out"] | None = None,
) -> Real[Tensor, "tokens out"]:
    """Return epilogue(x @ W.T + bias) as int8 kernels compute it: with a plain epilogue the same bits.

    sum = (q - zero) W^T in whole numbers; y = sum * (scale * W's scale) + bias in float32, each step rounded once.

    Args:
        x: (tokens, in), float32, bfloat16 or uint8.
        packed: int8 weight (out, in), `in` at most `LARGEST_REDUCTION`.
        bias: float32 (out,) or None.
        quantization: The input's range and the answer's dtype.
        epilogue: What happens to the float32 product.
        other: Its second operand, (tokens, out).

    Returns:
        (tokens, out) in `quantization.output(x)`.
    """
    whole, scale, zero = quantize_input(x, quantization)
    weight = replace(packed, scales=None).unpack()
    exact = (whole - zero).double() @ weight.double().T  # below 2^53: the sums are whole and exact
    y = exact.float() * (scale if packed.scales is None else scale * packed.scales.view(1, -1))
    y = epilogue.apply(y if bias is None else y + bias, other)
    return quantize_output(y, replace(quantization, y_dtype=quantization.output(x)))


@dataclass(frozen=True)
class ReferenceMatmul(Kernel):
    """The reference as a row of the table; it keeps the weight dense, so it saves neither time nor memory."""

    def refuses(self, packed: Packed) -> str | None:
        """Return why not: the reference takes every pattern and every floating dtype."""
        if packed.header.encoding.scaled and packed.scales is None:
            return f"computes in floating point, the weight is {packed.header.dtype} without scales"
        return None

    def prepare(self, weight: Packed | Tensor) -> Prepared:
        """Return the dense weight (out, in)."""
        assert isinstance(weight, Packed), type(weight)
        return Prepared(self, weight.unpack())

    def run(
        self, x: Tensor, weight: Prepared, bias: MaybeTensor, problem: Problem, other: MaybeTensor = None
    ) -> Tensor:
        """Multiply densely; see `Kernel.run`."""
        dense = weight.tensor
        assert len(dense) == problem.rows, (dense.shape, problem.rows)
        y = torch.nn.functional.linear(x, dense.to(x.dtype), bias)
        return problem.finish(y, other)


REFERENCE = ReferenceMatmul("nm_matmul_any_reference__torch", "nm_matmul", "any", "any", "cpu", "any", "unpacked")
