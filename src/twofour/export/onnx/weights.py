"""Which constants of an ONNX graph are a model's sparse weights: found by their values, named after them, checked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from twofour import masks
from twofour.export.kept import dense, require_obeys
from twofour.layers import Reduction, full_tensor
from twofour.patterns import Pattern

TRANSPOSED = ".T"
"""Behind the name of a weight that stands as (in, out): MatMul multiplies from the left."""


PRODUCTS = ("Gemm", "MatMul", "Conv", "ConvTranspose", "LSTM", "GRU", "RNN")

LAYING_OUT = ("Slice", "Concat", "Unsqueeze", "Transpose")
"""Operators behind which a recurrent weight is used: they put its gates in ONNX's order, stack or turn it."""


@dataclass(frozen=True)
class SparseWeight:
    """A sparse weight in an ONNX graph.

    Attributes:
        name: Name of the parameter.
        initializer: Name of the constant.
        pattern: What it obeys.
        axis: The axis of the constant that the pattern lies along.
        operator: What multiplies with it: "Gemm", "MatMul", "Conv", "LSTM", ...
    """

    name: str
    initializer: str
    pattern: Pattern
    axis: int
    operator: str


def find(graph: Any, model: nn.Module) -> tuple[list[SparseWeight], list[str]]:
    """Find the masked weights of `model` among the constants of a graph, and name these after them.

    Args:
        graph: An onnx_ir.Graph that was exported from the model; constants are renamed in place.
        model: The masked model.

    Returns:
        The weights, and the names of those that are not in the graph as they are in the model.
    """
    known = {_digest(values): (name, turned) for name, values, turned in _orientations(model)}
    found, attached, stored = list[SparseWeight](), masks.of(model), dict[tuple[str, bool], Any]()
    for value in list(graph.initializers.values()):
        if value.const_value is None or len(value.const_value.shape) < 2:
            continue
        name, turned = known.get(_digest(value.const_value.numpy()), ("", False))
        if not name:
            continue
        if (first := stored.setdefault((name, turned), value)) is not value:
            value.replace_all_uses_with(first)  # a tied weight, which the translation turned once for each use
            graph.initializers.pop(value.name)
            continue
        rename(graph, value, name + (TRANSPOSED if turned else ""))
        found.append(_weight(name, value, attached[name], turned))
    have = {weight.name for weight in found}
    for name in [name for name in attached if name not in have]:
        if (value := graph.initializers.get(name)) is not None and _is_scaled(value, attached[name]):
            found.append(_weight(name, value, attached[name], turned=False))
    have = {weight.name for weight in found}
    return found, [name for name in attached if name not in have]


def _weight(name: str, value: Any, mask: masks.Mask, turned: bool) -> SparseWeight:
    axis = 1 - mask.axis.axis if turned else mask.axis.axis
    return SparseWeight(name, value.name, mask.pattern, axis, _operator(value))


def _operator(value: Any) -> str:
    """Return what multiplies with a constant, also behind nodes that lay out its rows; "none" where nothing does."""
    waiting = [value]
    while waiting:
        nodes = [node for node, _ in waiting.pop().uses()]
        if users := [node.op_type for node in nodes if node.op_type in PRODUCTS]:
            return users[0]
        waiting += [output for node in nodes if node.op_type in LAYING_OUT for output in node.outputs]
    return "none"


def _is_scaled(value: Any, mask: masks.Mask) -> bool:
    """Whether a constant is the weight with other values at its places, as where a normalisation was folded into it."""
    held, keep = value.const_value, mask.keep
    return (
        held is not None
        and tuple(held.shape) == tuple(keep.shape)
        and not held.numpy()[~full_tensor(keep).numpy()].any()
    )


def require_legal(graph: Any, weights: list[SparseWeight]) -> None:
    """Refuse a graph in which a weight does not keep its pattern along the axis that its node sums over.

    Raises:
        ExportError: One does not.
    """
    for weight in weights:
        values = torch.from_numpy(graph.initializers[weight.initializer].const_value.numpy().copy()).float()
        require_obeys(weight.name, "the exported weight", weight.pattern, Reduction(weight.axis).last(values))


def rename(graph: Any, value: Any, name: str) -> None:
    """Give a constant a name that no other has."""
    if value.name == name:
        return
    taken, count = set(graph.initializers), 0
    while (chosen := name + f"_{count}" * bool(count)) in taken:
        count += 1
    graph.initializers.pop(value.name)
    value.name = chosen
    graph.register_initializer(value)


def add_constant(graph: Any, name: str, values: Any) -> Any:
    """Add a constant to a graph and return it."""
    import onnx_ir as ir  # pyright: ignore[reportMissingImports]

    tensor = ir.tensor(values, name=name)
    value = ir.Value(name=name, shape=ir.Shape(values.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def by_initializer(weights: list[SparseWeight]) -> Mapping[str, str]:
    """Return the patterns by the names of constants: what the file promises of itself."""
    return {weight.initializer: weight.pattern.name for weight in weights}


def _orientations(model: nn.Module) -> Iterator[tuple[str, Any, bool]]:
    """Yield each masked weight as it is and, a matrix, turned; a square one that is symmetric counts as it is."""
    for turned in (True, False):
        for name, mask in masks.of(model).items():
            weight = dense(mask)
            if turned and weight.ndim == 2:
                yield name, _numpy(weight.T.contiguous()), True
            elif not turned:
                yield name, _numpy(weight), False


def _numpy(weight: Tensor) -> Any:
    return weight.view(torch.int16).numpy() if weight.dtype is torch.bfloat16 else weight.numpy()


def _digest(values: Any) -> tuple[tuple[int, ...], bytes]:
    return tuple(values.shape), hashlib.blake2b(values.tobytes(), digest_size=16).digest()
