"""The dense product by oneDNN on a weight it has reordered once: the fair dense baseline in float32.

torch's default float32 linear goes to MKL, which was 2.2 times slower than oneDNN on one AMD CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.kernels.base import Kernel, Prepared
from twofour.kernels.epilogue import COMBINES
from twofour.kernels.operands import plain_bias, require_memory
from twofour.kernels.problem import MaybeTensor, Problem
from twofour.native import pages
from twofour.packing import Packed, dense_of

REORDER_TOKENS = 128
"""Token count that the reorder is told; the blocked weight serves every other count too."""

ATTRIBUTES = {"gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "silu": ("swish", "")}
"""Activation -> what oneDNN calls it: a post-operation and its algorithm. Its ReLU makes NaN zero and is left out."""


@dataclass(frozen=True)
class OneDnnMatmul(Kernel):
    """oneDNN inner product on a prepacked weight, as torch.compile's freezing uses it."""

    def unavailable(self) -> str | None:
        """Return why not: torch was built without oneDNN."""
        return None if torch.backends.mkldnn.is_available() else "this build of torch has no oneDNN"

    def prepare(self, weight: Packed | Tensor) -> Prepared:
        """Return the weight in oneDNN's blocked order: an opaque tensor of mkldnn layout."""
        dense = dense_of(weight)
        blocked = torch.ops.mkldnn._reorder_linear_weight(dense.contiguous(), REORDER_TOKENS)
        return Prepared(self, pages.collapse(blocked))

    def run(
        self, x: Tensor, weight: Prepared, bias: MaybeTensor, problem: Problem, other: MaybeTensor = None
    ) -> Tensor:
        """Multiply; see `Kernel.run`."""
        require_memory(x)
        epilogue, bias = problem.epilogue, plain_bias(bias, problem.rows)
        if epilogue.plain:
            return torch.ops.mkldnn._linear_pointwise(x, weight.tensor, bias, "none", [], "")
        epilogue.require(other, (x.size(0), problem.rows))
        if epilogue.activation == "none":
            combine = "add" if epilogue.combine == "add" else "mul"
            return torch.ops.mkldnn._linear_pointwise.binary(x, other, weight.tensor, bias, combine)
        kind, algorithm = ATTRIBUTES.get(epilogue.activation, ("none", ""))
        y = torch.ops.mkldnn._linear_pointwise(x, weight.tensor, bias, kind, [], algorithm)
        y = y.relu_() if epilogue.activation == "relu" else y
        return y if other is None else COMBINES[epilogue.combine](y, other)


ONEDNN = OneDnnMatmul("dense_matmul_f32_prepacked__onednn", "dense_matmul", "dense", "float32", "cpu", "any", "onednn")
