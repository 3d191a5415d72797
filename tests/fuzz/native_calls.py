"""Good calls of the compiled extension, noted while small operations of every kind run: what the fuzzer changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from twofour import native
from twofour.kernels.attention import (
    attention,
    attention_of_columns,
    attention_of_sequences,
    attention_of_windows,
)
from twofour.kernels.base import Prepared
from twofour.kernels.block_matmul import block_rows
from twofour.kernels.conv import ConvProblem, Geometry
from twofour.kernels.dense_conv import direct_rows, winograd_rows
from twofour.kernels.dense_matmul import native_dense_rows
from twofour.kernels.epilogue import Epilogue
from twofour.kernels.nm_conv.cpu import hybrid_conv_rows, native_conv_rows
from twofour.kernels.nm_conv_gradient import DataGradient, conv_gradient_rows
from twofour.kernels.nm_gradient import MODES, nm_gradient, nm_gradient_packed
from twofour.kernels.nm_matmul import native_rows
from twofour.kernels.nm_matmul.hybrid import hybrid_rows
from twofour.kernels.nm_unbiased import nm_unbiased
from twofour.kernels.norm import norm
from twofour.kernels.problem import Problem
from twofour.kernels.ragged import lay_out, pad_tokens, take_tokens
from twofour.packing import pack
from twofour.patterns import NM, GroupStrides, NonzeroBits, Transposable, parse, ties
from twofour.structure.permutation import search

ROWS, COLUMNS = 32, 64
WHOLE = ("int8", "int4")


@dataclass(frozen=True, eq=False)
class Call:
    """A call that was made: the function's name, and its arguments as they were before it."""

    name: str
    arguments: tuple[Any, ...]


class _Noting:
    """The extension, each call of which is noted."""

    def __init__(self, extension: Any, found: list[Call]) -> None:
        self._extension, self._found = extension, found

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._extension, name)
        if not callable(function) or name in ("cpu_has", "threads_backend"):
            return function

        def noted(*arguments: Any) -> Any:
            kept = tuple(one.detach().clone() if isinstance(one, Tensor) else one for one in arguments)
            if any(isinstance(one, Tensor) for one in kept):
                self._found.append(Call(name, kept))
            return function(*arguments)

        return noted


@cache
def good_calls() -> tuple[Call, ...]:
    """Return a call of every operation and every row of its table that this machine can run."""
    found: list[Call] = []
    extension, before = native.extension(), native.extension
    torch.manual_seed(0)
    native.extension = lambda: _Noting(extension, found)  # type: ignore[assignment]
    try:
        for operation in (_products, _dense_products, _convolutions, _attention, _norms, _patterns, _training):
            operation()
    finally:
        native.extension = before
    return tuple(found)


@cache
def calls_by_name() -> tuple[tuple[Call, ...], ...]:
    """Return the good calls of each function, in the order of names: the same functions at every instruction set."""
    names = sorted({call.name for call in good_calls()})
    return tuple(tuple(call for call in good_calls() if call.name == name) for name in names)


def sparse_weight() -> Tensor:
    """Return a 2:4 weight."""
    weight = torch.randn(ROWS, COLUMNS)
    return weight * parse("2:4").project(weight, absolute=True)


def prepared_weights() -> list[tuple[Any, Prepared]]:
    """Return each kernel of a packed weight that may run here with one in its layout."""
    weight, options = sparse_weight(), {"group": 32, "symmetric": False}
    packed = {name: pack(weight, "2:4", name, **(options if name == "int4" else {})) for name in _types()}
    rows = [row for row in native_rows() if row.unavailable() is None]
    found = [(row, row.prepare(packed[row.dtype])) for row in rows]
    for text in BLOCKS:
        rule = parse(text)
        blocks = torch.randn(ROWS, COLUMNS)
        blocks *= rule.project(blocks, absolute=True)
        ours = [row for row in block_rows() if row.unavailable() is None]
        found += [(row, row.prepare(pack(blocks, rule, row.dtype))) for row in ours]
    regions = parse("2:4+25%")
    dense = torch.randn(ROWS, COLUMNS)
    dense *= regions.project(dense, absolute=True)
    ours = [row for row in hybrid_rows() if row.unavailable() is None]
    found += [(row, row.prepare(pack(dense, regions, row.dtype))) for row in ours]
    return found


BLOCKS = ("block:16x16@0.5", "block:8x1@0.75", "block:4x4@0.75", "block:3x2@0.8")
"""Patterns of the weights of blocks: their strips, runs and padding differ."""


def _types() -> set[str]:
    return {row.dtype for row in native_rows()}


def _products() -> None:
    x, bias, other = torch.randn(3, COLUMNS), torch.randn(ROWS), torch.randn(3, ROWS)
    for row, prepared in prepared_weights():
        row.run(x, prepared, bias, Problem(ROWS))
        row.run(x, prepared, None, Problem(ROWS, Epilogue("gelu", "add")), other)
        row.restore(prepared)
        if row.layout in ("panels", "pairs", "bf16_panels"):
            row.run_columns(torch.randn(COLUMNS, 5), prepared, ROWS)
            row.refill(prepared, torch.randn(ROWS, COLUMNS))


