"""Heads that are repeated for attention are read as they are; queries and keys are turned in one call, or one each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.graph.small import rotated
from tests.turns import in_turn
from twofour.capture import capture
from twofour.graph import Program, arrange, fuse, simplify
from twofour.graph.base import aten, product_of

HEADS, KEY_HEADS, WIDTH = 6, 2, 8
SHARED, TURNED = "heads repeated for attention", "heads turned by positions"

REPEATS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda t: t[:, :, None].expand(-1, -1, 3, -1, -1).reshape(t.shape[0], HEADS, t.shape[2], WIDTH),
    "interleaved": lambda t: t.repeat_interleave(3, 1),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "one after the other": lambda t: t[:, None].expand(-1, 3, -1, -1, -1).reshape(t.shape[0], HEADS, t.shape[2], WIDTH),
    "tiled": lambda t: t.repeat(1, 3, 1, 1),
}


class Shared(nn.Module):
    """Attention with fewer key heads, which are repeated before it, and rotary positions.

    Args:
        repeat: From key heads to query heads.
        turn: The rotation of queries and of keys.
        seen: Whether the turned keys are given back too.
    """

    def __init__(
        self,
        repeat: Callable[[Tensor], Tensor],
        turn: Callable[[Tensor, Tensor, Tensor], Tensor] = rotated,
        other: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
        *,
        seen: bool = False,
    ) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, (HEADS + 2 * KEY_HEADS) * WIDTH)
        self.repeat, self.turn, self.other, self.seen = repeat, turn, other or turn, seen

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        batch, length, _ = x.shape
        sizes = (HEADS * WIDTH, KEY_HEADS * WIDTH, KEY_HEADS * WIDTH)
        q, k, v = (t.view(batch, length, -1, WIDTH).transpose(1, 2) for t in self.qkv(x).split(sizes, -1))
        angles = torch.arange(length)[:, None] / 100 ** (torch.arange(WIDTH) % (WIDTH // 2) / WIDTH)
        cos, sin = angles.cos(), angles.sin()
        q, k = self.turn(q, cos, sin), self.other(k, cos, sin)
        y = functional.scaled_dot_product_attention(q, self.repeat(k), self.repeat(v), is_causal=True)
        y = y.transpose(1, 2).reshape(batch, length, -1)
        return (y, k) if self.seen else (y,)


def rewritten(model: nn.Module) -> tuple[Program, dict[str, int]]:
    """Return the graph with its products as torch's linear layers again, and the counts."""
    return rewritten_of(model, torch.randn(2, 5, 16))


def rewritten_of(model: nn.Module, x: Tensor) -> tuple[Program, dict[str, int]]:
    """The same of a model whose linear layer is called `qkv`, from an example."""
    graph = capture(model.eval(), {"x": x})
    module = graph.module
    counts = simplify(module) | fuse(module)
    for node in [node for node in module.graph.nodes if product_of(node)]:
        with module.graph.inserting_before(node):
            weight, bias = module.graph.get_attr("qkv__weight"), module.graph.get_attr("qkv__bias")
            new = module.graph.call_function(aten.linear.default, (node.args[0], weight, bias))
        new.meta = {"val": node.meta["val"]}
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)
    counts |= arrange(module)
    return Program(module), counts


def require_answers(model: nn.Module, program: Program) -> None:
    for batch, length in ((2, 5), (1, 9), (3, 1)):
        x = torch.randn(batch, length, 16)
        for strange in (0.0, torch.nan, torch.inf, 1e-40):
            x[0, -1, 2] = strange
            exact = model.double()(x.double())
            for found, want in zip(program(x), exact, strict=True):
                torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-5, equal_nan=True)
            model.float()


@pytest.mark.parametrize("name", REPEATS)
def test_repeated_heads_are_read_as_they_are(name: str) -> None:
    model = Shared(REPEATS[name])
    program, counts = rewritten(model)
    assert counts[SHARED] == counts[TURNED] == 1
    assert not {"expand", "repeat_interleave"} & set(program.text.replace("(", " ").replace(".", " ").split())
    require_answers(model, program)


@pytest.mark.parametrize("name", OTHERS)
def test_heads_in_another_order_stay(name: str) -> None:
    model = Shared(OTHERS[name])
    program, counts = rewritten(model)
    assert counts[SHARED] == 0
    require_answers(model, program)


