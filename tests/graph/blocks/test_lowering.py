"""Every operator that a block takes, against torch: special values, odd shapes and strides, types, arguments."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from tests.graph.blocks.graphs import Grown, assert_same, fused
from tests.turns import in_turn
from twofour.errors import KernelError
from twofour.graph.base import aten
from twofour.graph.blocks.pointwise import POINTWISE, TRUTHS
from twofour.graph.blocks.rows import REDUCTIONS, WHOLE_ROWS

SPECIAL = [
    0.0,
    -0.0,
    torch.inf,
    -torch.inf,
    torch.nan,
    1e-40,
    -1e-40,
    88.8,
    -103.9,
    1e4,
    -1e4,
    0.5,
    -2.5,
    3.0,
    6.0,
    20.5,
]

ARGUMENTS: dict[Any, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    aten.add.Tensor: [((), {}), ((), {"alpha": 2}), ((1.5,), {}), ((3,), {"alpha": 0.5})],
    aten.sub.Tensor: [((), {}), ((), {"alpha": 0.5}), ((1.5,), {})],
    aten.add.Scalar: [((1.5,), {}), ((1.5, 2), {})],
    aten.sub.Scalar: [((1.5,), {})],
    aten.mul.Scalar: [((-2,), {})],
    aten.div.Scalar: [((3.0,), {})],
    aten.div.Tensor: [((), {}), ((3.0,), {})],
    aten.div.Tensor_mode: [((), {"rounding_mode": None})],
    aten.rsub.Scalar: [((1.5,), {})],
    aten.pow.Tensor_Scalar: [((n,), {}) for n in (2, 3, 0.5, -0.5, -1, -2, 1, 4, 1.7)],
    aten.gelu.default: [((), {}), ((), {"approximate": "tanh"})],
    aten.leaky_relu.default: [((), {}), ((0.2,), {})],
    aten.elu.default: [((), {}), ((0.7, 1.3, 0.9), {})],
    aten.softplus.default: [((), {}), ((2.0, 5.0), {})],
    aten.hardtanh.default: [((), {}), ((-2.0, 0.5), {})],
    aten.clamp.default: [((-1.0, 2.0), {}), ((None, 2.0), {}), ((-1.0,), {})],
    aten.clamp_min.default: [((0.5,), {})],
    aten.clamp_max.default: [((0.5,), {})],
    aten.lerp.Scalar: [((0.3,), {}), ((0.8,), {})],
    aten.addcmul.default: [((), {}), ((), {"value": 0.5})],
    aten.addcdiv.default: [((), {}), ((), {"value": 0.5})],
    aten.to.dtype: [((torch.bfloat16,), {}), ((torch.bool,), {}), ((torch.float32,), {})],
    aten._to_copy.default: [((), {"dtype": torch.bfloat16})],
    **{getattr(aten, name).Scalar: [((0.5,), {})] for name in ("eq", "ne", "lt", "le", "gt", "ge")},
}
FIRST = {aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf}
MASKED = {aten.masked_fill.Scalar: [(2.5,)], aten.masked_fill.Tensor: [()]}
ODD = {aten.gelu.default, aten.silu.default, aten.mish.default, aten.hardswish.default}
"""Whose limits at infinity torch does not have: x * 0."""


def tensors_of(target: Any) -> int:
    return sum(str(one.type) == "Tensor" for one in target._schema.arguments if not one.has_default_value())


def operand(shape: tuple[int, ...], kind: int, seed: int) -> Tensor:
    """Numbers of this shape: in one piece, transposed, every second, or bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn([2 * size for size in shape], generator=generator)
    if kind == 1:
        return x[tuple(slice(size) for size in shape)].transpose(0, -1).contiguous().transpose(0, -1)
    x = x[tuple(slice(None, None, 2) for _ in shape)]
    return x if kind == 2 else x.bfloat16() if kind == 3 else x.contiguous()


def checked(target: Any, inputs: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], tolerance: float) -> None:
    """An operator and one behind it are one block, which answers as torch does."""
    made = Grown()
    nodes: list[Any] = [made.input(tensor) for tensor in inputs]
    if target is aten.where.ScalarOther:
        args = 1.5, *args
    elif target is aten.where.ScalarSelf:
        nodes.insert(1, 1.5)
    answer = made.call(target, *nodes, *args, **kwargs)
    logic = answer.meta["val"].dtype is torch.bool
    last = made.call(aten.logical_not.default if logic else aten.abs.default, answer)
    blocks, before, after = fused(made.module(answer, last))
    compares_halves = target in TRUTHS and any(x.dtype is torch.bfloat16 for x in inputs)  # torch rounds first
    assert blocks.fused == (0 if compares_halves else 2), blocks.text()
    assert_same(before, after, inputs, tolerance)


