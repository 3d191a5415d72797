"""The dense float32 product by MKL on a weight packed for one token count: the fastest dense one on some Intel CPUs.

torch.compile's freezing uses it too. The packed weight serves that token count alone; at others torch multiplies by the
plain weight, which is therefore kept beside it. Whatever its size, a packed weight takes 8 MB more than the plain one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.kernels.base import Kernel, Prepared
from twofour.kernels.dense_matmul.plain import PLAIN
from twofour.kernels.operands import plain_bias, require_memory
from twofour.kernels.problem import MaybeTensor, Problem
from twofour.packing import Packed

TOKENS = (8, 32, 128, 512)
"""Token counts with a row of their own; a single token is a product by a vector, where packing brings nothing."""


@dataclass(frozen=True)
class MklMatmul(Kernel):
    """`mkl::_mkl_linear` on a prepacked weight."""

    @property
    def tokens(self) -> int:
        """The token count it is packed for."""
        return self.tokens_most

    def unavailable(self) -> str | None:
        """Return why not: torch was built without MKL."""
        return None if torch.backends.mkl.is_available() else "this build of torch has no MKL"

    def beside_bytes(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """Return the bytes of the plain weight."""
        return (4 * out_features * in_features,)

    def prepare(self, weight: Packed | Tensor) -> Prepared:
        """Return the weight in MKL's order, an opaque tensor, and the plain weight beside it."""
        plain = PLAIN.prepare(weight).tensor
        return Prepared(self, torch.ops.mkl._mkl_reorder_linear_weight(plain, self.tokens), (plain,))

    def restore(self, prepared: Prepared) -> Tensor:
        """Return the plain weight (out, in)."""
        return prepared.beside[0]

    def run(
        self, x: Tensor, weight: Prepared, bias: MaybeTensor, problem: Problem, other: MaybeTensor = None
    ) -> Tensor:
        """Multiply; see `Kernel.run`."""
        require_memory(x)
        plain, bias = weight.beside[0], plain_bias(bias, problem.rows)
        if len(x) != self.tokens:
            y = torch.nn.functional.linear(x, plain, bias)
        else:
            y = torch.ops.mkl._mkl_linear(x, weight.tensor, plain, bias, self.tokens)
        return problem.finish(y, other)


MKL = tuple(
    MklMatmul(
        *(f"dense_matmul_f32_packed{count}__mkl", "dense_matmul", "dense", "float32", "cpu", "any", f"mkl{count}"),
        tokens_least=count,
        tokens_most=count,
    )
    for count in TOKENS
)