def _dense_products() -> None:
    packed = pack(sparse_weight(), "2:4", "int4", group=32, symmetric=False)
    for row in native_dense_rows():
        if row.unavailable() is None:
            row.run(torch.randn(3, COLUMNS), row.prepare(packed), torch.randn(ROWS), Problem(ROWS))


def _convolutions() -> None:
    for geometry in (
        Geometry(8, 8, (3, 3), (1, 2), (1, 1), (1, 1)),
        Geometry(8, 8, (3, 3)),
        Geometry(16, 8, (1, 1), groups=2),
    ):
        each = geometry.in_channels // geometry.groups
        weight = torch.randn(8, *geometry.kernel, each)
        weight = (weight * parse("2:4").project(weight, absolute=True)).movedim(-1, 1)
        for row in (*native_conv_rows(), *direct_rows(), *winograd_rows()):
            if row.refuses(geometry) is None:
                row.run(
                    torch.randn(2, geometry.in_channels, 5, 6),
                    row.prepare(weight, geometry),
                    None,
                    ConvProblem.of(geometry),
                )
        rule = parse("2:4+25%")
        regions = torch.randn(8, *geometry.kernel, each)
        regions = (regions * rule.project(regions, absolute=True)).movedim(-1, 1)
        for row in hybrid_conv_rows():
            if row.refuses(geometry) is None:
                prepared = row.prepare(pack(regions, rule, axis=1), geometry)
                row.run(torch.randn(2, geometry.in_channels, 5, 6), prepared, None, ConvProblem.of(geometry))
                row.restore(prepared)


def _attention() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        q, k = torch.randn(2, 4, 3, 8).to(dtype), torch.randn(2, 2, 5, 8).to(dtype)
        attention(q, k, k, torch.ones(2, 1, 3, 5, dtype=torch.bool))
        attention(q, k, k, torch.randn(1, 1, 3, 5), causal=True)
        attention(q, k, k, k_added=k[:, :, :1], v_added=k[:, :, :1])
        columns = torch.randn(2, 4, 48).to(dtype)
        attention_of_columns(columns, columns, columns, (0, 16, 32), (16, 16, 16), 8)
        attention_of_windows(columns, columns, columns, torch.tensor([[0, 3], [2, 1]]), 8)
        attention_of_columns(columns, columns, columns, (0, 16, 32), (16, 16, 16), 8, int8=dtype is torch.bfloat16)
        whole = torch.randint(0, 256, (2, 4, 48), dtype=torch.uint8)
        attention_of_columns(whole, whole, whole, (0, 16, 32), (16, 16, 16), 8, steps=torch.rand(34))
        layout = lay_out(torch.arange(4) < torch.tensor([[3], [1]]), 6)
        packed = take_tokens(columns, layout.rows)
        parts = (0, 16, 32), (16, 16, 16), 8, layout.offsets
        pad_tokens(attention_of_sequences(packed, packed, packed, *parts), layout.places)


def _norms() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        norm(torch.randn(3, 33).to(dtype), torch.randn(33), torch.randn(33), 1e-5)
        norm(torch.randn(3, 16).to(dtype), None, None, 1e-5, centred=False)


def _patterns() -> None:
    scores = torch.randn(8, 32)
    for n, m in ((2, 4), (1, 4), (4, 8), (3, 6)):
        pattern, values = NM(n, m), torch.randn(8, 4 * m)
        kept = values * pattern.project(values, absolute=True)
        NonzeroBits.of(kept).count_groups(pattern, GroupStrides.along(tuple(kept.shape), 1))
        ties(values, pattern, GroupStrides.along(tuple(values.shape), 1))
    NonzeroBits.of(scores.bfloat16())
    NonzeroBits.of(torch.ones(8, 8, dtype=torch.int8))
    Transposable().project(scores, absolute=True)
    pack(sparse_weight(), "2:4")
    search(scores.abs(), "2:4", escapes=2, progress=False)
    search(torch.rand(4, 4 * 80), "2:4", escapes=0, rounds=1, progress=False)


def _training() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        gradient = torch.randn(2, 4, 16).to(dtype)
        for mode in MODES:
            nm_gradient(gradient, mode, eps=1e-6, seed=1)
        nm_gradient_packed(gradient, MODES[0])
        nm_unbiased(gradient[0], 3, dtype)
    problem = DataGradient.at(Geometry(5, 16, (3, 2), before=(1, 0), after=(1, 0)), (2, 2, 3))
    for row in conv_gradient_rows():
        if row.unavailable() is None:
            row.run(
                torch.randn(16, 5, 3, 2),
                Prepared(row, nm_gradient_packed(torch.randn(2, 4, 16), MODES[0])),
                None,
                problem,
            )


def operations() -> dict[str, Callable[..., Any]]:
    """Return the extension's functions that were called, by name."""
    return {call.name: getattr(native.extension(), call.name) for call in good_calls()}
