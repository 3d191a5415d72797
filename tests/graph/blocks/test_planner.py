"""Which operators become one block: the table, convexity, outside readers, views, changes in place, measured times."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import fx

from tests.graph.blocks.graphs import Grown, assert_same, fused
from twofour.capture import capture
from twofour.graph.base import aten
from twofour.graph.blocks import APART, FUSED, Candidate, Measured
from twofour.graph.mapping import MappingType
from twofour.graph.operators import mapping_of
from twofour.measure.cache import Cache


def opaque(made: Grown, x: fx.Node) -> fx.Node:
    """Something that no block takes."""
    return made.call(aten.cumsum.default, x, 0)


def test_a_residual_diamond_stays_acyclic() -> None:
    made = Grown()
    first = made.call(aten.tanh.default, made.input(torch.randn(4, 8)))
    around = made.call(aten.neg.default, opaque(made, made.call(aten.abs.default, first)))
    last = made.call(aten.add.Tensor, made.call(aten.sigmoid.default, first), around)
    blocks, before, after = fused(made.module(last))
    assert sorted(blocks.labels) == ["block: tanh + abs + sigmoid", "block: neg + add"] or blocks.fused == 5
    assert_same(before, after, made.inputs)


def test_a_diamond_without_a_way_around_is_one_block() -> None:
    made = Grown()
    first = made.call(aten.tanh.default, made.input(torch.randn(4, 8)))
    left, right = made.call(aten.exp.default, first), made.call(aten.sin.default, first)
    blocks, before, after = fused(made.module(made.call(aten.mul.Tensor, left, right)))
    assert blocks.labels == ["block: tanh + exp + sin + mul"]
    assert_same(before, after, made.inputs)


def test_one_block_for_each_convolution() -> None:
    made = Grown()
    x, skip = made.input(torch.randn(2, 4, 6, 6)), made.input(torch.randn(2, 4, 6, 6))
    weight, scale, shift = (made.input(torch.randn(shape)) for shape in ((4, 4, 3, 3), (4, 1, 1), (4, 1, 1)))
    for _ in range(3):
        y = made.call(aten.conv2d.default, x, weight, None, [1, 1], [1, 1])
        y = made.call(aten.add.Tensor, made.call(aten.mul.Tensor, y, scale), shift)
        x = made.call(aten.relu.default, made.call(aten.add.Tensor, made.call(aten.relu.default, y), skip))
    blocks, before, after = fused(made.module(x))
    assert blocks.labels == ["block: mul + add + relu + add + relu"] * 3
    assert_same(before, after, made.inputs, 1e-4)


def test_what_others_read_is_written_and_views_of_it_are_made_again() -> None:
    made = Grown()
    first = made.call(aten.exp.default, made.input(torch.randn(4, 8)))
    total = made.call(aten.sum.dim_IntList, first, [-1])
    column = made.call(aten.unsqueeze.default, total, -1)
    last = made.call(aten.div.Tensor, first, column)
    outside = opaque(made, column)
    blocks, before, after = fused(made.module(last, first, outside, total))
    assert blocks.labels == ["block: exp + sum + div"]
    assert_same(before, after, made.inputs)


def test_a_block_does_not_reach_over_a_change_in_place() -> None:
    made = Grown()
    x = made.input(torch.randn(4, 8))
    kept = made.call(aten.mul.Tensor, x, 2.0)
    first = made.call(aten.tanh.default, kept)
    made.call(aten.add_.Tensor, kept, 1.0)
    last = made.call(aten.add.Tensor, made.call(aten.neg.default, kept), first)
    blocks, before, after = fused(made.module(last, kept))
    assert blocks.labels == ["block: mul + tanh", "block: neg + add"] or len(blocks.labels) == 2
    inputs = [torch.randn(4, 8)]
    assert_same(before, after, inputs)


def test_readers_between_the_operators_of_a_block_move_behind_it() -> None:
    made = Grown()
    first = made.call(aten.tanh.default, made.input(torch.randn(4, 8)))
    outside = opaque(made, first)
    last = made.call(aten.exp.default, first)
    blocks, before, after = fused(made.module(outside, last))
    assert blocks.labels == ["block: tanh + exp"]
    assert_same(before, after, made.inputs)


def test_softmax_of_masked_scores_is_one_block() -> None:
    made = Grown()
    scores, mask = made.input(torch.randn(2, 3, 5, 7)), made.input(torch.rand(2, 1, 1, 7) > 0.3)
    scaled = made.call(aten.mul.Tensor, scores, 0.125)
    masked = made.call(aten.masked_fill.Scalar, scaled, made.call(aten.logical_not.default, mask), -torch.inf)
    blocks, before, after = fused(made.module(made.call(aten.softmax.int, masked, -1)))
    assert blocks.fused == 4 and len(blocks.labels) == 1
    assert_same(before, after, made.inputs)


def test_a_tensor_smaller_than_the_domain_that_others_read_is_not_fused() -> None:
    made = Grown()
    small = made.call(aten.exp.default, made.input(torch.randn(8)))
    last = made.call(aten.neg.default, made.call(aten.mul.Tensor, small, made.input(torch.randn(4, 8))))
    blocks, before, after = fused(made.module(last, small))
    assert blocks.labels == ["block: mul + neg"]
    assert_same(before, after, made.inputs)


class Edited:
    """Times that a test chose: seconds of candidates by their operators."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self.edited = dict(seconds)

    def seconds(self, candidate: Candidate) -> dict[str, float]:
        label = candidate.block.label.removeprefix("block: ")
        return {FUSED: self.edited.get(label, 1.0), APART: 1.0 * len(candidate)}


