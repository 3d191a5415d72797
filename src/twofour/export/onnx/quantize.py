"""Q/DQ around sparse products: int8 weights behind DequantizeLinear, inputs through QuantizeLinear and back.

The form that TensorRT calls explicit quantisation: one scale for each output of a weight, one for an input, no zero
points. Rounding keeps 0 at 0, so the int8 constant is as sparse as the weight.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from twofour import masks
from twofour.calibration.batches import items, read
from twofour.calls import call, first_input, observing
from twofour.export.onnx.weights import SparseWeight, add_constant
from twofour.packing.encodings import INT8_LARGEST

logger = logging.getLogger("twofour.export")


def observe(model: nn.Module, data: Iterable[Any]) -> dict[str, float]:
    """Return the largest magnitude of each sparse layer's input over the data, by the name of its weight."""
    largest: dict[str, float] = {}

    def see(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = first_input(args, kwargs)
        if isinstance(x, Tensor) and x.numel():
            largest[name] = max(largest.get(name, 0.0), float(x.abs().max()))

    with observing([(name, mask.module) for name, mask in masks.of(model).items()], see):
        for item in items(data):
            call(model, read(model, item).inputs)
    return largest


def quantize(graph: Any, found: list[SparseWeight], ranges: Mapping[str, float]) -> list[SparseWeight]:
    """Put Q/DQ around the products of sparse weights, in place; return the weights with their new constants.

    A weight whose input was never seen, or that something else reads too, stays as it is.
    """
    made, inputs = list[SparseWeight](), dict[tuple[int, float], Any]()
    for weight in found:
        value = graph.initializers[weight.initializer]
        uses = [(node, position) for node, position in value.uses() if node.op_type == weight.operator]
        if weight.name not in ranges or len(uses) != len(value.uses()) or not uses:
            logger.warning("layer `%s` stays float32: its input is not a layer's of its own", weight.name)
            made.append(weight)
            continue
        _quantize_weight(graph, weight, value, uses)
        for node, _ in uses:
            _quantize_input(graph, node, ranges[weight.name] / INT8_LARGEST or 1.0, inputs)
        made.append(replace(weight, initializer=weight.initializer + ".int8"))
    return made


def _quantize_weight(graph: Any, weight: SparseWeight, value: Any, uses: list[tuple[Any, int]]) -> None:
    import onnx_ir as ir  # pyright: ignore[reportMissingImports]

    dense = value.const_value.numpy().astype(np.float32)
    outputs = 1 - weight.axis
    others = tuple(axis for axis in range(dense.ndim) if axis != outputs)
    scales = np.abs(dense).max(axis=others) / INT8_LARGEST
    scales = np.where(scales < np.finfo(np.float32).tiny, np.float32(1), scales).astype(np.float32)
    shape = [-1 if axis == outputs else 1 for axis in range(dense.ndim)]
    whole = np.rint(dense / scales.reshape(shape)).astype(np.int8)
    parts = [add_constant(graph, f"{value.name}.int8", whole), add_constant(graph, f"{value.name}.scales", scales)]
    back = ir.node("DequantizeLinear", parts, {"axis": outputs}, name=f"{value.name}.dequantize")
    back.outputs[0].name = f"{value.name}.dequantized"
    first = min((node for node, _ in uses), key=list(graph).index)
    graph.insert_before(first, [back])
    for node, position in uses:
        node.replace_input_with(position, back.outputs[0])
    graph.initializers.pop(value.name)


def _quantize_input(graph: Any, node: Any, scale: float, made: dict[tuple[int, float], Any]) -> None:
    """Round a node's input; layers that read one tensor with one range share the pair."""
    import onnx_ir as ir  # pyright: ignore[reportMissingImports]

    x = node.inputs[0]
    key = id(x), scale
    if key not in made:
        name = f"{x.name}.q{len(made)}"
        scales = add_constant(graph, f"{name}.scale", np.array(scale, np.float32))
        zero = add_constant(graph, f"{name}.zero", np.array(0, np.int8))
        there = ir.node("QuantizeLinear", [x, scales, zero], name=f"{name}.quantize")
        there.outputs[0].name = f"{name}.int8"
        back = ir.node("DequantizeLinear", [there.outputs[0], scales, zero], name=f"{name}.dequantize")
        back.outputs[0].name = f"{name}.float"
        graph.insert_before(node, [there, back])
        made[key] = back.outputs[0]
    node.replace_input_with(0, made[key])
