"""Attention that a model writes out as products and a softmax runs as one call, hidden queries included."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.turns import in_turn
from twofour.capture import capture
from twofour.graph import Program, simplify
from twofour.graph.rules.attention_formula import ATTENTION_FORMULA

Weights = Callable[[Tensor, Tensor, Tensor], Tensor]


class Eager(nn.Module):
    """Attention of four heads over (batch, length, 32) as models write it.

    Args:
        weights: Queries, keys (batch, heads, length, width) and a mask to the weights of the values.
        shown: Whether the model answers with the weights too.
    """

    def __init__(self, weights: Weights, *, shown: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.weights, self.shown = weights, shown

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (layer(x).view(x.shape[0], -1, 4, 8).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = self.weights(q, k, mask)
        y = self.out((weights @ v).transpose(1, 2).reshape(x.shape))
        return (y, weights) if self.shown else (y,)


FORMS: dict[str, Weights] = {
    "scaled": lambda q, k, m: ((q @ k.transpose(2, 3)) * 8**-0.5 + m).softmax(-1),
    "divided": lambda q, k, m: (torch.matmul(q, k.mT) / 8**0.5 + m).softmax(dim=-1, dtype=torch.float32),
    "queries scaled": lambda q, k, m: ((q * 0.25) @ (k.transpose(-1, -2) * 0.5) + m).softmax(3),
    "positions, then padding": lambda q, k, m: ((q @ k.mT) / 8**0.5 + m[:, :1] + m[:1, :, :1]).softmax(-1),
    "mask first": lambda q, k, m: (m + q @ k.transpose(-2, -1)).softmax(-1),
    "no mask": lambda q, k, m: (q @ k.permute(0, 1, 3, 2) / 3).softmax(-1),
}
OTHERS: dict[str, Weights] = {
    "over queries": lambda q, k, m: (q @ k.mT + m).softmax(2),
    "twice the mask": lambda q, k, m: (torch.add(q @ k.mT, m, alpha=2)).softmax(-1),
    "a mask with more rows": lambda q, k, m: (q[:, :, :1] @ k.mT + m).softmax(-1),
    "tensor as factor": lambda q, k, m: (q @ k.mT * m[0, 0, 0]).softmax(-1),
}


def rewritten(model: nn.Module, *example: Tensor) -> tuple[Program, int]:
    """Return the graph with this rule alone applied, and its count."""
    graph = capture(model, dict(zip(("x", "mask"), example, strict=True)))
    simplify(graph.module)
    count = ATTENTION_FORMULA.rewrite(graph.module)
    return Program(graph.module), count


@cache
def of_form(form: str) -> tuple[Eager, Program, int]:
    """Return the model of a form, its graph with this rule alone applied, and its count: captured once for all."""
    model = Eager(FORMS[form]).eval()
    return model, *rewritten(model, *operands())


def operands(batch: int = 2, length: int = 7) -> tuple[Tensor, Tensor]:
    torch.manual_seed(length)
    return torch.randn(batch, length, 32), torch.randn(batch, 1, length, length)


@pytest.mark.parametrize("form", FORMS)
def test_it_is_one_call(form: str) -> None:
    model, program, count = of_form(form)
    assert count == 1
    for batch, length in ((2, 7), (3, 1), (1, 40)):
        x, mask = operands(batch, length)
        torch.testing.assert_close(program(x, mask)[0], model(x, mask)[0], atol=1e-5, rtol=1e-5)


@in_turn("form", ["scaled", "divided", "queries scaled", "mask first"])
@in_turn("hidden", [-torch.inf, torch.nan, torch.inf, torch.finfo(torch.float32).min])
def test_queries_that_see_nothing_answer_as_before(form: str, hidden: float) -> None:
    model, program, _ = of_form(form)
    x, mask = operands()
    mask[0, :, 3], mask[1, :, 2, 1:] = hidden, hidden
    want = model(x, mask)[0]
    assert want[0, 3].isfinite().all() == (hidden == torch.finfo(torch.float32).min)
    torch.testing.assert_close(program(x, mask)[0], want, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("form", OTHERS)
def test_what_is_no_attention_stays(form: str) -> None:
    x, mask = operands()
    model = Eager(OTHERS[form]).eval()
    program, count = rewritten(model, x, mask)
    assert count == 0
    torch.testing.assert_close(program(x, mask)[0], model(x, mask)[0], atol=1e-5, rtol=1e-5)


def test_weights_that_are_an_answer_stay() -> None:
    model = Eager(FORMS["scaled"], shown=True).eval()
    program, count = rewritten(model, *operands())
    assert count == 0
    for found, want in zip(program(*operands()), model(*operands()), strict=True):
        torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


def test_a_compiled_model_reads_the_columns_of_its_products() -> None:
    model = Eager(FORMS["scaled"]).eval()
    x, mask = operands()
    fast = twofour.compile(model, (x, mask), graph=True)
    assert fast.plan.account.rewrites["attention written out"] == 1
    assert fast.plan.account.rewrites["heads read in place"] == 1
    # Which library runs a product of this size is measured; what lay between the products is gone either way.
    left = {name for name, _ in fast.plan.account.calls.through}
    assert not left & {"softmax", "matmul", "bmm", "transpose", "permute", "view", "mul", "add"}
    mask[0, :, 3] = -torch.inf
    torch.testing.assert_close(fast(x, mask)[0], model(x, mask)[0], atol=1e-5, rtol=1e-5, equal_nan=True)


def test_masks_that_layers_share_are_added_once_and_permuted_heads_read_in_place() -> None:
    class Layers(nn.Module):
        """Two layers that add positions, then padding, and put their heads back by `permute`, as MPNet does."""

        def __init__(self) -> None:
            super().__init__()
            self.products = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            positions = (mask[:1] - 1).contiguous()
            for first in (0, 4):
                q, k, v = (self.products[first + i](x).view(*x.shape[:2], 4, 8).permute(0, 2, 1, 3) for i in range(3))
                weights = ((q @ k.transpose(-1, -2)) / 8**0.5 + positions + mask).softmax(-1)
                heads = (weights @ v).permute(0, 2, 1, 3).contiguous()
                x = self.products[first + 3](heads.view(x.shape))
            return x

    model, (x, mask) = Layers().eval(), operands()
    fast = twofour.compile(model, (x, mask), graph=True)
    rewrites = fast.plan.account.rewrites
    assert (rewrites["attention written out"], rewrites["heads read in place"]) == (2, 2)
    assert fast.plan.account.outlines["after"].computing < 12
    torch.testing.assert_close(fast(x, mask), model(x, mask), atol=1e-5, rtol=1e-5)


def test_a_view_of_its_answer_is_still_there() -> None:
    class Viewed(Eager):
        def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
            q, k, v = (layer(x).view(x.shape[0], -1, 4, 8).transpose(1, 2) for layer in (self.q, self.k, self.v))
            return ((self.weights(q, k, mask) @ v).view(-1, x.shape[1], 8),)

    model, (x, mask) = Viewed(FORMS["scaled"]), operands()
    program, count = rewritten(model, x, mask)
    assert count == 1
    with torch.no_grad():
        torch.testing.assert_close(program(x, mask)[0], model(x, mask)[0], atol=1e-6, rtol=1e-5)
