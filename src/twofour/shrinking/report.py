"""What `shrink` did to a model: widths before and after, what each group lost, and what stayed whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from twofour.structure.shrink import NO_CONFIGURATION, Cut, Uncut

_REPORT = "_twofour_shrunk"


@dataclass(frozen=True)
class Width:
    """One group of channels.

    Attributes:
        name: Of the group: tensor and axis.
        before: Channels that it had.
        after: Channels that it has.
        loss: Share of the energy of its readers' outputs that went, before anything was made up for across layers.
        source: How it was ranked: "second-order" or "magnitude".
    """

    name: str
    before: int
    after: int
    loss: float
    source: str

    def __str__(self) -> str:
        return f"{self.name}: {self.before} -> {self.after}, {share(self.loss)} lost ({self.source})"


@dataclass(frozen=True)
class Report:
    """What `shrink` did.

    Attributes:
        widths: Every group that could be cut, in the model's order.
        uncut: Channels that stay whole, with the reason.
        parameters: Parameters before and after.
        macs: Multiply-add operations of the weights in one forward pass of the example, before and after.
        bytes: Bytes of the parameters, before and after.
        reconstructed: Weights that were solved anew for the channels that stay.
        skipped: Weights that were not, with the reason.
        cut: What was cut.
        config: Why a model's configuration does not say its sizes, so that `twofour.load` has to load it; "" where
            `from_pretrained` does.
        milliseconds: Of one forward pass of the example, measured before and after, where time is the budget.
        timing: How they were measured: "compiled in float32, 1 thread", or as torch runs it and why.
        unused: Parameters that the example's forward did not use; they stay whole.
        layers: Whole layers that went, by their names in the large model.
        notes: Sentences about what the small model still needs.
    """

    widths: tuple[Width, ...]
    uncut: tuple[Uncut, ...]
    parameters: tuple[int, int]
    macs: tuple[int, int]
    bytes: tuple[int, int]
    reconstructed: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    cut: Cut
    config: str = ""
    milliseconds: tuple[float, float] | None = None
    timing: str = ""
    unused: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON holds it; the cut is in the model's file."""
        return {
            "parameters": list(self.parameters),
            "macs": list(self.macs),
            "bytes": list(self.bytes),
            "widths": [asdict(width) for width in self.widths],
            "uncut": [asdict(uncut) for uncut in self.uncut],
            "reconstructed": list(self.reconstructed),
            "skipped": dict(self.skipped),
            "config": self.config,
            "milliseconds": self.milliseconds and list(self.milliseconds),
            "timing": self.timing,
            "unused": list(self.unused),
            "layers": list(self.layers),
            "notes": list(self.notes),
            "numbers": [asdict(number) for number in self.cut.attributes],
        }

    @property
    def unloadable(self) -> str:
        """Why `from_pretrained` cannot load what `save_pretrained` writes, "" where it can or there is neither."""
        return "" if self.config == NO_CONFIGURATION else self.config

    def __str__(self) -> str:
        pairs = (("parameters", self.parameters), ("MACs", self.macs), ("bytes", self.bytes))
        lines = [", ".join(f"{what} {a:,} -> {b:,} ({b / max(a, 1):.1%})" for what, (a, b) in pairs)]
        if self.milliseconds is not None:
            before, after = self.milliseconds
            lines[0] += f", {before:.3f} ms -> {after:.3f} ms ({after / before:.1%}), {self.timing}"
        lines += [f"  {name} went" for name in self.layers]
        lines += [f"  {width}" for width in self.widths]
        lines += [f"  {number}" for number in self.cut.attributes if number.before != number.after]
        lines += [f"  {uncut}" for uncut in merged(self.uncut)]
        lines += [f"  {name} was not solved anew: {reason}" for name, reason in self.skipped]
        lines += [f"  {note}" for note in self.notes]
        lines += [f"  {unloadable(self.unloadable)}"] if self.unloadable else []
        return "\n".join(lines)


def unloadable(reason: str) -> str:
    """Return the sentence about a folder that `from_pretrained` cannot load."""
    return (
        f"from_pretrained cannot load what save_pretrained writes: {reason}; twofour.save and twofour.load can, and "
        "uniform=True cuts what a configuration can say"
    )


def merged(uncut: Sequence[Uncut]) -> list[Uncut]:
    """Return channels that stay whole, those of one size and reason together."""
    found: dict[tuple[int, str], list[str]] = {}
    for one in uncut:
        found.setdefault((one.size, one.reason), []).extend(one.names)
    return [Uncut(tuple(dict.fromkeys(names)), size, reason) for (size, reason), names in found.items()]


def share(loss: float) -> str:
    """Return a lost share for people: what is more than all of it several times over says no more."""
    return f"{loss:.1%}" if loss <= 10 else "more than 1,000%"


def report_of(model: nn.Module) -> Report | None:
    """Return what `shrink` did to a model, None of one that it did not make."""
    return model.__dict__.get(_REPORT)


def attach(model: nn.Module, report: Report) -> None:
    """Keep a report with its model."""
    model.__dict__[_REPORT] = report
