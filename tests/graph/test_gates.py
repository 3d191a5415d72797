"""Both halves of a gated MLP that one product answers are multiplied in one call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.graph.test_shared_heads import rewritten_of
from tests.turns import in_turn

GATES = "gates of one product"

TAKEN: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "gelu of the first": (lambda y: functional.gelu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1], 1),
    "silu of the second": (lambda y: y[..., :12] * functional.silu(y[..., 12:]), 1),
    "the product turned": (lambda y: y.split(12, -1)[1] * functional.gelu(y.split(12, -1)[0], approximate="tanh"), 1),
    "one half twice": (lambda y: functional.gelu(y[..., :12]) * y[..., :12], 0),
    "halves that overlap": (lambda y: functional.gelu(y[..., :12]) * y[..., 8:20], 0),
    "a sum": (lambda y: functional.gelu(y[..., :12]) + y[..., 12:], 0),
    "along tokens": (lambda y: functional.relu(y[:, :2]) * y[:, 2:4], 0),
}


class Gated(nn.Module):
    def __init__(self, gate: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.gate = nn.Linear(16, 24), gate

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.gate(self.qkv(x)),)


@in_turn("name", TAKEN)
def test_gates(name: str) -> None:
    gate, count = TAKEN[name]
    program, counts = rewritten_of(model := Gated(gate).eval(), torch.randn(2, 4, 16))
    assert counts[GATES] == count and ("gated_activation" in program.text) is bool(count)
    for batch in (1, 2, 5):
        x = torch.randn(batch, 4, 16)
        torch.testing.assert_close(program(x)[0], model(x)[0], rtol=1e-5, atol=1e-5)