def half_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Sines on the left, another order of the factors."""
    half = x.shape[-1] // 2
    return sin * torch.cat((-x[..., half:], x[..., :half]), dim=-1) + cos * x


def turned_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((x[..., half:], -x[..., :half]), dim=-1) * sin


def by_sines(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotated(x, sin, cos)


def partly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat((rotated(x[..., :4], cos[..., :4], sin[..., :4]), x[..., 4:]), -1)


@in_turn(
    ("turn", "other", "count"),
    [
        (half_turned, None, 1),
        (rotated, half_turned, 1),
        (turned_back, None, 0),
        (rotated, by_sines, 2),
        (partly, None, 0),
        (rotated, lambda x, *_: x, 1),
    ],
)
def test_rotations_are_calls_equal_ones_one(
    turn: Callable[..., Tensor], other: Callable[..., Tensor] | None, count: int
) -> None:
    model = Shared(REPEATS["expanded"], turn, other)
    program, counts = rewritten(model)
    assert counts[TURNED] == count
    require_answers(model, program)


def test_keys_that_others_read_are_turned_by_themselves() -> None:
    model = Shared(REPEATS["expanded"], seen=True)
    program, counts = rewritten(model)
    assert (counts[TURNED], counts[SHARED]) == (2, 1)
    require_answers(model, program)


MASKS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], int]] = {
    "earlier keys": (lambda i, j, _: j[None, :] <= i[:, None], 1),
    "the other way round": (lambda i, j, _: i[:, None] >= j[None, :], 1),
    "and those that are there": (lambda i, j, there: (j[None, :] <= i[:, None]) & there[:, None, None], 1),
    "later keys": (lambda i, j, _: j[None, :] >= i[:, None], 0),
    "keys before": (lambda i, j, _: j[None, :] < i[:, None], 0),
    "or": (lambda i, j, there: (j[None, :] <= i[:, None]) | there[:, None, None], 0),
}


class Masked(nn.Module):
    def __init__(self, mask: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor, there: Tensor) -> tuple[Tensor]:
        q = x.view(x.shape[0], x.shape[1], 2, 8).transpose(1, 2)
        positions = torch.arange(x.shape[1])
        mask = self.mask(positions, positions, there)
        mask = mask[None, None] if mask.ndim == 2 else mask
        return (functional.scaled_dot_product_attention(q, q, q, mask),)


@in_turn("name", MASKS)
def test_a_comparison_of_positions_is_no_mask(name: str) -> None:
    mask, count = MASKS[name]
    model = Masked(mask).eval()
    graph = capture(model, {"x": torch.randn(2, 5, 16), "there": torch.ones(2, 5) > 0})
    simplify(graph.module)
    assert fuse(graph.module)["masks from positions"] == count
    program = Program(graph.module)
    assert ("arange" in program.text) is (count == 0)
    for length in (5, 1, 12):
        x, there = torch.randn(3, length, 16), torch.rand(3, length) > 0.4
        there[0] = False
        found, want = program(x, there)[0], model.double()(x.double(), there)[0]
        torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-5)


def test_factors_of_each_head_are_not_joined() -> None:
    class Each(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 3 * HEADS * WIDTH)
            self.register_buffer("factors", torch.randn(2, HEADS, 1, WIDTH))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            parts = (t.view(*t.shape[:2], -1, WIDTH).transpose(1, 2) for t in self.qkv(x).split(HEADS * WIDTH, -1))
            q, k, v = parts
            q, k = (rotated(t, self.factors[0], self.factors[1]) for t in (q, k))
            return (functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2),)

    program, counts = rewritten(each := Each())
    assert counts[TURNED] == 0
    require_answers(each, program)


def test_a_mask_that_is_an_answer_is_no_memory_of_the_caller() -> None:
    class Answers(Masked):
        def forward(self, x: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
            whole = there & torch.ones_like(there)
            q = x.view(x.shape[0], x.shape[1], 2, 8).transpose(1, 2)
            return functional.scaled_dot_product_attention(q, q, q, whole[:, None, None]), whole

    graph = capture(Answers(MASKS["or"][0]).eval(), {"x": torch.randn(2, 5, 16), "there": torch.ones(2, 5) > 0})
    simplify(graph.module)
    fuse(graph.module)
    there = torch.rand(2, 5) > 0.3
    answer = Program(graph.module)(torch.randn(2, 5, 16), there)[1]
    assert torch.equal(answer, there) and answer.data_ptr() != there.data_ptr()