@in_turn("target", [one for one in POINTWISE if one is not aten.batch_norm.default], ids=str)
def test_every_element_wise_operator_is_torchs(target: Any) -> None:
    truths = target in FIRST or "logical" in str(target)
    for (args, kwargs), kind in itertools.product(ARGUMENTS.get(target, [((), {})]), range(4)):
        if target in MASKED:
            x, mask = operand((3, 5, 7), kind, 0), operand((3, 5, 7), 0, 1) > 0
            rest = [torch.tensor(2.5).to(x.dtype)] if target is aten.masked_fill.Tensor else []
            checked(target, [x, mask, *rest], (2.5,) * (not rest), {}, 1e-6)
            continue
        scalar_second = args and isinstance(args[0], float | int) and target in (
            aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor
        )  # fmt: skip
        count = 3 if target is aten.clamp.Tensor else 1 if scalar_second else tensors_of(target)
        inputs = [operand((3, 5, 7), kind, seed) for seed in range(count)]
        if truths:
            inputs[: 2 if "logical" in str(target) else 1] = [
                x > 0 for x in inputs[: 2 if "logical" in str(target) else 1]
            ]
        if target in (aten.pow.Tensor_Tensor, aten.rsqrt.default, aten.sqrt.default):
            inputs[0] = inputs[0].abs() + 0.1
        if target is aten.pow.Scalar:
            check_power_of_number(inputs[0].contiguous())  # of others torch's strides differ without data
            continue
        low = inputs[0].dtype is torch.bfloat16
        checked(target, inputs, args, kwargs, 2e-2 if low else 2e-6)


def check_power_of_number(x: Tensor) -> None:
    made = Grown()
    last = made.call(aten.neg.default, made.call(aten.pow.Scalar, 2.5, made.input(x)))
    blocks, before, after = fused(made.module(last))
    assert blocks.fused == 2
    assert_same(before, after, [x], 2e-2 if x.dtype is torch.bfloat16 else 2e-6)


@in_turn("target", [one for one in POINTWISE if tensors_of(one) == 1 and one is not aten.batch_norm.default], ids=str)
def test_special_values_are_torchs(target: Any) -> None:
    if target in MASKED or target in FIRST or target in (aten.pow.Scalar, aten.clamp.Tensor):
        return
    x = torch.tensor(SPECIAL)
    x = x[x.isfinite()] if target in ODD else x
    for args, kwargs in ARGUMENTS.get(target, [((), {})]):
        checked(target, [x], args, kwargs, 2e-6)


@in_turn("other", [1.5, -torch.inf, torch.nan])
@in_turn("target", ["maximum", "minimum", "add", "mul", "div", "pow", "lt", "eq", "where"])
def test_special_values_of_two_operands_are_torchs(target: str, other: float) -> None:
    x = torch.tensor(SPECIAL)
    y = torch.full_like(x, other)
    overload = {"maximum": "default", "minimum": "default", "pow": "Tensor_Tensor", "where": "self"}.get(
        target, "Tensor"
    )
    chosen = getattr(getattr(aten, target), overload)
    checked(chosen, [x > 0, x, y] if target == "where" else [x, y], (), {}, 2e-6)


ROW_ARGUMENTS: dict[Any, list[tuple[Any, ...]]] = {
    aten.var.correction: [([-1],)],
    aten.std.correction: [([-1],)],
    aten.var.dim: [([-1], True), ([-1], False, True)],
    aten.std.dim: [([-1], True)],
    aten.linalg_vector_norm.default: [(2, [-1], True), (1, [-1])],
    aten.norm.ScalarOpt_dim: [(2, [-1], True), (1, [-1])],
    aten.prod.dim_int: [(-1, True), (-1,)],
    aten._softmax.default: [(-1, False)],
    aten._log_softmax.default: [(-1, False)],
    aten.softmax.int: [(-1,), (2,)],
    aten.log_softmax.int: [(-1,)],
}


