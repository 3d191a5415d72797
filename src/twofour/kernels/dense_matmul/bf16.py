"""The dense products of float32 called on bfloat16 operands: what a bfloat16 sparse kernel has to beat.

oneDNN uses AMX where the CPU has it, else vdpbf16ps, else float32 arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.kernels.base import Kernel
from twofour.kernels.dense_matmul.onednn import ONEDNN
from twofour.kernels.dense_matmul.plain import PLAIN
from twofour.kernels.epilogue import PLAIN_EPILOGUE, Epilogue
from twofour.packing import Packed


@dataclass(frozen=True)
class Bf16Matmul(Kernel):
    """A float32 row on a bfloat16 weight; a float32 input is rounded on the way in and the answer widened.

    Attributes:
        kernel: The float32 row.
        bias: dtype in which that row wants the bias of a bfloat16 product.
    """

    kernel: Kernel
    bias: torch.dtype

    def unavailable(self) -> str | None:
        """Return why the float32 row cannot run here."""
        return self.kernel.unavailable()

    def least_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of the weight in bfloat16."""
        return 2 * out_features * in_features

    def prepare(self, weight: Packed | Tensor) -> Tensor:
        """Return the weight rounded to bfloat16, in the float32 row's order."""
        dense = weight.unpack() if isinstance(weight, Packed) else weight.detach()
        return self.kernel.prepare(dense.to(torch.bfloat16))

    def run(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out_features: int,
        epilogue: Epilogue = PLAIN_EPILOGUE,
        other: Tensor | None = None,
    ) -> Tensor:
        """Multiply; see `Kernel.run`. The epilogue of a float32 input is applied to the widened product."""
        low = x.dtype is torch.bfloat16
        # oneDNN wants a bias of x's type beside a second operand, and takes float32 elsewhere.
        held = torch.bfloat16 if low and epilogue.combine != "none" and epilogue.activation == "none" else self.bias
        bias = None if bias is None else bias.to(held)
        if low:
            return self.kernel.run(x, weight, bias, out_features, epilogue, other)
        y = self.kernel.run(x.to(torch.bfloat16), weight, bias, out_features).to(x.dtype)
        return y if epilogue.plain else epilogue.apply(y, other)


_ROW = ("dense_matmul", "dense", "bfloat16", "cpu", "any")
PLAIN_BF16 = Bf16Matmul("dense_matmul_bf16_linear__torch", *_ROW, PLAIN.layout, PLAIN, torch.bfloat16)
ONEDNN_BF16 = Bf16Matmul("dense_matmul_bf16_prepacked__onednn", *_ROW, ONEDNN.layout, ONEDNN, torch.float32)
