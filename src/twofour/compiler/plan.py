"""What compile decided, layer by layer, with the times behind each decision."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from twofour.compiler.choose import Choice
from twofour.compiler.graph_report import GraphReport
from twofour.compiler.layouts import Times
from twofour.errors import CompileError
from twofour.graph import EXACT, Calls
from twofour.graph.plot import draw
from twofour.kernels.base import Row
from twofour.kernels.conv import Images
from twofour.kernels.table import find
from twofour.layers.grouped import grouped, one_text, without_numbers
from twofour.measure.travelling import MachineTimes


@dataclass(frozen=True)
class LayerPlan:
    """How one layer runs.

    Attributes:
        name: Name of the layer in the model.
        kind: Class of the layer, "Linear", "Conv2d", ...
        shape: Shape of its dense weight.
        tokens: Token count the row of the table speaks of: the example's, or the largest measured; of a convolution,
            the output pixels of all images.
        kernel: Kernel that runs at `tokens`.
        dispatch: Kernels by token count, as text; "" for a layer left as it was.
        dense_ms: Dense time at `tokens`: of `kernel` if it is dense, else the best; None where nothing was measured.
        sparse_ms: Sparse time at `tokens`: of `kernel` if it is sparse, else the best; None without a sparse kernel.
        reason: Why this kernel.
        bytes_before: Bytes of the dense weight.
        bytes_after: Bytes of the weight in every layout kept, those of the graph included.
        bytes_in_file: Bytes of the weight as `twofour.save` writes it.
        parts: Layers whose weights one product of the graph holds together; empty but for such a product.
        dense_because: Why its weight is not packed, "" where it is or nothing was measured.
        times: Median seconds of each kernel at each measured token count.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    tokens: int | None
    kernel: str
    dispatch: str
    dense_ms: float | None
    sparse_ms: float | None
    reason: str
    bytes_before: int
    bytes_after: int
    bytes_in_file: int = 0
    parts: tuple[str, ...] = ()
    times: Times = field(default_factory=dict, repr=False)
    dense_because: str = ""

    @property
    def sparse(self) -> bool:
        """Whether a sparse kernel runs at `tokens`."""
        return self.kernel != "torch" and find(self.kernel, Row).sparse


