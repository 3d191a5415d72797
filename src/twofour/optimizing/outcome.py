"""Outcome: what `optimize` found, and the choice among the models that it tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torch import nn

from twofour.errors import OptimizeError
from twofour.measure import Record
from twofour.report import Score
from twofour.report.facts import milliseconds, size

TIE = 0.02
"""Of two models whose times differ by less, the one of the better quality is kept."""


DENSE = "dense"
"""What a model is called that is compiled without pruning, and the one that all are held against."""


@dataclass(frozen=True)
class Candidate:
    """A model that is compiled: whether it is the pruned one, its type, and low bits if any."""

    sparse: bool
    dtype: str
    widths: str = ""

    def name(self, pattern: str) -> str:
        """Return what tables call it, pruned to this pattern."""
        return f"twofour {pattern if self.sparse else DENSE}, {self.widths or self.dtype}"


@dataclass(frozen=True)
class Tried:
    """One model that was compiled.

    Attributes:
        name: "2:4, int8".
        sparse: Whether it is 2:4 and some layer of it runs sparse.
        score: Its quality; None where it did not compile.
        seconds: Median seconds of a call; None where it was not timed.
        nbytes: Bytes of its file.
        refused: Why it did not compile, "" where it did.
    """

    name: str
    sparse: bool
    score: Score | None = None
    seconds: float | None = None
    nbytes: int = 0
    refused: str = ""


@dataclass(frozen=True)
class Choice:
    """The model that is kept, and what became of each.

    Attributes:
        kept: Its name.
        reasons: Name -> what became of it.
        held: Whether its quality holds.
    """

    kept: str
    reasons: dict[str, str]
    held: bool


WORTH = 0.05
"""Without a limit a model that answers worse is kept only where it takes so much less time: less is noise's."""


def choose(tried: Sequence[Tried], least: float | None) -> Choice:
    """Keep the fastest model whose quality is at least `least`.

    Without a limit no loss was allowed: a model of less quality is kept only where it takes `WORTH` less time than
    those that answer better. Where none holds, the one of the best quality is kept, and `held` says so.

    Args:
        tried: The models.
        least: The quality that is wanted; None without a limit.

    Raises:
        OptimizeError: None was timed.
    """
    timed = [one for one in tried if one.score is not None and one.seconds is not None]
    holding = [one for one in timed if least is None or (one.score is not None and one.score.value >= least)]
    if not timed:
        raise OptimizeError(
            "no model was timed, so that none can be chosen",
            got=f"{len(tried)} models, none with both a quality and a time",
            wanted="a model that compiles, is judged and timed",
            reasons=[f"{one.name}: {one.refused or 'not judged or not timed'}" for one in tried],
            remedy="remove the folder of the run and start it again",
        )
    if holding:
        fastest = min(one.seconds for one in holding if one.seconds is not None)
        share = WORTH if least is None else TIE
        near = [one for one in holding if one.seconds is not None and one.seconds <= (1 + share) * fastest]
    else:
        near = timed
    kept = max(near, key=lambda one: (one.score.value if one.score else 0.0, -(one.seconds or 0.0)))
    reasons = {one.name: _reason(one, kept, timed, least, bool(holding)) for one in tried}
    return Choice(kept.name, reasons, bool(holding))


def _reason(one: Tried, kept: Tried, timed: Sequence[Tried], least: float | None, held: bool) -> str:
    if one.refused:
        return f"not compiled: {one.refused}"
    assert one.score is not None and one.seconds is not None and kept.seconds is not None
    told = f"{milliseconds(one.seconds)} ms, quality {one.score.value:.2f}"
    if one.name == kept.name:
        if not held:
            return f"kept: no model's quality holds, and this one's is the best; {told}"
        if least is None and any((other.seconds or 0.0) < one.seconds for other in timed):
            best = all(other.score is None or other.score.value <= one.score.value for other in timed)
            among = "" if best else f" among those within {WORTH:.0%} of the fastest"
            return f"kept: the best quality{among}, and no model of less wins time worth it; {told}"
        return f"kept: the fastest{' whose quality holds' if least is not None else ''}; {told}"
    if least is not None and one.score.value < least:
        return f"its quality does not hold: {one.score.value:.2f}, at least {least:.2f} was wanted; {told}"
    if one.seconds < kept.seconds / (1 + TIE):
        return f"faster by {kept.seconds / one.seconds - 1:.0%}, which its quality is not worth; {told}"
    if one.seconds <= kept.seconds * (1 + TIE):
        return f"as fast as the one that is kept, of no better quality; {told}"
    return f"slower than the one that is kept, by {one.seconds / kept.seconds - 1:.0%}; {told}"


