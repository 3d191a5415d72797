"""What became of a checkpoint: a table, JSON, and one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from twofour.streaming.shard import Outcome


@dataclass(frozen=True)
class Report:
    """What became of a checkpoint.

    Attributes:
        layers: One entry per sparse weight.
        skipped: (name, reason) of the weights that stayed dense.
        resumed: Files that an earlier, interrupted run had finished.
        files: Every file that was written.
    """

    layers: tuple[Outcome, ...]
    skipped: tuple[tuple[str, str], ...]
    resumed: int = 0
    files: tuple[str, ...] = ()

    @property
    def settled(self) -> tuple[str, ...]:
        """Names of the weights that obeyed their patterns before: nothing was taken away, and not all is zero."""
        return tuple(outcome.name for outcome in self.layers if outcome.kept == 1 > outcome.zeros)

    @property
    def summary(self) -> str:
        """One sentence."""
        count = len(self.layers)
        return f"{count} of {count} promised weights kept; {len(self.skipped)} skipped"

    def to_dict(self) -> dict[str, object]:
        """Return the report as JSON-ready values; "promised" is the pattern, as in the report of a check."""
        layers = [{"promised": outcome.pattern, **asdict(outcome)} for outcome in self.layers]
        skipped = [{"name": name, "reason": reason} for name, reason in self.skipped]
        return {"ok": True, "summary": self.summary, "streamed": True, "layers": layers, "skipped": skipped}

    def rows(self) -> list[Sequence[str]]:
        """Return the table's rows: weight, kind, shape, axis, pattern, zeros, share of |w| kept."""
        return [
            (
                outcome.name,
                outcome.kind,
                "x".join(map(str, outcome.shape)),
                str(outcome.axis),
                outcome.pattern,
                f"{outcome.zeros:.1%}",
                f"{outcome.kept:.1%}",
            )
            for outcome in self.layers
        ]
