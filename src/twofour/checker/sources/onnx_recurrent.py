"""The constants that LSTM, GRU and RNN of ONNX multiply with: Slice, Concat and Unsqueeze lay out their rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from twofour.checker.sources.onnx_graph import MOST_COMPUTING, Initializer, Lost, Scope, Way, attributes_of, trace
from twofour.checkpoints import MOST_AXES

RANK = 3
"""Axes of W and R: directions, gates times hidden, what is summed over (ONNX operator reference, LSTM, GRU, RNN)."""


def trace_rows(name: str, scope: Scope) -> Iterator[Way | Lost]:
    """Follow an operand of a recurrent operator back to its constants.

    ONNX has the gates in another order than torch and stacks the directions. Slice and Concat of rows, and Unsqueeze
    in front, change neither the values of a row nor their order: a pattern along the last axis stays.

    Yields:
        The way from each constant; or a constant and why it is not the operator's weight.
    """
    waiting, seen = [(name, RANK)], set[str]()
    while waiting and len(seen) < MOST_COMPUTING:
        name, rank = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        node = None if scope.constant(name) is not None else scope.maker(name)
        laid_out = node is not None and node.domain in ("", "ai.onnx") and _keeps_rows(node, rank, scope)
        if node is not None and laid_out:
            below = list(node.input) if node.op_type == "Concat" else [node.input[0]]
            waiting += [(one, rank - (node.op_type == "Unsqueeze")) for one in below[::-1]]
        elif (way := trace(name, scope)) is not None:
            yield way if isinstance(way, Lost) or len(way.order) == rank else _of_rank(way, rank)


def _of_rank(way: Way, rank: int) -> Lost:
    return Lost(way.constant.name, f"shape {way.constant.shape} does not have the {rank} axes of a recurrent weight")


def _keeps_rows(node: Any, rank: int, scope: Scope) -> bool:
    """Whether a node joins or cuts along axes before the last alone, or puts an axis in front."""
    given = attributes_of(node)
    if node.op_type == "Concat":
        axes: Sequence[int] = [given["axis"]] if type(given.get("axis")) is int else []
    elif node.op_type in ("Slice", "Unsqueeze") and node.input:
        place = 3 if node.op_type == "Slice" else 1
        constant = scope.constant(node.input[place]) if len(node.input) > place else None
        axes = given.get("axes", []) if constant is None else _whole(constant)
    else:
        return False
    if node.op_type == "Unsqueeze":
        return rank == RANK and list(axes) in ([0], [-rank])
    return bool(axes) and all(-rank <= axis < rank and axis % rank < rank - 1 for axis in axes)


def _whole(constant: Initializer) -> list[int]:
    """Return the whole numbers that a constant holds, none where it is no short list of them."""
    from onnx import numpy_helper  # pyright: ignore[reportMissingImports]

    proto = constant.proto
    if constant.kind != "INT64" or prod(constant.shape) > MOST_AXES or proto.data_location == proto.EXTERNAL:
        return []
    try:
        return [int(value) for value in numpy_helper.to_array(proto).reshape(-1)]
    except (ValueError, TypeError, OverflowError, KeyError):
        return []