@in_turn("target", [*REDUCTIONS, *WHOLE_ROWS], ids=str)
@in_turn("shape", [(3, 5, 7), (2, 1, 33), (1, 4, 1100)])
def test_every_reduction_is_torchs(target: Any, shape: tuple[int, ...]) -> None:
    if "pool" in str(target):
        ROW_ARGUMENTS[target] = [([1] * int(str(target)[-10]),)]
    plain: list[tuple[Any, ...]] = [([-1], True), ([-1],), ([1, 2], True), ([1, 2],), ([0, 1, 2],), ([-1, 0, 1], True)]
    for args, kind in itertools.product(ROW_ARGUMENTS.get(target, plain), range(4)):
        x = operand(shape, kind, 3)
        inputs = [x]
        if target in (aten.layer_norm.default, aten.rms_norm.default):
            inputs += [torch.rand(shape[-1]).to(x.dtype) for _ in range(1 + (target is aten.layer_norm.default))]
            checked_norm(target, inputs, shape[-1])
            continue
        checked(target, inputs, args, {}, 3e-2 if x.dtype is torch.bfloat16 else 1e-4)


def checked_norm(target: Any, inputs: list[Tensor], width: int) -> None:
    made = Grown()
    x, *rest = (made.input(tensor) for tensor in inputs)
    answer = made.call(target, x, [width], *rest, eps=1e-5)
    blocks, before, after = fused(made.module(made.call(aten.abs.default, answer)))
    assert blocks.fused == 2
    assert_same(before, after, inputs, 3e-2 if inputs[0].dtype is torch.bfloat16 else 1e-4)


def test_comparisons_of_bfloat16_stay_torchs() -> None:
    """It rounds the number first, so that 0.1 equals what was stored of 0.1."""
    x = torch.tensor([0.1, 0.2, -1.0]).bfloat16()
    made = Grown()
    same = made.call(aten.eq.Scalar, made.input(x), 0.1)
    _, before, after = fused(made.module(made.call(aten.logical_not.default, same)))
    assert_same(before, after, [x])
    assert after(x)[0].tolist() == [False, True, True]


def test_a_conversion_that_the_model_asks_for_rounds() -> None:
    made = Grown()
    x = made.input(torch.randn(4, 9))
    low = made.call(aten.to.dtype, made.call(aten.tanh.default, x), torch.bfloat16)
    rest = made.call(aten.sub.Tensor, made.call(aten.tanh.default, x), made.call(aten.to.dtype, low, torch.float32))
    blocks, before, after = fused(made.module(rest))
    assert blocks.fused == 5
    assert_same(before, after, made.inputs, 1e-6)
    assert after(*made.inputs)[0].abs().max() > 1e-4


@pytest.mark.parametrize("kind", [torch.int64, torch.float64, torch.float16])
def test_other_types_stay_alone(kind: torch.dtype) -> None:
    made = Grown()
    x: fx.Node = made.input(torch.ones(4, dtype=kind))
    blocks, before, after = fused(made.module(made.call(aten.abs.default, made.call(aten.neg.default, x))))
    assert not blocks.labels and sum(blocks.alone.values()) == 2
    assert str(kind).removeprefix("torch.") in blocks.text()
    assert_same(before, after, made.inputs)


@in_turn("ndim", [2, 3, 4])
@in_turn("affine", [False, True])
def test_batch_norm_by_the_statistics_of_training(ndim: int, affine: bool) -> None:
    made = Grown()
    x = made.input(torch.randn((2, 5, 3, 4)[:ndim]))
    mean, variance, *rest = (made.input(torch.rand(5) + 0.5) for _ in range(4 if affine else 2))
    weight, bias = rest or (None, None)
    answer = made.call(aten.batch_norm.default, x, weight, bias, mean, variance, False, 0.1, 1e-5, False)
    blocks, before, after = fused(made.module(made.call(aten.relu.default, answer)))
    assert blocks.fused == 2
    assert_same(before, after, made.inputs, 1e-5)


def embedded(kind: torch.dtype) -> tuple[fx.GraphModule, list[Tensor]]:
    """BERT's sum: words and kinds looked up, positions of one row for all, normalised."""
    made = Grown()
    words = made.input(torch.randint(0, 9, (2, 5)).to(kind))
    kinds = made.input(torch.randint(0, 2, (2, 5)).to(kind))
    tables = made.input(torch.randn(9, 24)), made.input(torch.randn(2, 24))
    at, weight = made.input(torch.randn(1, 5, 24)), made.input(torch.randn(24))
    looked = [made.call(aten.embedding.default, t, n) for t, n in zip(tables, (words, kinds), strict=True)]
    total = made.call(aten.add.Tensor, made.call(aten.add.Tensor, *looked), at)
    normal = made.call(aten.layer_norm.default, total, [24], weight, weight)
    return made.module(total, normal), made.inputs


