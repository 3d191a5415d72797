"""The weights of an ONNX file: constants that Conv, Gemm, MatMul, LSTM, ... multiply with, also behind Q/DQ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twofour.checker.sources.onnx_graph import OPERANDS, Initializer, Operand, Scope, Way, attributes_of, trace
from twofour.checker.sources.onnx_recurrent import trace_rows
from twofour.checker.sources.packed import known
from twofour.checker.weights import (
    LEFT_OUT,
    MATRICES,
    Expectation,
    Skipped,
    Weight,
    named_by,
    require_names,
    unaligned,
)
from twofour.checkpoints import MOST_LETTERS, read_promise
from twofour.errors import FormatError, SourceError, absent, cut
from twofour.files import read_bytes, unreadable
from twofour.layers import Reduction

_QDQ = "behind Q/DQ: TensorRT may keep dense tactics there (NVIDIA/TensorRT#4694); look at its build log"

LARGEST = (1 << 31) - 1
"""Bytes of a file at most, as protobuf has it."""
PARTS = 1 << 21
"""Nodes, their operands and attributes, and constants of all graphs at most; large models have some 100,000."""
NESTING = 30
"""Graphs inside one another at most; protobuf itself reads no deeper than 100 messages, three a graph."""
WAYS = 64
"""Ways in which one constant is multiplied with at most: axes and zero points."""


@dataclass(frozen=True)
class _Use:
    """A constant that a node multiplies with."""

    way: Way
    kind: str
    axis: Reduction
    outputs: int
    node: str
    zero: Initializer | None
    per: int


def onnx_weights(path: Path, expectation: Expectation, include: Sequence[str]) -> tuple[list[Weight], Skipped]:
    """Collect the weights of an ONNX file to examine, and the other constants of two axes and more with their reasons.

    Raises:
        FormatError: The file is missing or malformed.
        LayerError: A glob or a promise names what is not there.
        SourceError: The package onnx is not installed.
    """
    model = _model(path)
    uses: dict[str, list[_Use]] = {}
    reasons: dict[str, str] = {}
    computed: dict[str, Weight] = {}
    constants: dict[str, Initializer] = {}
    _require_few(model.graph, path)
    for scope, nodes in _scopes(model.graph, path, None):
        constants |= scope.constants
        for node in nodes:
            for use in _uses(node, scope, reasons, computed):
                uses.setdefault(use.way.constant.name, []).append(use)
    require_names("include", include, list(uses), path)
    promises = expectation or _said(model, path)
    weights: list[Weight] = []
    skipped: Skipped = []
    for name, found in uses.items():
        if not named_by(include, name):
            skipped.append((name, LEFT_OUT))
            continue
        distinct = {(use.axis, use.outputs, use.zero and use.zero.name): use for use in found}
        if len(distinct) > WAYS:  # each is read and judged
            raise _beyond(path, f"`{cut(name, 80)}` is multiplied with in {len(distinct)} ways", f"at most {WAYS}")
        for use in distinct.values():
            called = name if len(distinct) == 1 else f"{name} ({use.node})"
            weight = _weight(called, use, promises, expectation, bool(include))
            if isinstance(weight, Weight):
                weights.append(weight)
            else:
                skipped.append((called, weight))
    why = dict(skipped)
    promises.require_known({use for use in uses if why.get(use, LEFT_OUT) == LEFT_OUT})
    unread = {name: weight for name, weight in computed.items() if name not in uses and named_by(include, name)}
    unread = unread if promises.everywhere else {}
    weights += [replace(weight, promise=promises.everywhere, by="expect") for weight in unread.values()]
    rest = [c for c in constants.values() if c.name not in uses and c.name not in unread and len(c.shape) > 1]
    skipped += [(c.name, reasons.get(c.name, "no operand of Conv, Gemm, MatMul or a recurrent operator")) for c in rest]
    return weights, skipped


def _model(path: Path) -> Any:
    try:
        import onnx  # pyright: ignore[reportMissingImports]
        from google.protobuf.message import DecodeError  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        what = f"{path} needs the package onnx to be read"
        raise absent(SourceError, what, error, "the package onnx", "onnx") from error
    try:
        model = onnx.load_model_from_string(read_bytes(path, LARGEST))
        found = len(model.graph.node), model.ir_version
    except OSError as error:
        raise unreadable(path, error, ".onnx") from error
    except (DecodeError, ValueError) as error:
        raise _malformed(path, f"{type(error).__name__}: {error}") from error
    if found == (0, 0):  # bytes that parse as a message without one field that a model has
        raise _malformed(path, "no graph and no version")
    return model


def _malformed(path: Path, got: str) -> FormatError:
    return FormatError(
        "the file is not readable as ONNX",
        got=f"{path}: {got}",
        wanted="a complete ONNX model; one of more than 2 GB keeps its weights in files beside it",
        remedy="compare its size with the original's: a broken copy or download is the usual cause",
    )


def _beyond(path: Path, got: str, wanted: str) -> FormatError:
    return FormatError(
        "the ONNX file holds more than a model can need",
        got=f"{path}: {got}",
        wanted=wanted,
        remedy="export the model again; onnx.checker.check_model says more",
    )


def _said(model: Any, path: Path) -> Expectation:
    """Return what the model's own metadata promises, under the key that our safetensors files use."""
    properties = {entry.key: entry.value for entry in model.metadata_props if isinstance(entry.value, str)}
    said = read_promise(properties, path)
    return Expectation({name: known(path, text) for name, text in said.patterns.items()})


