"""Finding and Report: what a check found per weight, as values, as a table, as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import isfinite

from twofour.legality.rules import Fit


@dataclass(frozen=True)
class Finding:
    """What was found in one prunable weight.

    Attributes:
        name: Name of the weight in the model, for example "encoder.fc1.weight".
        kind: Kind of weight, a name of `layers.KINDS`, "hf_conv1d" or, of an ONNX file, "matmul".
        shape: Shape as stored.
        dtype: Type as stored, "bfloat16".
        axis: Name and size of the reduction axis, for example "in = 768".
        reduction: That axis in the shape as stored.
        promised: Pattern that a mask or the caller promises, or None.
        promised_by: Who promised it: "mask", "expect", "metadata", "packed form", "compressed-tensors", "apex mask",
            or the name of a compressed form, "marlin-24".
        judged: Pattern that the fractions below belong to: the promised one, or "2:4".
        satisfies: Patterns that the weight obeys along the right axis, tightest first.
        legal: Every group obeys the judged pattern.
        legal_fraction: Fraction of groups along the right axis that obey the judged pattern (0 where none fit).
        wrong_axis: The axis, not the reduction axis, along which most groups are legal; None where there is none.
        wrong_fraction: Fraction of legal groups along that axis.
        first: Coordinates in the stored weight of the first value of the first offending group.
        values: Values of that group.
        zeros: Fraction of values that are zero; -0.0 is zero.
        negative_zeros: How many of them are -0.0, which some packers take for a value.
        spare: Groups with fewer values than the judged pattern allows: which zero a mask keeps, the tie rule says.
        ties: Groups where equal magnitudes stand on both sides of the cut: other tools may keep another value there.
            Both None where the judged pattern is neither N:M nor pair-wise (of pairs, ties are not counted).
        outside: Non-zero values where the attached mask says zero; None without a mask.
        broken: Non-finite values.
        fits: One verdict per runtime and type.
        verdict: One sentence.
        notes: What else the reader should know, of the axis or of how the weight was found.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    axis: str
    reduction: int
    promised: str | None
    promised_by: str | None
    judged: str
    satisfies: tuple[str, ...]
    legal: bool
    legal_fraction: float
    wrong_axis: str | None
    wrong_fraction: float | None
    first: tuple[int, ...] | None
    values: tuple[float, ...]
    zeros: float
    negative_zeros: int
    spare: int | None
    ties: int | None
    outside: int | None
    broken: int
    fits: tuple[Fit, ...]
    verdict: str
    notes: tuple[str, ...] = ()

    @property
    def kept(self) -> bool:
        """Whether a promise was made and holds: every group legal, all values finite, none outside the mask."""
        return self.promised is not None and self.legal and not self.broken and not self.outside

    @property
    def sparse(self) -> bool:
        """Whether the weight obeys some pattern, promised or not; one of zeros alone or with NaN does not."""
        return bool(self.satisfies) and self.zeros < 1.0 and not self.broken


@dataclass(frozen=True)
class Report:
    """What was found in a model or a file.

    Attributes:
        layers: One finding per prunable weight.
        skipped: (name, reason) of weights that were not looked at.
    """

    layers: tuple[Finding, ...]
    skipped: tuple[tuple[str, str], ...] = ()

    @property
    def ok(self) -> bool:
        """Every promise holds, and something is promised or found sparse: a plain dense model is not ok."""
        promised = [finding for finding in self.layers if finding.promised]
        if promised:
            return all(finding.kept for finding in promised)
        return any(finding.sparse for finding in self.layers)

    @property
    def summary(self) -> str:
        """One sentence: how many promises hold, how many weights are sparse."""
        promised = [finding for finding in self.layers if finding.promised]
        kept = sum(finding.kept for finding in promised)
        sparse = sum(finding.sparse for finding in self.layers)
        total = len(self.layers)
        if promised:
            text = f"{kept} of {len(promised)} promised weights kept"
        elif sparse:
            text = "nothing was promised"
        else:
            text = "nothing is sparse"
        return f"{text}; {sparse} of {total} weights are sparse, {len(self.skipped)} skipped"

    def to_dict(self) -> dict[str, object]:
        """Return the report as JSON-ready values: NaN and infinities, which JSON lacks, as text."""
        return {
            "ok": self.ok,
            "summary": self.summary,
            "layers": [
                asdict(finding) | {"values": [value if isfinite(value) else str(value) for value in finding.values]}
                for finding in self.layers
            ],
            "skipped": [{"name": name, "reason": reason} for name, reason in self.skipped],
        }

    def __str__(self) -> str:
        head = ("weight", "kind", "shape", "promised", "legal", "zeros", "-0.0", "ties", "ready for", "verdict")
        lines = [_grid(head, [_row(finding) for finding in self.layers])] if self.layers else []
        if told := [(finding.name, note) for finding in self.layers for note in finding.notes]:
            lines += ["", _grid(("weight", "note"), told)]
        if self.skipped:
            lines += ["", _grid(("skipped", "reason"), self.skipped)]
        return "\n".join([*lines, "", f"{'OK' if self.ok else 'NOT OK'}: {self.summary}"]).lstrip("\n")


def _row(finding: Finding) -> tuple[str, ...]:
    ready = dict.fromkeys(fit.runtime for fit in finding.fits if fit.ready)
    return (
        finding.name,
        finding.kind,
        "x".join(map(str, finding.shape)),
        finding.promised or "-",
        f"{finding.legal_fraction:.1%}",
        f"{finding.zeros:.1%}",
        str(finding.negative_zeros) if finding.negative_zeros else "-",
        str(finding.ties) if finding.ties else "-",
        ", ".join(ready) or "-",
        finding.verdict,
    )


def _grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    table = [tuple(head), *map(tuple, rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    lines.insert(1, "  ".join("-" * width for width in widths[:-1]) + "  " + "-" * len(head[-1]))
    return "\n".join(lines)