@dataclass(frozen=True)
class Plan:
    """The decisions for a whole model.

    Attributes:
        layers: One entry per Linear, convolution, attention and recurrent layer, and one per product of the graph that
            holds the weights of several or of no such layer.
        dtype: Computing type.
        memory: "fast" or "small".
        tokens: Token counts that were measured besides the example's.
        threads: Threads the times were measured with.
        isa: What the kernels may use, as `native.isa_text` says it; of a GPU its name.
        error: Relative error ||compiled - masked|| / ||masked|| of the worst output on the example; None without one.
        group: Inputs that share a scale in int4.
        symmetric: Whether int4 has no zero points.
        ranges: Of int8, what its inputs are rounded by: "a range of each token" or "static ranges of the data", in
            how many layers where that is not all; "" of another type.
        embeddings: What tables of embeddings are kept in, "" where they are as the model has them.
        counts: Tokens that each compiled Linear saw in the example; empty without one.
        images: Images, height and width that each convolution of low bits saw in the example.
        steps: Steps and sequences that each recurrent layer saw in the example; empty without one.
        account: What became of the graph, and where the whole model's time goes; None without one.
        whole_ms: Median milliseconds of the whole model on the example, "dense" and "compiled"; empty without one.
        rounded: Whether the model that was given has layers of low bits, which eager torch computes in floats.
        kept_dense: Layers that are dense since the whole model is faster so, whatever their own times say.
        rules: Which rules of algebra a graph may be rewritten by, "exact" or "close".
        machines: The times these decisions rest on and those of other machines, which `twofour.save` writes.
        graph: The captured graph as `twofour.save` writes it; None without one, or where a file has no words for it.
        notes: What was measured, how surely, and what could not be done, a sentence each.
    """

    layers: tuple[LayerPlan, ...]
    dtype: str
    memory: str
    tokens: tuple[int, ...]
    threads: int
    isa: str
    error: float | None = None
    group: int = 64
    symmetric: bool = True
    ranges: str = ""
    embeddings: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
    images: Mapping[str, Images] = field(default_factory=dict)
    steps: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    account: GraphReport | None = None
    whole_ms: Mapping[str, float] = field(default_factory=dict)
    rounded: bool = False
    kept_dense: tuple[str, ...] = ()
    rules: str = EXACT
    machines: tuple[MachineTimes, ...] = field(default=(), repr=False)
    graph: Mapping[str, Any] | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()

    @property
    def won(self) -> str:
        """What compiling won on the example, in one line; "" where the whole model was not timed."""
        if not self.whole_ms:
            return ""
        dense, compiled = self.whole_ms["dense"], self.whole_ms["compiled"]
        engine = self.account.engine if self.account else "layers"
        what = "the model as it was given, in eager torch"
        if self.rounded:
            what = "the rounded model in eager torch; the float model is not here"
        return (
            f"one call on the example: dense {dense:.3f} ms, compiled {compiled:.3f} ms, {dense / compiled:.2f} times "
            f"as fast ({engine}, {self._threads}; dense is {what})"
        )

    @property
    def _threads(self) -> str:
        return "1 thread" if self.threads == 1 else f"{self.threads} threads"

    @property
    def bytes_before(self) -> int:
        """Bytes of the dense weights of all layers."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """Bytes of these weights as the compiled model keeps them."""
        return sum(layer.bytes_after for layer in self.layers)

    @property
    def bytes_in_file(self) -> int:
        """Bytes of these weights as `twofour.save` writes them."""
        return sum(layer.bytes_in_file for layer in self.layers)

    def with_note(self, *notes: str) -> Plan:
        """Return the plan with more sentences behind it."""
        return replace(self, notes=(*self.notes, *notes))

    @property
    def calls(self) -> Calls | None:
        """What one run of the graph calls, and its memory; None without a graph."""
        return self.account and self.account.calls

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw the model's graph before and after compile: calls in the colour of their mapping type, bytes on edges.

        Args:
            path: File to write, .svg, .png or .pdf.

        Raises:
            CompileError: There is no graph, matplotlib is not installed, or the file cannot be written.
        """
        if self.account is None or not self.account.outlines:
            raise CompileError(
                "there is no graph to draw",
                got="no example" if self.account is None else self.account.reason,
                wanted="a model whose graph was captured",
                remedy="compile(model, example=...) with the input of one call",
            )
        draw(self.account.outlines, path)

    def to_dict(self) -> dict[str, object]:
        """Return JSON-ready fields."""
        layers = [
            {
                **layer.__dict__,
                "shape": list(layer.shape),
                "sparse": layer.sparse,
                "times": {str(n): t for n, t in layer.times.items()},
            }
            for layer in self.layers
        ]
        account = self.account and self.account.to_dict()
        listed = {"layers": layers, "tokens": list(self.tokens), "counts": dict(self.counts), "account": account}
        listed |= {"steps": {name: list(found) for name, found in self.steps.items()}}
        listed |= {"whole_ms": dict(self.whole_ms), "kept_dense": list(self.kept_dense)}
        listed |= {"notes": list(self.notes), "machines": [machine.to_json() for machine in self.machines]}
        return {**self.__dict__, **listed}

    @property
    def _whence(self) -> str:
        """Whence the times of all rows are, " (from the file, ...)"; "" where rows differ, which say it themselves."""
        texts = [layer.reason for layer in self.layers if (layer.dense_ms, layer.sparse_ms) != (None, None)]
        found = {tuple(dict.fromkeys(_FROM_FILE.findall(text))) for text in texts}
        (whence,) = found if len(found) == 1 else [()]
        return f" ({whence[0]})" if len(whence) == 1 else ""

    def __str__(self) -> str:
        head = ("layer", "count", "shape", "tokens", "kernel", "dense ms", "sparse ms", "why")
        account = self.account.lines(timed=not self.whole_ms) if self.account else []
        whence = self._whence
        shown = [replace(layer, reason=layer.reason.replace(whence, "")) for layer in self.layers]
        times = [f"times {whence[2:-1]}"] if whence else []
        lines = [*filter(None, [self.won]), *times, aligned(head, _rows(shown))]
        whole = [layer for layer in self.layers if not layer.parts]
        holding = {part: layer for layer in self.layers for part in layer.parts}
        sparse = sum(holding.get(layer.name, layer).sparse for layer in whole)  # a part runs as its product does
        error = "" if self.error is None else f", error on the example {self.error:.1e} of the answer's norm"
        lines.append(
            f"{sparse} of {len(whole)} layers run sparse "
            f"({', '.join(filter(None, (self.dtype, self.ranges, self._threads, self.isa)))}); "
            f"their weights {self.bytes_before / 1e6:.2f} MB dense, {self.bytes_after / 1e6:.2f} MB as kept "
            f'(memory="{self.memory}"), {self.bytes_in_file / 1e6:.2f} MB of a file{error}'
        )
        return "\n".join([*lines, *(line.replace(whence, "") for line in account), *self.notes])