@pytest.mark.parametrize("slow", [False, True])
def test_yellow_cells_are_decided_by_the_times(slow: bool) -> None:
    made = Grown()
    first = made.call(aten.mul.Tensor, made.input(torch.randn(4, 8)), made.input(torch.randn(8)))
    last = made.call(aten.add.Tensor, first, made.input(torch.randn(8)))
    assert mapping_of(first) is mapping_of(last) is MappingType.ONE_TO_MANY
    blocks, before, after = fused(made.module(last), Edited({"mul + add": 9.0 if slow else 1.0}))
    assert blocks.labels == ([] if slow else ["block: mul + add"])
    assert ("one by one they are faster" in blocks.text()) == slow
    assert_same(before, after, made.inputs)


def test_green_blocks_that_measure_slower_stay_operators() -> None:
    made = Grown()
    last = made.call(aten.exp.default, made.call(aten.tanh.default, made.input(torch.randn(4, 8))))
    blocks, _, after = fused(made.module(last), Edited({"tanh + exp": 9.0}))
    assert not blocks.labels and blocks.alone == {"one by one they are faster": 2}
    assert "block" not in after.text


def test_decisions_change_when_the_caches_times_are_edited(tmp_path) -> None:
    def graph() -> fx.GraphModule:
        made = Grown()
        return made.module(made.call(aten.exp.default, made.call(aten.tanh.default, made.input(torch.ones(4, 8)))))

    for fast in (FUSED, APART):
        cache = Cache(tmp_path / f"{fast}.json")
        module = graph()
        candidate = Candidate.of([node for node in module.graph.nodes if node.op == "call_function"])
        cache.put(Measured(cache).case(candidate), {FUSED: 2.0, APART: 2.0} | {fast: 1.0})
        blocks, _, _ = fused(module, Measured(cache))
        assert bool(blocks.labels) == (fast == FUSED)


def test_measuring_keeps_times(tmp_path) -> None:
    cache = Cache(tmp_path / "times.json")
    made = Grown()
    last = made.call(aten.exp.default, made.call(aten.tanh.default, made.input(torch.randn(4, 8))))
    candidate = Candidate.of([last.args[0], last])
    made.graph.output((last,))
    times = Measured(cache).seconds(candidate)
    assert set(times) == {FUSED, APART} and all(seconds > 0 for seconds in times.values())
    assert set(cache.get(Measured(cache).case(candidate))) == {FUSED, APART}


def test_a_block_survives_pickling(tmp_path) -> None:
    made = Grown()
    total = made.call(aten.sum.dim_IntList, made.call(aten.exp.default, made.input(torch.randn(4, 8))), [-1], True)
    module = made.module(total)
    _, before, after = fused(module)
    torch.save(after, tmp_path / "program.pt")
    assert_same(before, torch.load(tmp_path / "program.pt", weights_only=False), made.inputs)


def test_other_sizes_run_without_planning_again() -> None:
    made = Grown()
    x, row = made.input(torch.randn(4, 8)), made.input(torch.randn(8))
    last = made.call(aten.softmax.int, made.call(aten.add.Tensor, made.call(aten.tanh.default, x), row), -1)
    _, before, after = fused(made.module(last))
    for rows in (4, 1, 33, 0):
        assert_same(before, after, [torch.randn(rows, 8), torch.randn(8)])
    assert_same(before, after, [torch.randn(8, 5).t(), torch.randn(8)])


def test_rotary_embeddings_are_one_block() -> None:
    made = Grown()
    q, cos, sin = (made.input(torch.randn(shape)) for shape in ((2, 3, 5, 8), (1, 1, 5, 8), (5, 8)))
    lower, upper = made.call(aten.slice.Tensor, q, 3, 0, 4), made.call(aten.slice.Tensor, q, -1, 4, 2**63 - 1)
    turned = made.call(aten.cat.default, [made.call(aten.neg.default, upper), lower], -1)
    last = made.call(
        aten.add.Tensor, made.call(aten.mul.Tensor, q, cos), made.call(aten.mul.Tensor, turned, sin)
    )  # fmt: skip
    blocks, before, after = fused(made.module(last))
    assert blocks.fused == 5 and len(blocks.labels) == 1 and "slice" not in after.text
    assert_same(before, after, made.inputs)


