"""Run: what a report shows, whoever made it; every part may be missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from twofour.measure import Record


@dataclass(frozen=True)
class Score:
    """Quality of one model.

    Attributes:
        name: Of the model.
        value: The figure, in the unit of its `Quality`.
        error: Its standard error, None where it is not known.
        note: What else there is to say of it, such as why it was not kept.
        ours: Whether it is drawn as one of ours, not as a control.
    """

    name: str
    value: float
    error: float | None = None
    note: str = ""
    ours: bool = False


@dataclass(frozen=True)
class Quality:
    """Models judged by one measure.

    Attributes:
        title: What was measured.
        scores: One per model, the control among them.
        unit: What stands behind a figure, such as "%".
        said: What it rests on: how many samples, and what the intervals are.
        floor: The figure below which a model was not kept, None without one.
    """

    title: str
    scores: tuple[Score, ...]
    unit: str = ""
    said: str = ""
    floor: float | None = None


@dataclass(frozen=True)
class Layer:
    """One layer of the plan.

    Attributes:
        name: Its name in the model.
        kind: Its class.
        shape: Of the dense weight.
        kernel: What runs it.
        sparse: Whether that kernel is sparse.
        reason: Why.
        dense_ms: Milliseconds of the best dense kernel, None where none was measured.
        sparse_ms: Of the best sparse one.
        loss: Relative error of its output after pruning, None where it was not measured.
        parts: Layers whose weights it holds together, of a product of the graph.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    kernel: str
    sparse: bool
    reason: str
    dense_ms: float | None = None
    sparse_ms: float | None = None
    loss: float | None = None
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Weight:
    """One weight's mask, as `twofour.check` found it.

    Attributes:
        name: Of the weight.
        pattern: What its mask promises, "" of a dense one.
        zeros: Share of its values that are zero.
        kept: Whether every group obeys the pattern.
        verdict: One sentence.
    """

    name: str
    pattern: str
    zeros: float
    kept: bool
    verdict: str


@dataclass(frozen=True)
class Curve:
    """A figure that changes from epoch to epoch.

    Attributes:
        title: What it is.
        lines: Name of a model -> its values, one per epoch.
    """

    title: str
    lines: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Run:
    """What a report shows.

    Attributes:
        title: The page's heading.
        verdict: One or two sentences: what was won, and what was not.
        figures: Figures that stand out: label, figure, what it is compared with.
        quality: Models judged, beside their control.
        records: Times; what is in a record's `baseline` are the others, the rest is ours.
        sizes: Name of what is stored -> its bytes.
        candidates: Models that were tried: name, and what became of each.
        layers: The plan.
        plan: The plan as text, where its layers are not known one by one.
        weights: Masks.
        curves: Training.
        loading: Python that loads the result.
        notes: Sentences that belong below the figures.
        machine: As `measure.machine` describes it.
        created: When, ISO 8601.
    """

    title: str
    verdict: str = ""
    figures: tuple[tuple[str, str, str], ...] = ()
    quality: tuple[Quality, ...] = ()
    records: tuple[Record, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    candidates: tuple[tuple[str, str], ...] = ()
    layers: tuple[Layer, ...] = ()
    plan: str = ""
    weights: tuple[Weight, ...] = ()
    curves: tuple[Curve, ...] = ()
    loading: str = ""
    notes: tuple[str, ...] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)
    created: str = ""
