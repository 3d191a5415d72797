"""Where a whole model's time goes: per operator, before and after its graph was rewritten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from twofour.graph import Calls, Outline


@dataclass(frozen=True)
class OperatorTime:
    """All calls of one operator in one run of the example.

    Attributes:
        operator: Name of the operator; a product is followed by its epilogue.
        calls: How often it is called.
        ms: Median milliseconds of all calls together.
    """

    operator: str
    calls: int
    ms: float


@dataclass(frozen=True)
class GraphReport:
    """What became of the graph of a model that was compiled with an example.

    Attributes:
        engine: What runs the example's sizes: "graph", "layers" or "inductor".
        reason: Why that engine, and which calls the other one still serves.
        engine_ms: Median milliseconds of the whole model on the example, by engine.
        rewrites: Places changed, by rule, as they are in the graph that is timed: a join measured away is none.
        before: The model as it was captured, its layers as given, slowest first; run operator by operator; empty where
            the engines' times came with a file, so that nothing was timed.
        after: The rewritten graph, likewise, also where another engine is faster.
        outlines: The calls of both graphs, "before" and "after", for `Plan.draw`; empty where there is no graph.
        calls: What one run of the rewritten graph calls, and its memory; None where there is no graph.
        blocks: How many fused blocks there are, of how many operators, and why others are in none.
        bounds: Largest error against real arithmetic, by rule of algebra that was used; u is the type's unit roundoff.
        not_rewritten: Rules of algebra that would have saved something and were not used, with where and why.
        left_out: Rewrites that raised, with what: the graph was rewritten without them.
        attention: Whether attention computes in int8, what it takes and what that moves; "" where that is no question.
        ragged: Whether batches with padding run on their real tokens alone, and why not; "" without a mask of padding.
    """

    engine: str
    reason: str
    engine_ms: Mapping[str, float] = field(default_factory=dict)
    rewrites: Mapping[str, int] = field(default_factory=dict)
    before: tuple[OperatorTime, ...] = ()
    after: tuple[OperatorTime, ...] = ()
    outlines: Mapping[str, Outline] = field(default_factory=dict, repr=False)
    calls: Calls | None = None
    blocks: str = ""
    bounds: Mapping[str, str] = field(default_factory=dict)
    not_rewritten: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    attention: str = ""
    ragged: str = ""

    def to_dict(self) -> dict[str, object]:
        """Return JSON-ready fields."""
        times = {"before": self.before, "after": self.after}
        calls = {name: {"calls": one.computing, "bytes": one.nbytes} for name, one in self.outlines.items()}
        return {
            **self.__dict__,
            "outlines": calls,
            "calls": self.calls and self.calls.to_dict(),
            "engine_ms": dict(self.engine_ms),
            "rewrites": dict(self.rewrites),
            "bounds": dict(self.bounds),
            "not_rewritten": list(self.not_rewritten),
            "left_out": dict(self.left_out),
            **{name: [entry.__dict__ for entry in entries] for name, entries in times.items()},
        }

    def lines(self, shown: int = 6, *, timed: bool = True) -> list[str]:
        """Return the account as text: engines, rewrites, and the `shown` slowest operators before and after.

        Args:
            shown: How many operators.
            timed: Say the engines' milliseconds; else, where another line has the time of the one that runs, how many
                times as long the others take: they were raced against each other, at another moment.
        """
        engines = ", ".join(f"{name} {ms:.3f} ms" for name, ms in self.engine_ms.items())
        if not timed and (own := self.engine_ms.get(self.engine)):
            others = {_ENGINES.get(name, name): ms for name, ms in self.engine_ms.items() if name != self.engine}
            engines = ", ".join(f"{name} takes {ms / own:.2f}x its time" for name, ms in others.items())
        found = [f"whole model: {self.engine} ({self.reason}){'; ' if engines else ''}{engines}"]
        idle = "" if self.engine == "graph" else " (of the graph, which does not run)"
        if self.rewrites:
            done = ", ".join(f"{name} {count}" for name, count in self.rewrites.items() if count)
            found.append(f"rewrites{idle}: {done or 'none'}")
        if self.outlines:
            sizes = [
                f"{name} {one.computing} calls that write {one.nbytes / 1e6:.2f} MB"
                for name, one in self.outlines.items()
            ]
            found.append(f"graph{idle}: {', '.join(sizes)}")
        if self.calls:
            found.append(f"one run{idle}: {self.calls}")
        if self.attention:
            found.append(f"attention{idle}: {self.attention}")
        if self.ragged:
            found.append(f"ragged{idle}: {self.ragged}")
        if self.blocks:
            found.append(f"blocks{idle}: {self.blocks}")
        found += [f"error of {name}: {bound}" for name, bound in self.bounds.items() if not bound.startswith("0")]
        found += [f"not rewritten: {line}" for line in self.not_rewritten]
        found += [f"left out: {rule} raised {why}, please report it" for rule, why in self.left_out.items()]
        padded = ", padding too" if self.ragged else ""
        for name, times in (("before", self.before), (f"after{idle}", self.after)):
            if times:
                listed = [f"{entry.operator} {entry.ms:.3f} ms ({entry.calls})" for entry in times[:shown]]
                rest = sum(entry.ms for entry in times[shown:])
                listed += [f"other {rest:.3f} ms"] if times[shown:] else []
                total = sum(entry.ms for entry in times)
                found.append(f"{name}: {total:.3f} ms = {' + '.join(listed)}, {_ALONE}{padded}")
        return found


_ENGINES = {"layers": "layer by layer", "graph": "the graph"}
_ALONE = "each operator timed by itself"


def by_operator(times: Sequence[tuple[str, float]]) -> tuple[OperatorTime, ...]:
    """Sum seconds per node into milliseconds per operator, slowest first."""
    totals: dict[str, list[float]] = {}
    for operator, seconds in times:
        totals.setdefault(operator, []).append(1e3 * seconds)
    entries = [OperatorTime(operator, len(ms), sum(ms)) for operator, ms in totals.items()]
    return tuple(sorted(entries, key=lambda entry: -entry.ms))