def described(
    name: str,
    kind: str,
    shape: tuple[int, ...],
    tokens: int,
    choice: Choice,
    reason: str,
    sizes: tuple[int, int, int],
    parts: tuple[str, ...] = (),
    dense_because: str = "",
) -> LayerPlan:
    """Return the entry of a layer that was measured; `sizes`: bytes before, after and in a file."""
    dense, sparse = choice.at(tokens, sparse=False), choice.at(tokens, sparse=True)
    ms = dense and dense * 1e3, sparse and sparse * 1e3
    runs = choice.runs(tokens).name, choice.dispatch.to_text()
    return LayerPlan(name, kind, shape, tokens, *runs, *ms, reason, *sizes, parts, choice.times, dense_because)


def with_products(layers: Sequence[LayerPlan], products: Sequence[LayerPlan]) -> tuple[LayerPlan, ...]:
    """Return the plan of layers with what a graph added: each layer stays listed once, as it runs in the graph.

    Args:
        layers: As they were decided one by one.
        products: Of the graph, with bytes of their own. One named like a layer, or like the `in_proj_weight` of an
            attention, runs in its place; one with `parts` runs in the places of several and gets a row of its own.
    """
    found = {layer.name: layer for layer in layers}
    for new in products:
        name = new.name if new.name in found else new.name.removesuffix(".in_proj_weight")
        old = found.get(name)
        if old is None:
            owner = next((around for around in _around(new.name) if around in found), None)
            if owner is not None:  # a part of a layer that reads its weights itself: they are counted there
                found[owner] = replace(found[owner], reason=f"{found[owner].reason}; in the graph `{new.name}`")
                new = replace(new, bytes_before=0, bytes_after=new.bytes_after - new.bytes_before, bytes_in_file=0)
            found[name] = new
        else:
            kept = old.bytes_after + new.bytes_after - new.bytes_before
            own = {"name": name, "kind": old.kind, "shape": old.shape, "bytes_in_file": old.bytes_in_file}
            found[name] = replace(new, **own, bytes_before=old.bytes_before, bytes_after=kept)
        for part in new.parts:
            if part in found:
                reason = f"{found[part].reason}; in the graph a part of `{new.name}`"
                found[part] = replace(found[part], reason=reason)
    return tuple(found.values())


def _around(name: str) -> list[str]:
    """Return the names of the modules around a parameter, the innermost first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text, each column as wide as its widest cell; one whose cells are all empty is left out."""
    shown = [column for column in range(len(head)) if not rows or any(row[column] for row in rows)]
    table = [[row[column] for column in shown] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in table
    )


_FROM_FILE = re.compile(r" \(((?:in part )?from the file, [^()]*(?:\([^()]*\)[^()]*)*)\)")
"""Whence times are; the head of the table says it once where all rows have the same."""


def _rows(layers: Sequence[LayerPlan]) -> list[tuple[str, ...]]:
    """Return the cells of a table: a row per layer, one for all that run alike for one reason."""
    names = [layer.name or "(model)" for layer in layers]
    rows = []
    for group in grouped(names, [_key(layer) for layer in layers]):
        alike = [layers[index] for index in group.members]
        first = alike[0]
        rows.append(
            (
                group.pattern,
                group.count,
                "x".join(str(size) for size in first.shape),
                "-" if first.tokens is None else str(first.tokens),
                first.kernel,
                _span([layer.dense_ms for layer in alike]),
                _span([layer.sparse_ms for layer in alike]),
                one_text([layer.reason for layer in alike]),
            )
        )
    return rows


def _key(layer: LayerPlan) -> tuple[object, ...]:
    """Return what layers on one line share; their times may differ, but not in that there are some."""
    timed = layer.dense_ms is None, layer.sparse_ms is None
    return layer.kind, layer.shape, layer.tokens, layer.kernel, *timed, without_numbers(layer.reason)


def _span(ms: Sequence[float | None]) -> str:
    """Return milliseconds of equal layers: one figure, or the least and the largest."""
    known = [value for value in ms if value is not None]
    return "-".join(dict.fromkeys(f"{value:.4f}" for value in (min(known), max(known)))) if known else "-"