def test_embeddings_are_gathered_inside_a_block() -> None:
    module, inputs = embedded(torch.int64)
    blocks, before, after = fused(module)
    assert len(blocks.labels) == 1 and blocks.fused == 5 and not blocks.alone, blocks
    assert_same(before, after, inputs)
    with pytest.raises(KernelError, match="row that its table has not"):
        after(inputs[0] + 9, *inputs[1:])


def test_embeddings_by_int32_stay_alone() -> None:
    module, inputs = embedded(torch.int32)
    blocks, before, after = fused(module)
    assert blocks.alone["a table or rows of another type"] == 2
    assert_same(before, after, inputs)


@pytest.mark.parametrize("width", [6, 32])
def test_rotary_positions_are_one_block(width: int) -> None:
    made = Grown()
    x = made.input(torch.randn(2, 3, 4, width).transpose(1, 2))
    cos, sin = made.input(torch.randn(1, 1, 3, width)), made.input(torch.randn(1, 1, 3, width))
    first = made.call(aten.slice.Tensor, x, -1, 0, width // 2)
    second = made.call(aten.slice.Tensor, x, -1, width // 2, width)
    turned = made.call(aten.cat.default, [made.call(aten.neg.default, second), first], -1)
    straight = made.call(aten.mul.Tensor, x, cos)
    last = made.call(aten.add.Tensor, straight, made.call(aten.mul.Tensor, turned, sin))
    blocks, before, after = fused(made.module(last))
    assert len(blocks.labels) == 1 and not blocks.alone, blocks
    assert_same(before, after, made.inputs)


def turned(made: Grown, x: fx.Node) -> fx.Node:
    """Each number's neighbour in a pair, the first of them negated: GPT-J's rotary embedding."""
    even, odd = made.call(aten.slice.Tensor, x, -1, 0, 2**63 - 1, 2), made.call(aten.slice.Tensor, x, -1, 1, 999, 2)
    return made.call(aten.stack.default, [made.call(aten.neg.default, odd), even], -1)


@in_turn("width", [6, 20, 64])
@in_turn("kind", [torch.float32, torch.bfloat16])
def test_rotary_positions_of_pairs_are_one_block(width: int, kind: torch.dtype) -> None:
    """Angles are repeated for both numbers of a pair; the stacked pairs are read under another shape."""
    made = Grown()
    x = made.input(torch.randn(2, 3, 4, width).to(kind))
    angles = made.input(torch.randn(3, 1, width // 2).to(kind))
    cos, sin = (
        made.call(aten.repeat_interleave.self_int, made.call(function, angles), 2, 2)
        for function in (aten.cos.default, aten.sin.default)
    )
    pairs = made.call(aten.flatten.using_ints, turned(made, x), -2)
    straight, crossed = made.call(aten.mul.Tensor, x, cos), made.call(aten.mul.Tensor, pairs, sin)
    blocks, before, after = fused(made.module(made.call(aten.add.Tensor, straight, crossed)))
    assert len(blocks.labels) == 1 and not blocks.alone and blocks.fused == 9, blocks
    assert "slice" not in after.text
    assert_same(before, after, made.inputs, 1e-5 if kind is torch.float32 else 4e-2)


def test_what_alternates_is_read_in_pairs_and_whole() -> None:
    """The stack itself, a view of it, a slice of what is computed from that, and three numbers that alternate."""
    made = Grown()
    x, row = made.input(torch.randn(5, 34)), made.input(torch.randn(17))
    pairs = turned(made, x)
    flat = made.call(aten.view.default, made.call(aten.tanh.default, pairs), [5, 34])
    last = made.call(aten.mul.Tensor, made.call(aten.slice.Tensor, made.call(aten.exp.default, flat), 1, 1, 34, 2), row)
    three = made.call(aten.stack.default, [last, last, made.call(aten.relu.default, last)], 2)
    blocks, before, after = fused(made.module(pairs, flat, last, three))
    assert blocks.fused >= 5, blocks.text()
    assert_same(before, after, made.inputs)


@pytest.mark.parametrize("axis", [0, 1])
def test_stacks_on_other_axes_are_no_block(axis: int) -> None:
    made = Grown()
    x = made.input(torch.randn(4, 6))
    stacked = made.call(aten.stack.default, [made.call(aten.tanh.default, x), x], axis)
    blocks, before, after = fused(made.module(made.call(aten.neg.default, stacked)))
    assert not blocks.labels
    assert_same(before, after, made.inputs)