def _require_few(graph: Any, path: Path, depth: int = 1, before: int = 0) -> int:
    """Count the parts of a graph and of those inside it.

    Raises:
        FormatError: There are more than `PARTS`, or graphs stand inside one another more than `NESTING` deep.
    """
    if depth > NESTING:
        raise _beyond(path, f"graphs inside graphs, {depth} deep", f"at most {NESTING}")
    parts = before + len(graph.initializer) + len(graph.node)
    for node in graph.node:
        parts += len(node.input) + len(node.output) + len(node.attribute)
        if parts > PARTS:
            raise _beyond(path, f"more than {PARTS} nodes, operands, attributes and constants", f"at most {PARTS}")
        for found in _inner(node):
            parts = _require_few(found, path, depth + 1, parts)
    return parts


def _inner(node: Any) -> Iterator[Any]:
    """Yield the graphs inside a node."""
    for attribute in node.attribute:
        yield from [attribute.g] if attribute.type == attribute.GRAPH else attribute.graphs


def _scopes(graph: Any, path: Path, around: Scope | None) -> Iterator[tuple[Scope, Sequence[Any]]]:
    """Yield a graph and those inside its nodes (If, Loop, Scan), each with what its names mean."""
    _require_text(graph, path)
    constants = {proto.name: Initializer.of(proto, path) for proto in graph.initializer if proto.name}
    makers = {}
    for node in graph.node:
        value = next((a.t for a in node.attribute if node.op_type == "Constant" and a.name == "value"), None)
        for output in node.output:
            makers[output] = node
        if value is not None and value.dims and node.output:
            constants[node.output[0]] = Initializer.of(value, path, node.output[0])
    scope = Scope(constants, makers, around)
    yield scope, graph.node
    for node in graph.node:
        for found in _inner(node):
            yield from _scopes(found, path, scope)


def _require_text(graph: Any, path: Path) -> None:
    """Refuse names that are no UTF-8: protobuf hands them out as bytes.

    Raises:
        FormatError: There is one.
    """
    texts = [proto.name for proto in graph.initializer]
    for node in graph.node:
        texts += [node.op_type, node.domain, node.name, *node.input, *node.output]
        texts += [attribute.name for attribute in node.attribute]
    for proto in (*graph.initializer, *(attribute.t for node in graph.node for attribute in node.attribute)):
        texts += [text for entry in proto.external_data for text in (entry.key, entry.value)]
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise _malformed(path, f"a name that is no UTF-8: {cut(repr(wrong[0]), 80)}")
    if (longest := max(map(len, texts), default=0)) > MOST_LETTERS:
        raise _beyond(path, f"a name of {longest} letters", f"at most {MOST_LETTERS}")


def _uses(node: Any, scope: Scope, reasons: dict[str, str], computed: dict[str, Weight]) -> Iterator[_Use]:
    operands = OPERANDS.get(node.op_type, ()) if node.domain in ("", "ai.onnx") else ()
    for operand in operands:
        if operand.position >= len(node.input):
            continue
        name = node.input[operand.position]
        for way in trace_rows(name, scope) if operand.laid_out else (trace(name, scope),):
            if isinstance(way, Way):
                found = _use(node, operand, way, scope)
                if isinstance(found, _Use):
                    yield found
                else:
                    reasons.setdefault(way.constant.name, found)
            elif way is not None:
                reasons.setdefault(way.name, way.reason)
                if way.computed is not None and (weight := _unread(node, operand, way.computed, way.reason)):
                    computed.setdefault(way.name, weight)


