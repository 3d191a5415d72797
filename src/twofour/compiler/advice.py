"""What advise found: per layer and token count, which pattern pays on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from twofour.compiler.plan import aligned
from twofour.layers.grouped import grouped

WORTH = 1.05
"""Ratio from which a layer is said to go faster: below it, the gain is within the noise of a shared machine."""


@dataclass(frozen=True)
class AdviceRow:
    """One layer with one pattern at one token count.

    Attributes:
        layer: Name of the layer.
        shape: (out_features, in_features); of a recurrent layer the first weight's.
        tokens: Rows of the activation; of a recurrent layer steps of one sequence.
        dense_ms: Best dense time, the least of the races of this layer at this token count: one for all its patterns.
        sparse_ms: Best time with the pattern.
        kernel: The kernel that would run.
        verdict: One sentence.
        pattern: Text of the pattern, or of widths.
        own: Whether these are widths that the layer computes in already.
    """

    layer: str
    shape: tuple[int, int]
    tokens: int
    dense_ms: float
    sparse_ms: float
    kernel: str
    verdict: str
    pattern: str = "2:4"
    own: bool = False

    @property
    def ratio(self) -> float:
        """Best dense time over best sparse time; above 1 sparse is faster."""
        return self.dense_ms / self.sparse_ms


class Raced(NamedTuple):
    """The best dense kernel and the best one of a pattern in one race, each a name and seconds; else as `AdviceRow`."""

    layer: str
    shape: tuple[int, int]
    tokens: int
    pattern: str
    dense: tuple[str, float]
    sparse: tuple[str, float]
    own: bool = False


def judged(races: Sequence[Raced]) -> tuple[AdviceRow, ...]:
    """Return a row for each race; those of one layer and token count stand beside the fastest dense run of them all.

    The dense kernels are the same in each race: a slower run of them was disturbed.
    """
    least: dict[tuple[str, int], tuple[str, float]] = {}
    for race in races:
        place = race.layer, race.tokens
        least[place] = min(least.get(place, race.dense), race.dense, key=lambda one: one[1])
    return tuple(_row(race, least[race.layer, race.tokens]) for race in races)


def _row(race: Raced, dense: tuple[str, float]) -> AdviceRow:
    layer, shape, tokens, pattern, _, sparse, own = race
    ratio = dense[1] / sparse[1]
    if ratio >= WORTH:
        verdict = f"{pattern} is {ratio:.2f}x as fast"
    elif ratio > 1 / WORTH:
        verdict = "no difference beyond noise; stays dense or packed as measured"
    else:
        verdict = f"dense stays: {pattern} would take {1 / ratio:.2f}x its time"
    kernel = min(dense, sparse, key=lambda one: one[1])[0]  # the first of equals: a tie stays dense
    return AdviceRow(layer, shape, tokens, 1e3 * dense[1], 1e3 * sparse[1], kernel, verdict, pattern, own)


@dataclass(frozen=True)
class Advice:
    """What patterns would bring on this machine.

    Attributes:
        rows: One per layer, token count and pattern that fits the layer.
        skipped: Weight name and reason of each that would stay dense, with any pattern or with the one that is named.
        tokens: Token counts measured.
        threads: Threads used.
        isa: What the kernels may use, as `native.isa_text` says it.
        patterns: Texts of the patterns measured.
    """

    rows: tuple[AdviceRow, ...]
    skipped: tuple[tuple[str, str], ...]
    tokens: tuple[int, ...]
    threads: int
    isa: str
    patterns: tuple[str, ...] = ("2:4",)

    def of(self, layer: str, tokens: int) -> dict[str, AdviceRow]:
        """Return the rows of a layer at a token count by pattern."""
        return {row.pattern: row for row in self.rows if (row.layer, row.tokens) == (layer, tokens)}

    def best(self, layer: str, tokens: int) -> AdviceRow | None:
        """Return the row of the pattern that pays most in a layer, None where dense stays."""
        found = max(self.of(layer, tokens).values(), key=lambda row: row.ratio, default=None)
        return found if found is not None and found.ratio >= WORTH else None

    def total(self, tokens: int, pattern: str | None = None) -> tuple[float, float]:
        """Return milliseconds of all these layers at `tokens`: best dense, and with the better of dense and a pattern.

        Args:
            tokens: One of the counts measured.
            pattern: One of the patterns; None: of all of them the best in each layer.
        """
        dense = best = 0.0
        for layer in dict.fromkeys(row.layer for row in self.rows):
            rows = self.of(layer, tokens)
            own = min(row.dense_ms for row in rows.values())
            chosen = [row.sparse_ms for name, row in rows.items() if pattern in (None, name)]
            dense, best = dense + own, best + min([own, *chosen])
        return dense, best

    def total_of_own(self, tokens: int) -> tuple[float, float] | None:
        """Return milliseconds at `tokens` of the layers of low bits: best dense, and each in its own widths.

        None where there is no such layer.
        """
        rows = [row for row in self.rows if row.own and row.tokens == tokens]
        return (sum(row.dense_ms for row in rows), sum(row.sparse_ms for row in rows)) if rows else None

    def __str__(self) -> str:
        head = ("layer", "count", "shape", "tokens", "pattern", "dense ms", "sparse ms", "ratio", "verdict")
        cells = [
            (
                "x".join(map(str, row.shape)),
                str(row.tokens),
                row.pattern,
                *(f"{ms:.4f}" for ms in (row.dense_ms, row.sparse_ms)),
                f"{row.ratio:.2f}",
                row.verdict,
            )
            for row in self.rows
        ]
        groups = grouped([row.layer for row in self.rows], cells)
        lines = [aligned(head, [(group.pattern, group.count, *cells[group.members[0]]) for group in groups])]
        lines += [self.summary(count) for count in self.tokens]
        left = (f"dense: {name}{f' {count}' if count else ''}: {reason}" for name, count, reason in self.left_dense())
        return "\n".join([*lines, *left])

    def summary(self, tokens: int) -> str:
        """Return one sentence on all layers at a token count: with the better of dense and a pattern in each layer."""
        dense, _ = self.total(tokens)
        found = [(pattern, self.total(tokens, pattern)[1]) for pattern in self.patterns]
        each = ", ".join(f"{pattern} {ms:.3f} ms ({dense / ms:.2f}x)" for pattern, ms in found)
        many, own = "token" if tokens == 1 else "tokens", self.total_of_own(tokens)
        mix = f"; the layers of low bits, each in its own: {own[1]:.3f} ms ({own[0] / own[1]:.2f}x)" if own else ""
        return (
            f"{tokens} {many}: these layers take {dense:.3f} ms dense, the sum of their rows; with the better of dense "
            f"and a pattern in each: {each}{mix}"
        )

    def left_dense(self) -> list[tuple[str, str, str]]:
        """Return `skipped` in one row per reason: the pattern of the names, their count ("" for one), the reason."""
        names, reasons = [name for name, _ in self.skipped], [reason for _, reason in self.skipped]
        return [(g.pattern, g.count, reasons[g.members[0]]) for g in grouped(names, reasons)]

    def to_dict(self) -> dict[str, object]:
        """Return JSON-ready fields."""
        rows = [{**row.__dict__, "shape": list(row.shape), "ratio": row.ratio} for row in self.rows]
        skipped, listed = [list(one) for one in self.skipped], {"tokens": list(self.tokens)}
        return {**self.__dict__, "rows": rows, "skipped": skipped, **listed, "patterns": list(self.patterns)}


def verdict_of(rows: Sequence[AdviceRow]) -> str:
    """Say in one phrase where patterns pay in one layer, of all its rows."""
    counts = list(dict.fromkeys(row.tokens for row in rows))
    said: list[str] = []
    for pattern in dict.fromkeys(row.pattern for row in rows):
        faster = [row.tokens for row in rows if row.pattern == pattern and row.ratio >= WORTH]
        if faster:
            said.append(pattern if faster == counts else f"{pattern} at {', '.join(map(str, faster))}")
    return f"faster: {'; '.join(said)}" if said else "dense stays: no pattern is faster"
