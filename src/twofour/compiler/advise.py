"""advise: measured per layer, will 2:4 make this model faster on this machine, before anything is pruned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from twofour import kernels, native
from twofour.compiler.choose import Choice, Progress, choose, require_room
from twofour.compiler.computing import Computing, dtype_name
from twofour.compiler.grouped import grouped
from twofour.compiler.plan import aligned
from twofour.compiler.replaceable import attention_parts, refusal, require_cpu, require_plain, require_tokens
from twofour.errors import CompileError
from twofour.layers import PrunableWeight, walk
from twofour.measure.cache import Cache
from twofour.packing import Packed
from twofour.patterns import parse
from twofour.patterns.base import is_finite, non_finite

TWO_FOUR = parse("2:4")

WORTH = 1.05
"""Ratio from which a layer is said to go faster: below it, the gain is within the noise of a shared machine."""


@dataclass(frozen=True)
class AdviceRow:
    """One layer at one token count.

    Attributes:
        layer: Name of the layer.
        shape: (out_features, in_features).
        tokens: Rows of the activation.
        dense_ms: Best dense time.
        sparse_ms: Best 2:4 time.
        kernel: The kernel that would run.
        verdict: One sentence.
    """

    layer: str
    shape: tuple[int, int]
    tokens: int
    dense_ms: float
    sparse_ms: float
    kernel: str
    verdict: str

    @property
    def ratio(self) -> float:
        """Best dense time over best sparse time; above 1 sparse is faster."""
        return self.dense_ms / self.sparse_ms


@dataclass(frozen=True)
class Advice:
    """What 2:4 would bring on this machine.

    Attributes:
        rows: One per layer and token count.
        skipped: Layer name and reason of each weight that would stay dense.
        tokens: Token counts measured.
        threads: Threads used.
        isa: Instruction-set level of the kernels.
    """

    rows: tuple[AdviceRow, ...]
    skipped: tuple[tuple[str, str], ...]
    tokens: tuple[int, ...]
    threads: int
    isa: str

    def total(self, tokens: int) -> tuple[float, float]:
        """Return milliseconds of all these layers at `tokens`: best dense, and with the better of dense and 2:4."""
        rows = [row for row in self.rows if row.tokens == tokens]
        return sum(row.dense_ms for row in rows), sum(min(row.dense_ms, row.sparse_ms) for row in rows)

    def __str__(self) -> str:
        head = ("layer", "count", "shape", "tokens", "dense ms", "2:4 ms", "ratio", "verdict")
        cells = [
            (
                "x".join(map(str, row.shape)),
                str(row.tokens),
                *(f"{ms:.4f}" for ms in (row.dense_ms, row.sparse_ms)),
                f"{row.ratio:.2f}",
                row.verdict,
            )
            for row in self.rows
        ]
        groups = grouped([row.layer for row in self.rows], cells)
        lines = [aligned(head, [(group.pattern, group.count, *cells[group.members[0]]) for group in groups])]
        for count in self.tokens:
            dense, best = self.total(count)
            lines.append(f"{count} tokens: {dense:.3f} ms dense, {best:.3f} ms with the better in each layer")
        left = (f"dense: {name}{f' {count}' if count else ''}: {reason}" for name, count, reason in self.left_dense())
        return "\n".join([*lines, *left])

    def left_dense(self) -> list[tuple[str, str, str]]:
        """Return `skipped` in one row per reason: the pattern of the names, their count ("" for one), the reason."""
        names, reasons = [name for name, _ in self.skipped], [reason for _, reason in self.skipped]
        return [(g.pattern, g.count, reasons[g.members[0]]) for g in grouped(names, reasons)]

    def to_dict(self) -> dict[str, object]:
        """Return JSON-ready fields."""
        rows = [{**row.__dict__, "shape": list(row.shape), "ratio": row.ratio} for row in self.rows]
        return {**self.__dict__, "rows": rows, "skipped": [list(s) for s in self.skipped], "tokens": list(self.tokens)}


def advise(
    model: nn.Module,
    *,
    tokens: Sequence[int] = (1, 8, 128),
    dtype: str | torch.dtype = "float32",
    group: int | None = None,
    skip: Sequence[str] = (),
    progress: Progress | None = None,
) -> Advice:
    """Measure, per eligible Linear, the best dense kernel against the best 2:4 one; the model is not changed.

    The weights are pruned by magnitude for the measurement only: what counts for time is the pattern.

    Args:
        model: Any model on the CPU with weights that `compile` takes at this `dtype`.
        tokens: Token counts (batch times sequence length) to measure.
        dtype: Computing type, as for `compile`.
        group: For int4, as for `compile`.
        skip: Layer globs to leave out.
        progress: Called with layers done, layers in all and the layer that is measured next.

    Raises:
        CompileError: The token counts are impossible, the model is compiled or not on the CPU, or no layer is
            eligible.
        PatternError: A weight holds NaN or infinity.
    """
    require_tokens(tokens)
    require_plain(model)
    require_cpu(model)
    computing, parts = Computing.of(dtype_name(dtype), group=group), attention_parts(model)
    found = walk(model, skip=skip)
    reasons = {entry.name: _refusal(entry.module, entry.layer in parts, computing) for entry in found.weights}
    chosen = [entry for entry in found.weights if reasons[entry.name] is None]
    skipped = [(entry.name, entry.reason) for entry in found.skipped]
    skipped += [(entry.name, reason) for entry in found.weights if (reason := reasons[entry.name]) is not None]
    if not chosen:
        raise _nothing(skipped, computing)
    require_room(tokens, max(entry.rows + entry.reduction for entry in chosen))
    cache = Cache.for_this_machine([kernel.name for kernel in kernels.rows()])
    footprint = sum(entry.parameter.nbytes for entry in chosen)
    rows: list[AdviceRow] = []
    for done, entry in enumerate(chosen):
        if progress is not None:
            progress(done, len(chosen), entry.layer)
        choice = _measure(entry, tokens, computing, footprint, cache)
        if isinstance(choice, str):
            skipped.append((entry.name, choice))
            continue
        rows += [_row(entry.layer, (entry.rows, entry.reduction), count, choice) for count in tokens]
    if not rows:
        raise _nothing(skipped, computing)
    cache.finish()
    if progress is not None:
        progress(len(chosen), len(chosen), "")
    return Advice(tuple(rows), tuple(skipped), tuple(tokens), native.threads(), native.isa())


def _nothing(skipped: Sequence[tuple[str, str]], computing: Computing) -> CompileError:
    return CompileError(
        "no layer of the model can run 2:4 here",
        reasons=[f"{name}: {reason}" for name, reason in skipped],
        wanted=f"at least one Linear whose weight {computing.dtype} kernels take and whose sizes suit the pattern",
        remedy="model.float() where the weights are of another dtype; skip fewer layers",
    )


def _refusal(module: nn.Module, inside_attention: bool, computing: Computing) -> str | None:
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return "a convolution: twofour.compile measures it on the images of an example"
    return refusal(module, inside_attention, computing)


def _measure(
    entry: PrunableWeight, tokens: Sequence[int], computing: Computing, footprint: int, cache: Cache
) -> Choice | str:
    """Return the choice of one layer, or why its weight cannot be packed."""
    bias = entry.module._parameters["bias"]
    dense = entry.reduction_last(entry.parameter.detach()).contiguous()
    if not is_finite(dense):
        raise non_finite("a weight", dense).for_layer(entry.layer)
    packed, because = computing.encode(dense * TWO_FOUR.project(dense, absolute=True), TWO_FOUR)
    if not isinstance(packed, Packed):
        return because
    bias = None if bias is None else bias.detach().float()
    terms = {"memory": "fast", "footprint": footprint, "cache": cache, "dtype": computing.dtype}
    return choose(packed, bias, tokens, activations=dense.dtype, **terms)


def _row(layer: str, shape: tuple[int, ...], tokens: int, choice: Choice) -> AdviceRow:
    dense, sparse = choice.best(tokens, sparse=False), choice.best(tokens, sparse=True)
    assert dense and sparse, choice.times
    ratio = dense[1] / sparse[1]
    if ratio >= WORTH:
        verdict = f"2:4 is {ratio:.2f}x as fast"
    elif ratio > 1 / WORTH:
        verdict = "no difference beyond noise; stays dense or packed as measured"
    else:
        verdict = f"dense stays: 2:4 would take {1 / ratio:.2f}x its time"
    rows, columns = shape
    return AdviceRow(
        layer,
        (rows, columns),
        tokens,
        dense[1] * 1e3,
        sparse[1] * 1e3,
        sparse[0] if sparse[1] < dense[1] else dense[0],
        verdict,
    )
