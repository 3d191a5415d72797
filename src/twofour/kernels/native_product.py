"""Native products with packed weights on the CPU: the call of every row whose weight stands behind a 64-byte header."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from twofour import native
from twofour.errors import KernelError
from twofour.kernels.base import Kernel, Prepared, Row
from twofour.kernels.epilogue import PLAIN_EPILOGUE, Epilogue
from twofour.kernels.operands import together
from twofour.kernels.problem import MaybeTensor, Problem
from twofour.kernels.quantization import DYNAMIC, LARGEST_REDUCTION, Quantization
from twofour.packing import Packed, layout_head


@dataclass(frozen=True)
class NativeProduct(Kernel):
    """One row: y = x @ W.T + bias with W packed; kinds of weights say how it is prepared and restored.

    Pruned positions are skipped: an infinity or NaN in `x` at such a position does not reach the output, except in rows
    of layout "bf16_tiles", which multiply them by zero: there it makes all outputs of its token NaN.
    """

    index: int
    any_axes: ClassVar[bool] = True

    def refuses(self, packed: Packed) -> str | None:
        """Return why not, as `Kernel.refuses`; int8 sums must fit int32."""
        if self.dtype == "int8" and packed.header.reduction > LARGEST_REDUCTION:
            return f"sums of {packed.header.reduction} inputs may exceed int32; at most {LARGEST_REDUCTION}"
        return super().refuses(packed)

    def run(
        self, x: Tensor, weight: Prepared, bias: MaybeTensor, problem: Problem, other: MaybeTensor = None
    ) -> Tensor:
        """Multiply; see `Kernel.run`. x may have any row stride.

        Args:
            x: (tokens, in), or contiguous (..., in), of a dtype in `reads`, or uint8 where int8 has a static range.
            weight: What `prepare` returned.
            bias: float32 (out,) or None.
            problem: What is computed.
            other: Second operand of the epilogue.

        Raises:
            KernelError: `x` or `bias` is of another dtype or not on the CPU, `other` does not fit, or the bytes were
                made for another kernel or another shape.
        """
        epilogue, quantization = problem.epilogue, problem.quantization
        if self.dtype == "int8" and quantization is not DYNAMIC and not quantization.plain:
            raise not_plain(self.name, quantization)
        if x.dtype is torch.uint8 and self.dtype == "int8" and quantization.dynamic:
            raise _no_range(self)
        if quantization is not DYNAMIC or type(x) is not Tensor:
            y = torch.empty((*x.shape[:-1], problem.rows), dtype=quantization.output(x), device="cpu")
        elif x.ndim == 2:
            y = x.new_empty(x.shape[0], problem.rows)  # half a microsecond less than all sizes but the last, unpacked
        else:
            y = x.new_empty(*x.shape[:-1], problem.rows)  # a microsecond less than `torch.empty` with dtype and device
        other = None if epilogue is PLAIN_EPILOGUE or epilogue.plain else second_operand(epilogue, other, x, y)
        x = x if x.is_contiguous() else together(x)
        given = self.index, x, weight.tensor, bias, y, *epilogue.codes, other, *quantization.codes
        if not self._call()(*given, native.threads()):
            raise foreign(self, weight.tensor, problem.rows, x.shape[-1])
        return y

    @abstractmethod
    def _call(self) -> Callable[..., bool]:
        """Return the native function of this row's table."""


def second_operand(epilogue: Epilogue, other: Tensor | None, x: Tensor, y: Tensor) -> Tensor | None:
    """Return `other` as the kernel reads it: (tokens, out), its rows contiguous, of y's dtype (float32 where whole)."""
    epilogue.require(other, tuple(y.shape))
    if other is None:
        return None
    real = torch.float32, *([y.dtype] if y.is_floating_point() else [])  # beside an input of whole numbers
    given = (x.dtype,) if x.is_floating_point() else real
    if other.dtype not in given or not other.is_cpu:
        raise KernelError(
            "the second operand of an epilogue does not fit",
            got=f"other of {other.dtype} on {other.device}",
            wanted=f"{' or '.join(map(str, dict.fromkeys(given)))} on the CPU",
            remedy="give `other` the dtype of the input, or of the answer to whole numbers, and its device",
        )
    other = other.to(y.dtype if y.is_floating_point() else torch.float32)
    other = other if other.ndim == 2 else other.reshape(-1, other.size(-1))
    return together(other.resolve_neg())


def not_plain(name: str, quantization: Quantization) -> KernelError:
    """Return the refusal of inputs that are other whole numbers than int8 rows take."""
    return KernelError(
        f"{name} does not take these whole numbers as inputs",
        got=f"{quantization.bits} bits, {quantization.levels}",
        wanted="8 bits, unsigned",
        remedy="multiply by a row of `bits_matmul`, or leave `bits` and `levels` out",
    )


def _no_range(kernel: NativeProduct) -> KernelError:
    return KernelError(
        f"{kernel.name} does not know what its input stands for",
        got="x of torch.uint8 without scale and zero point",
        wanted="a static range",
        remedy="pass quantization=Quantization(x_scale, x_zero) to the Problem",
    )


def foreign(kernel: Row, weight: Tensor, out_features: int, in_features: int) -> KernelError:
    """Build the error for a weight that another kernel prepared."""
    head = layout_head(weight)
    return KernelError(
        f"{kernel.name} was given bytes made for another kernel",
        got=f"a buffer that starts with {head[:48]!r}",
        wanted=f"layout {kernel.layout!r} of a {kernel.pattern} {kernel.dtype} weight ({out_features}, {in_features})",
        remedy="prepare the weight with kernel.prepare(packed)",
    )
