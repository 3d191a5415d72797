"""What is known of torch's operators: mapping type, algebra, FLOPs and bytes; one row for each, by its schema's name.

The mapping types are those of DNNFusion (arXiv 2108.13342), table 2, for ATen. FLOPs count one for each arithmetic
operation on a value, whatever it is (an exponential is one), as the paper does; a multiply-add is two.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from twofour.graph.mapping import MappingType, most_complex

ONE, MANY, MANY_TO_MANY = MappingType.ONE_TO_ONE, MappingType.ONE_TO_MANY, MappingType.MANY_TO_MANY
REORGANIZE, SHUFFLE = MappingType.REORGANIZE, MappingType.SHUFFLE


class Algebra(Enum):
    """Properties that rewriting uses (section 3.4)."""

    ASSOCIATIVE = "associative"
    COMMUTATIVE = "commutative"
    LINEAR = "linear"
    """f(a x + b y) = a f(x) + b f(y) in its first argument: it may be drawn out of sums and scalings."""
    BILINEAR = "bilinear"
    """Linear in each of its first two arguments: it distributes over sums on either side."""


@dataclass(frozen=True)
class Operator:
    """One row.

    Attributes:
        mapping: Type of the operator on inputs of the output's size; see `mapping_of`.
        flops: FLOPs of a call from its node.
        algebra: What holds in real arithmetic.
        writes: Whether it makes a tensor: a view of its input moves no bytes.
    """

    mapping: MappingType
    flops: Callable[[fx.Node], int]
    algebra: frozenset[Algebra] = frozenset()
    writes: bool = True


def shape(node: Any) -> tuple[int, ...]:
    """Return the sizes of a node's tensor, symbols as they were for the example; () for what is no tensor."""
    found = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(map(_number, found.shape)) if isinstance(found, Tensor) else ()