def test_joined_parts_are_read_again_as_slices() -> None:
    made = Grown()
    x = made.input(torch.randn(4, 6))
    joined = made.call(aten.cat.default, [made.call(aten.tanh.default, x), made.call(aten.neg.default, x), x], 1)
    middle = made.call(aten.slice.Tensor, made.call(aten.exp.default, joined), 1, 6, 12)
    blocks, before, after = fused(made.module(joined, made.call(aten.mul.Tensor, middle, x)))
    assert len(blocks.labels) == 1 and blocks.fused == 5
    assert_same(before, after, made.inputs)


def test_unequal_parts_are_no_block() -> None:
    made = Grown()
    x = made.input(torch.randn(4, 6))
    joined = made.call(aten.cat.default, [made.call(aten.tanh.default, x), made.input(torch.randn(4, 2))], 1)
    blocks, before, after = fused(made.module(made.call(aten.neg.default, joined)))
    assert not blocks.labels and "equal ones" in blocks.text()
    assert_same(before, after, made.inputs)


def test_permutations_vanish_between_operators() -> None:
    made = Grown()
    y, scale, skip = (made.input(torch.randn(shape)) for shape in ((2, 5, 6, 4), (4,), (2, 4, 5, 6)))
    moved = made.call(aten.permute.default, made.call(aten.mul.Tensor, y, scale), [0, 3, 1, 2])
    back = made.call(aten.transpose.int, made.call(aten.add.Tensor, moved, skip), -1, 2)
    blocks, before, after = fused(made.module(made.call(aten.relu.default, back), moved))
    assert blocks.labels == ["block: mul + add + relu"]
    assert_same(before, after, made.inputs)


def test_squeeze_and_excitation_is_computed_with_its_pool() -> None:
    made = Grown()
    x = made.call(aten.silu.default, made.input(torch.randn(2, 5, 6, 6)))
    pooled = made.call(aten.adaptive_avg_pool2d.default, x, [1, 1])
    last = made.call(aten.mul.Tensor, x, made.call(aten.sigmoid.default, pooled))
    blocks, before, after = fused(made.module(last))
    assert blocks.labels == ["block: silu + adaptive_avg_pool2d + sigmoid + mul"]
    assert_same(before, after, made.inputs)


def test_attention_of_windows_stays_right() -> None:
    """Scores and masks under different shapes: views between operators that move values end a block."""
    made = Grown()
    scores, bias, mask = (made.input(torch.randn(shape)) for shape in ((8, 3, 5, 5), (3, 5, 5), (4, 5, 5)))
    added = made.call(aten.add.Tensor, made.call(aten.mul.Tensor, scores, 0.3), bias)
    apart = made.call(aten.view.default, added, [2, 4, 3, 5, 5])
    masked = made.call(aten.add.Tensor, apart, made.call(aten.unsqueeze.default, mask, 1))
    last = made.call(aten.softmax.int, made.call(aten.view.default, masked, [8, 3, 5, 5]), -1)
    _, before, after = fused(made.module(last))
    assert_same(before, after, made.inputs)


class Rotary(torch.nn.Module):
    """A model whose batch and length are free, and whose sizes are in its views."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heads = x.view(x.shape[0], x.shape[1], 2, 8).transpose(1, 2)
        turned = torch.cat((-heads[..., 4:], heads[..., :4]), -1)
        scores = (heads * 0.5 + turned).softmax(-1).masked_fill(mask[:, None, :, None], 0.0)
        return scores, scores.mean(-1)


def test_free_sizes_of_a_captured_model() -> None:
    x, mask = torch.randn(2, 6, 16), torch.rand(2, 6) > 0.5
    graph = capture(Rotary(), {"x": x, "mask": mask}, {})
    blocks, before, after = fused(graph.module)
    assert blocks.fused >= 6, blocks.text()
    for batch, length in ((2, 6), (3, 6), (5, 9), (1, 7)):
        assert_same(before, after, [torch.randn(batch, length, 16), torch.rand(batch, length) > 0.5])


class Pairs(torch.nn.Module):
    """GPT-J's rotary embedding: numbers that stand side by side are turned by one angle."""

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        heads = x.view(x.shape[0], x.shape[1], 2, 8)
        turned = torch.stack((-heads[:, :, :, 1::2], heads[:, :, :, ::2]), -1).flatten(-2)
        cos, sin = (torch.repeat_interleave(f(angles)[:, :, None, :], 2, 3) for f in (torch.cos, torch.sin))
        return heads * cos + turned * sin


def test_pairs_of_a_captured_model_turn_in_one_block() -> None:
    x, angles = torch.randn(2, 6, 16), torch.randn(1, 6, 4)
    graph = capture(Pairs(), {"x": x, "angles": angles}, {})
    blocks, before, after = fused(graph.module)
    assert len(blocks.labels) == 1 and blocks.fused == 7 and "stack" in blocks.labels[0], blocks.text()
    for batch, length in ((2, 6), (1, 9)):
        assert_same(before, after, [torch.randn(batch, length, 16), torch.randn(1, length, 4)])
