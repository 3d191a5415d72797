"""Blocks: the best dense product against the products with weights of blocks, and the sparse products of others.

Square weights of the sizes of recurrent layers. Dense candidates are those of the case `linear`. Sparse peers, in
float32: torch's BSR, which MKL multiplies where blocks are square, torch's CSR by MKL, and scipy's BSR and CSR.
oneDNN's CSR product is not reached by torch's wheels. Peers answer as they like best, columns of y for columns of x;
the bias is added inside their timing as everywhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from torch import Tensor

from cases import linear
from cases.columns import headed
from cases.records import machine_line
from cases.shapes import Shape
from twofour import measure
from twofour.measure import Record
from twofour.patterns import Block, parse

BLOCKS = ("16x16", "8x1", "8x4", "4x4", "16x32")

Calls = list[Callable[[], Any]]


def cells(
    dtype: str,
    sizes: Sequence[int],
    blocks: Sequence[str],
    sparsities: Sequence[float],
    tokens: Sequence[int],
    states: Sequence[str],
) -> list[dict[str, object]]:
    """List the cells: all of one weight together."""
    return [
        {
            "case": "block",
            "dtype": dtype,
            "shape": f"{size}x{size}",
            "pattern": f"block:{block}@{sparsity:g}",
            "weights": state,
            "threads": 1,
            "tokens": number,
        }
        for size in sizes
        for block in blocks
        for sparsity in sparsities
        for state in states
        for number in tokens
    ]


class Bench:
    """Measures cells on one thread, keeping the weight it is at."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.layer: linear.Layer | None = None
        self.at: tuple[object, ...] = ()

    def __call__(self, cell: dict[str, object]) -> Record:
        """Measure one cell."""
        rows, columns = map(int, str(cell["shape"]).split("x"))
        dtype, pattern = str(cell["dtype"]), str(cell["pattern"])
        at = (rows, columns, dtype, pattern, cell["weights"])
        if self.layer is None or self.at != at:
            self.layer = None
            self.layer = linear.Layer.of(Shape(pattern, rows, columns), dtype, pattern=pattern)
            self.at = at
        # As many copies as take the kept blocks out of the caches.
        nbytes = int(rows * columns * linear.BYTES[dtype] * (1 - _rule(cell).sparsity))
        cold = measure.copies_for_cold(nbytes) if cell["weights"] == "cold" else None
        return linear.measured(self.layer, cell, cold, self.seconds, _peers if dtype == "float32" else None)


def _rule(cell: dict[str, object]) -> Block:
    rule = parse(str(cell["pattern"]))
    assert isinstance(rule, Block), rule
    return rule


def _peers(layer: linear.Layer, x: Tensor, copies: int) -> dict[str, Calls]:
    """Return the sparse products of torch and scipy on the same weight."""
    import scipy.sparse

    rule = layer.packed.header.parsed()
    assert isinstance(rule, Block), rule
    weight, turned, numbers = layer.weight, layer.bias[:, None], layer.weight.numpy()
    columns, given = x.T.contiguous(), np.ascontiguousarray(x.T.numpy())

    def of_torch(sparse: Tensor) -> Tensor:
        return (sparse @ columns + turned).T

    def of_scipy(sparse: Any) -> Any:
        return (sparse @ given + turned.numpy()).T

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
            "torch CSR": (of_torch, weight.to_sparse_csr),
            "scipy CSR": (of_scipy, partial(scipy.sparse.csr_array, numbers)),
            "scipy BSR": (of_scipy, partial(scipy.sparse.bsr_array, numbers, blocksize=(rule.r, rule.c))),
        }
        if rule.r == rule.c:  # MKL's BSR has square blocks
            made["torch BSR"] = of_torch, partial(weight.to_sparse_bsr, (rule.r, rule.c))
        return {name: [partial(run, one) for one in _copied(make(), copies)] for name, (run, make) in made.items()}


def _copied(sparse: Any, count: int) -> list[Any]:
    """Return a sparse matrix and copies of it, as many as leave the caches or `count`, whichever is less."""
    if isinstance(sparse, Tensor):
        parts, copy = [sparse.values(), sparse.col_indices(), sparse.crow_indices()], sparse.clone
    else:
        parts, copy = [sparse.data, sparse.indices, sparse.indptr], sparse.copy
    if count > 1:
        count = min(count, measure.copies_for_cold(max(1, sum(part.nbytes for part in parts))).copies)
    return [sparse, *(copy() for _ in range(count - 1))]


def ratios(record: Record) -> tuple[float, float | None]:
    """Return the best dense time over the best of blocks, and that of the best sparse peer."""
    dense = linear.baseline(str(record.meta["dtype"]), list(record.timings))
    ours = [name for name in record.timings if name.startswith("block_matmul")]
    best = min(map(record.median, ours))
    peers = [record.median(name) for name in record.timings if name not in ours and name not in dense]
    peers = [seconds for seconds in peers if record.meta["dtype"] == "float32"]
    return min(map(record.median, dense)) / best, min(peers) / best if peers else None


def show(records: Sequence[Record], console: Console) -> None:
    """Print a row per weight and token count: the times of both sides, and their ratios."""
    heads = (
        "shape",
        "pattern",
        "weights",
        "tokens",
        "dense ms",
        "blocks ms",
        "dense/blocks",
        "peer/blocks",
        "dense is",
    )
    table = headed(heads, words=3)
    for record in records:
        dense = linear.baseline(str(record.meta["dtype"]), list(record.timings))
        fastest = min(dense, key=record.median)
        ours = min(record.median(name) for name in record.timings if name.startswith("block_matmul"))
        gain, peer = ratios(record)
        table.add_row(
            *(str(record.meta[key]) for key in ("shape", "pattern", "weights", "tokens")),
            f"{1e3 * record.median(fastest):.4f}",
            f"{1e3 * ours:.4f}",
            f"{gain:.2f}",
            "-" if peer is None else f"{peer:.2f}",
            fastest,
        )
    console.print(table)
    console.print(machine_line(records[-1]), highlight=False, markup=False, soft_wrap=True)