@dataclass(frozen=True)
class Outcome:
    """What `optimize` found; the folder holds it too.

    Attributes:
        folder: Where the model, plan.json, results.json and report.html lie.
        kept: Name of the model that is kept.
        sparse: Whether it runs sparse.
        held: Whether its quality holds; True without a limit.
        record: Times of all models and of the runtimes.
        quality: Name -> score, the dense model's first.
        reasons: Name -> what became of it.
        loading: Python that loads the result.
        verdict: What was won, in a sentence or two.
        model: The kept model, as the file gives it.
    """

    folder: Path
    kept: str
    sparse: bool
    held: bool
    record: Record
    quality: Mapping[str, Score]
    reasons: Mapping[str, str]
    loading: str
    verdict: str
    model: nn.Module | None = field(default=None, repr=False, compare=False)

    @property
    def speedup(self) -> float:
        """Times as fast as the fastest of the runtimes with the dense model."""
        return self.record.ratio(self.kept)

    @property
    def measured(self) -> str:
        """What the quality is, what it rests on, and the least that was wanted, in words."""
        judged, *closer = cast("list[dict[str, Any]]", self.record.meta["quality"])
        least = "" if judged["floor"] is None else f" At least {judged['floor']:.2f} was wanted."
        return f"{judged['title']}. {judged['said']}{least}" + "".join(f" {self._closer(one)}" for one in closer)

    def _closer(self, measure: Mapping[str, Any]) -> str:
        """Say the kept model's figure of a measure beside the one that it was kept by."""
        score = next(score for score in measure["scores"] if score["name"] == self.kept)
        return f"{measure['title']}: {score['value']:.2f} ({score['note']})."

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the one table: model, milliseconds, times as fast, quality, what became of it."""
        best = self.record.fastest(self.record.baseline)
        rows = []
        for name in sorted(self.record.timings, key=self.record.median):
            score = self.quality.get(name)
            ratio = self.record.median(best) / self.record.median(name)
            said = self.reasons.get(name, "").partition(";")[0]
            cells = milliseconds(self.record.median(name)), f"{ratio:.2f}x", score_text(score)
            rows.append((name, *cells, said or ("the fastest dense runtime" if name == best else "dense runtime")))
        timed = self.record.timings
        rows += [(name, "-", "-", "-", said) for name, said in self.reasons.items() if name not in timed]
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {
            "folder": str(self.folder),
            "kept": self.kept,
            "sparse": self.sparse,
            "held": self.held,
            "times_as_fast": self.speedup,
            "verdict": self.verdict,
            "loading": self.loading,
            "quality": {name: vars(score) for name, score in self.quality.items()},
            "reasons": dict(self.reasons),
            "record": self.record.to_dict(),
        }


def score_text(score: Score | None) -> str:
    """Return a quality as a table says it."""
    if score is None:
        return ""
    return f"{score.value:.2f}" + (f" ± {score.error:.2f}" if score.error else "")


CROWD = 2
"""From so many processes that want to run for each processor on, threads of one call wait for each other."""


def _crowd(record: Record) -> str:
    """Say that other work was on the machine while the models were timed, "" where there was none to speak of."""
    cores, load = record.machine.get("cores_allowed"), record.load_average
    if not isinstance(cores, int) or load is None or load < CROWD * cores:
        return ""
    fewer = f", or with --threads 1: {record.threads} threads wait for each other" if record.threads > 1 else ""
    return (
        f" The machine was busy: {load:.1f} processes wanted to run on {cores} processors, so that times are too long "
        f"and their order may be another. Run it again, with another folder, on a free one{fewer}."
    )


def verdict_of(
    record: Record, kept: Tried, dense: Score, held: bool, within: float | None, plain: str
) -> tuple[str, list[tuple[str, str, str]]]:
    """Return what was won in words, and the figures that stand out.

    Args:
        record: Times of all.
        kept: The model that is kept.
        dense: Quality of the dense model.
        held: Whether the kept model's quality holds.
        within: Points that may be lost, None without a limit.
        plain: Name of our dense float32 model, "" where it was not built.
    """
    assert kept.seconds is not None and kept.score is not None
    best = record.fastest(record.baseline)
    ratio = record.median(best) / kept.seconds
    lost = dense.value - kept.score.value
    said = f"{kept.name} takes {milliseconds(kept.seconds)} ms a call, {ratio:.2f} times as fast as {best}, the "
    said += f"fastest dense runtime here ({milliseconds(record.median(best))} ms). Its quality is "
    said += f"{score_text(kept.score)}, {abs(lost):.2f} points {'below' if lost >= 0 else 'above'} the dense model's."
    if not held:
        said += f" No model stays within {within:g} points; this one comes nearest."
    elif within is not None:
        said += f" {within:g} points were allowed."
    if not kept.sparse:
        of = "faster at a quality that holds" if within is not None else "so much faster that its loss is worth it"
        said += f" Nothing sparse was {of}: the model that is kept runs dense."
    if ratio < 1:
        said += f" {best} is faster on this machine: nothing was won in time."
    said += _crowd(record)
    figures = [
        ("times as fast", f"{ratio:.2f}x", f"as {best}, the fastest dense runtime"),
        ("a call", f"{milliseconds(kept.seconds)} ms", f"{best}: {milliseconds(record.median(best))} ms"),
        ("quality", score_text(kept.score), f"dense: {score_text(dense)}"),
        ("file", size(kept.nbytes), kept.name),
    ]
    if plain and plain != kept.name and plain in record.timings:
        own = record.median(plain) / kept.seconds
        figures.insert(1, ("of that by sparsity and type", f"{own:.2f}x", f"against {plain} of twofour"))
    return said, figures