def _unread(node: Any, operand: Operand, constant: Initializer, reason: str) -> Weight | None:
    """Describe a constant from which nodes compute a weight that a promise about all weights means, or none."""
    found = operand.axis(constant.shape, attributes_of(node))
    if isinstance(found, str) or not constant.is_weight or 0 in constant.shape:
        return None
    kind, axis = found
    outputs = _outputs(kind, axis, constant.shape)
    weight = Weight(constant.name, kind, constant.shape, axis, constant.read, outputs=outputs, unread=reason)
    return None if unaligned(weight.rows, weight.columns) else weight


def _outputs(kind: str, axis: Reduction, shape: Sequence[int]) -> int:
    return 2 * len(shape) - 3 - axis.axis if kind in MATRICES else 1 - axis.axis


def _use(node: Any, operand: Operand, way: Way, scope: Scope) -> _Use | str:
    shape = tuple(way.constant.shape[axis] for axis in way.order)
    found = operand.axis(shape, attributes_of(node))
    if isinstance(found, str):
        return found
    kind, axis = found
    out = _outputs(kind, axis, shape)
    if not way.constant.is_weight:
        return f"type {way.constant.kind} is none that a weight is checked in"
    if 0 in shape:
        return f"shape {shape} has no values"
    zero, per = way.zero, way.per
    if operand.zero is not None and len(node.input) > operand.zero and node.input[operand.zero]:
        zero, per = node.input[operand.zero], way.order[operand.per]
    point = scope.constant(zero) if zero else None
    if zero and point is None:
        return f"its zero point `{zero}` is computed at run time"
    if point is not None and way.constant.is_integer and point.kind != way.constant.kind:
        return f"its zero point is {point.kind}, the weight {way.constant.kind}"
    parts = Reduction(way.order[axis.axis], axis.parts)
    return _Use(
        way, kind, parts, way.order[out], node.name or f"{node.op_type} -> {', '.join(node.output)}", point, per
    )


def _weight(name: str, use: _Use, promises: Expectation, expectation: Expectation, named: bool) -> Weight | str:
    """Describe a constant's use as a weight, or say why a promise about all weights does not mean it."""
    constant = use.way.constant
    weight = Weight(name, use.kind, constant.shape, use.axis, lambda: _values(use), outputs=use.outputs)
    promise = promises.find(name, constant.name)
    if promise is None and not named and (reason := unaligned(weight.rows, weight.columns)):
        return reason
    promise = promise or promises.everywhere
    by = None if promise is None else "expect" if promises is expectation else "metadata"
    quantised = {"QuantizeLinear", "DequantizeLinear"} & set(use.way.through)
    return replace(weight, promise=promise, by=by, notes=(_QDQ,) if quantised else ())


def _values(use: _Use) -> Tensor:
    """Return a constant's values, whole numbers less their zero point."""
    values = use.way.constant.read()
    if use.zero is None or not use.way.constant.is_integer:
        return values
    zero = use.zero.read().to(torch.int16)
    if not zero.any():
        return values
    return values.to(torch.int16) - _spread(zero, use, values.shape)


def _spread(zero: Tensor, use: _Use, shape: Sequence[int]) -> Tensor:
    """Lay a zero point over its values: one for all, one each along an axis, or one for a block along it."""
    if zero.numel() == 1:
        return zero.reshape(())
    if zero.ndim == 1 and zero.numel() == shape[use.per]:
        return zero.reshape([-1 if axis == use.per else 1 for axis in range(len(shape))])
    length = shape[use.per]
    block = min(use.way.block, length)
    if block > 0 and tuple(zero.shape) == (*shape[: use.per], -(-length // block), *shape[use.per + 1 :]):
        return zero.repeat_interleave(block, use.per).narrow(use.per, 0, length)
    raise FormatError(
        "the zero points of an ONNX weight do not fit it",
        got=f"`{cut(use.way.constant.name, 120)}`: shape {tuple(shape)}, zero points {tuple(zero.shape)}",
        wanted="one, or one for each place along an axis, or one for each block",
        remedy="export the model again; onnx.checker.check_model says more",
    )