def _number(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def numel(node: Any) -> int:
    """Return how many values a node's tensor, or its tuple of tensors, has."""
    found = node.meta.get("val") if isinstance(node, fx.Node) else None
    if isinstance(found, tuple | list):
        return sum(prod(map(_number, entry.shape)) for entry in found if isinstance(entry, Tensor))
    return prod(shape(node)) if isinstance(found, Tensor) else 0


def nbytes(node: Any) -> int:
    """Return how many bytes a node's tensor, or its tuple of tensors, has."""
    found = node.meta.get("val") if isinstance(node, fx.Node) else None
    parts = found if isinstance(found, tuple | list) else [found]
    return sum(prod(map(_number, part.shape)) * part.dtype.itemsize for part in parts if isinstance(part, Tensor))


def _none(node: fx.Node) -> int:
    return 0


def _each(count: int) -> Callable[[fx.Node], int]:
    """`count` for each value of the output."""
    return lambda node: count * numel(node)


def _each_read(count: int) -> Callable[[fx.Node], int]:
    """`count` for each value of the first input."""
    return lambda node: count * numel(node.args[0])


def _windows(node: fx.Node) -> int:
    """One for each value of each window of a pooling: from the sizes where the windows are given by the output's."""
    found: Any = node.args[1]
    if "adaptive" in str(node.target):
        return numel(node.args[0])
    taps = prod(found) if isinstance(found, list | tuple) else int(found) ** 2
    return numel(node) * taps


def _product(node: fx.Node) -> int:
    """2 K for each value of the output, K the last axis of the first operand, and one for a bias."""
    return numel(node) * (2 * shape(node.args[0])[-1] + (len(node.args) > 2 and node.args[2] is not None))


def _added_product(node: fx.Node) -> int:
    return numel(node) * (2 * shape(node.args[1])[-1] + 1)


def _convolution(node: fx.Node) -> int:
    """2 K for each value of the output, K the taps of one output channel, and one for a bias."""
    return numel(node) * (2 * prod(shape(node.args[1])[1:]) + (len(node.args) > 2 and node.args[2] is not None))


def _attention(node: fx.Node) -> int:
    """Scores, softmax (4 a score) and the product with the values, for each query."""
    *batch, queries, width = shape(node.args[0])
    keys, values = shape(node.args[1])[-2], shape(node.args[2])[-1]
    return prod(batch) * queries * keys * (2 * width + 4 + 2 * values)


def _rows(mapping: MappingType, flops: Callable[[fx.Node], int], names: str, *algebra: Algebra, writes: bool = True):
    made = Operator(mapping, flops, frozenset(algebra), writes)
    return dict.fromkeys(names.split(), made)


OPERATORS: dict[str, Operator] = {
    # One-to-One: a value of the output from those at its place.
    **_rows(ONE, _each(1), "add mul", Algebra.ASSOCIATIVE, Algebra.COMMUTATIVE),
    **_rows(ONE, _each(1), "maximum minimum", Algebra.ASSOCIATIVE, Algebra.COMMUTATIVE),
    **_rows(ONE, _each(1), "__and__ __or__ __xor__", Algebra.ASSOCIATIVE, Algebra.COMMUTATIVE),
    **_rows(ONE, _each(1), "bitwise_and bitwise_or bitwise_xor", Algebra.ASSOCIATIVE, Algebra.COMMUTATIVE),
    **_rows(ONE, _each(1), "logical_and logical_or logical_xor", Algebra.ASSOCIATIVE, Algebra.COMMUTATIVE),
    **_rows(ONE, _each(1), "sub rsub div true_divide", Algebra.LINEAR),
    **_rows(ONE, _each(1), "neg", Algebra.LINEAR),
    **_rows(ONE, _each(1), "pow sqrt rsqrt reciprocal square exp exp2 expm1 log log2 log1p log10 abs sign"),
    **_rows(ONE, _each(1), "sin cos tan asin acos atan sinh cosh tanh erf erfc sigmoid logit remainder fmod"),
    **_rows(ONE, _each(1), "floor ceil round trunc frac floor_divide bitwise_not logical_not"),
    **_rows(ONE, _each(1), "bitwise_left_shift __lshift__", Algebra.LINEAR),
    **_rows(ONE, _each(1), "bitwise_right_shift __rshift__"),
    **_rows(ONE, _each(1), "eq ne lt le gt ge isnan isinf isfinite where masked_fill nan_to_num"),
    **_rows(ONE, _each(1), "relu relu6 leaky_relu clamp clamp_min clamp_max hardtanh threshold prelu"),
    **_rows(ONE, _each(4), "hardswish hardsigmoid elu celu selu softplus mish silu"),
    **_rows(ONE, _each(5), "gelu"),
    **_rows(ONE, _each(2), "batch_norm _native_batch_norm_legit_no_training addcmul addcdiv lerp"),
    **_rows(ONE, _none, "to _to_copy type_as clone contiguous copy fill zero"),
    **_rows(ONE, _none, "arange full zeros ones empty full_like zeros_like ones_like empty_like new_zeros new_ones"),
    **_rows(ONE, _none, "new_full new_empty scalar_tensor triu tril"),
    **_rows(ONE, _none, "cat stack pad constant_pad_nd roll flip", Algebra.LINEAR),
    **_rows(ONE, _none, "slice narrow select split split_with_sizes chunk unbind", Algebra.LINEAR, writes=False),
    **_rows(ONE, _none, "dropout feature_dropout alias detach detach_ lift_fresh_copy", writes=False),
    **_rows(ONE, _none, "_assert_tensor_metadata sym_size sym_numel getitem _assert_async", writes=False),
    # One-to-Many: a value of the input goes to several places.
    **_rows(MANY, _none, "expand expand_as broadcast_to", Algebra.LINEAR, writes=False),
    **_rows(MANY, _none, "repeat repeat_interleave tile gather index index_select embedding take_along_dim"),
    **_rows(MANY, _none, "upsample_nearest1d upsample_nearest2d"),
    **_rows(MANY, _each(7), "upsample_bilinear2d"),
    # Reorganize and Shuffle: the same values under another shape, or in another order.
    **_rows(REORGANIZE, _none, "view _unsafe_view flatten unflatten squeeze unsqueeze", Algebra.LINEAR, writes=False),
    **_rows(REORGANIZE, _none, "reshape", Algebra.LINEAR),
    **_rows(SHUFFLE, _none, "transpose permute t numpy_T mT movedim swapaxes", Algebra.LINEAR, writes=False),
    **_rows(SHUFFLE, _none, "pixel_shuffle pixel_unshuffle channel_shuffle", Algebra.LINEAR),
    # Many-to-Many: several values of the input for one of the output.
    **_rows(MANY_TO_MANY, _each_read(1), "sum mean cumsum", Algebra.LINEAR),
    **_rows(MANY_TO_MANY, _each_read(1), "prod amax amin max min argmax argmin any all cumprod diff sort topk"),
    **_rows(MANY_TO_MANY, _each_read(3), "var std logsumexp norm linalg_vector_norm"),
    **_rows(MANY_TO_MANY, _each_read(4), "softmax _softmax log_softmax _log_softmax"),
    **_rows(MANY_TO_MANY, _each_read(7), "layer_norm native_layer_norm group_norm native_group_norm instance_norm"),
    **_rows(MANY_TO_MANY, _each_read(4), "rms_norm"),
    **_rows(MANY_TO_MANY, _windows, "avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d", Algebra.LINEAR),
    **_rows(MANY_TO_MANY, _windows, "max_pool1d max_pool2d max_pool2d_with_indices adaptive_max_pool2d"),
    **_rows(MANY_TO_MANY, _product, "mm bmm matmul linear mv dot", Algebra.ASSOCIATIVE, Algebra.BILINEAR),
    **_rows(MANY_TO_MANY, _added_product, "addmm baddbmm addbmm", Algebra.LINEAR),
    **_rows(MANY_TO_MANY, _convolution, "conv1d conv2d conv3d convolution _convolution", Algebra.BILINEAR),
    **_rows(MANY_TO_MANY, _attention, "scaled_dot_product_attention"),
}
"""Name of the schema without its namespace -> row; overloads and the in-place form share one."""

BUILTINS = {
    operator.getitem: "getitem",
    operator.mul: "sym_numel",
    operator.add: "sym_numel",
    operator.sub: "sym_numel",
    torch.narrow: "narrow",
}
"""Functions that a graph calls beside operators: on tuples, on sizes, and views that rules put in."""

NO_ROW = "the operator has no row in graph/operators.py"
"""Why an operator stands alone."""


def find(node: fx.Node) -> Operator | None:
    """Return the row of what a node calls, None where there is none: then it stands alone (`NO_ROW`)."""
    if node.op != "call_function":
        return None
    target = node.target
    if isinstance(target, OpOverload):
        space, _, name = target._schema.name.partition("::")
        return OPERATORS.get(name) or OPERATORS.get(name.removesuffix("_")) if space == "aten" else None
    return OPERATORS[BUILTINS[target]] if target in BUILTINS else None


def mapping_of(node: fx.Node) -> MappingType | None:
    """Return the mapping type of a call, None without a row: its row's, or One-to-Many where an input is broadcast.

    An operator with several inputs has the most complex type among them (section 3.1).
    """
    if (row := find(node)) is None:
        return None
    if row.mapping is not ONE or not isinstance(node.meta.get("val"), Tensor):
        return row.mapping
    written = numel(node)
    operands = [numel(source) for source in node.all_input_nodes if isinstance(source.meta.get("val"), Tensor)]
    broadcast = len(operands) > 1 and row.flops is not _none and any(0 < count < written for count in operands)
    return most_complex([row.mapping, *[MANY] * broadcast])


def flops(node: fx.Node) -> int:
    """Return the FLOPs of a call; 0 for what has no row."""
    row = find(node)
    return 0 if row is None else row.flops(node)


def traffic(node: fx.Node) -> int:
    """Return the bytes that a call reads and writes by itself: none for a view of its input."""
    row = find(node)
    if node.op != "call_function" or (row is not None and not row.writes):
        return 0
    return nbytes(node) + sum(map(nbytes, node.all_input_nodes))


def total(nodes: Sequence[fx.Node], of: Callable[[fx.Node], int]) -> int:
    """Return the sum of `flops` or `traffic` over nodes."""
    return sum(map(of, nodes))
