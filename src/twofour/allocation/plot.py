"""plot: one page with the sensitivities as a heat map and the trade-off curve with what was chosen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from twofour.allocation.allocate import Allocation, Axis, trade_off, uniform
from twofour.allocation.records import Loss, Sensitivities
from twofour.drawing import drawn
from twofour.errors import MeasureError, RecipeError

MARKERS = "osD^vP"
LABELS = {"density": "fraction of values kept", "latency": "measured ms of these layers"}
NAMES = {"task": "change of the task's loss", "error": "squared relative error of the output"}


def plot(
    sensitivities: Sensitivities,
    path: str | os.PathLike[str],
    *,
    chosen: Allocation | None = None,
    axis: Axis | None = None,
    loss: Loss | None = None,
) -> Path:
    """Draw layers by patterns as a heat map, and the least predicted loss at every cost; needs matplotlib.

    Args:
        sensitivities: From `sensitivity` or `timed`.
        path: File to write, .svg, .png or .pdf.
        chosen: An allocation to mark on both.
        axis: What a choice costs; default: what `chosen` was limited by, else "density".
        loss: "task" or "error"; default: that of `chosen`, else "task" where it was measured.

    Returns:
        The path.

    Raises:
        MeasureError: matplotlib is not installed, or the file cannot be written.
        RecipeError: What is to be drawn was not measured.
    """
    kind = sensitivities.require(loss or (chosen.kind if chosen else None))
    if axis is None:
        axis = "latency" if chosen and chosen.budget and chosen.budget.latency is not None else "density"
    curve = trade_off(sensitivities, axis, loss=kind)
    target, size = Path(path), (10, 1.8 + 0.24 * len(sensitivities.layers))
    with drawn(target, size, MeasureError, "Sensitivities.to_dict()") as figure:
        left, right = figure.subplots(1, 2)
        _heat_map(left, sensitivities, chosen, kind)
        _curve(right, sensitivities, curve, chosen, axis, kind)
    return target


def _heat_map(axes: Any, sensitivities: Sensitivities, chosen: Allocation | None, kind: Loss) -> None:
    from matplotlib.patches import Rectangle

    found = [[layer.find(name) for name in sensitivities.patterns] for layer in sensitivities.layers]
    table = [[float("nan") if cell is None else cell.loss(kind) for cell in row] for row in found]
    # Few cells, the sparsest patterns of the first layers, would leave no colour to the others on a linear scale.
    image = axes.imshow([[_signed_root(value) for value in row] for row in table], aspect="auto", cmap="viridis")
    axes.figure.colorbar(image, ax=axes, label="square root, signed", shrink=0.6)
    middle = sum(image.get_clim()) / 2
    for row, values in enumerate(table):
        for column, value in enumerate(values):
            colour = "white" if _signed_root(value) < middle else "black"
            text = "-" if value != value else f"{value:.3g}"
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=7)
    axes.set_xticks(range(len(sensitivities.patterns)), sensitivities.patterns)
    axes.set_yticks(range(len(sensitivities.layers)), [layer.layer or "(model)" for layer in sensitivities.layers])
    axes.set_title(f"{NAMES[kind]}, each layer pruned alone")
    for row, (_, pattern) in enumerate(chosen.chosen if chosen else ()):
        column = sensitivities.patterns.index(pattern)
        axes.add_patch(Rectangle((column - 0.46, row - 0.42), 0.92, 0.84, fill=False, ec="red"))


def _signed_root(value: float) -> float:
    return abs(value) ** 0.5 * (1 if value >= 0 else -1)


def _curve(
    axes: Any,
    sensitivities: Sensitivities,
    curve: tuple[tuple[float, float], ...],
    chosen: Allocation | None,
    axis: Axis,
    kind: Loss,
) -> None:
    axes.step([cost for cost, _ in curve], [loss for _, loss in curve], where="post", color="#2f7d32", label="least")

    def mark(entry: Allocation, text: str, marker: str, colour: str) -> None:
        cost = entry.density if axis == "density" else entry.latency
        axes.plot([cost], [entry.loss], marker, color=colour, label=text)

    for number, pattern in enumerate(sensitivities.patterns):
        try:
            mark(uniform(sensitivities, pattern, loss=kind), f"{pattern} everywhere", MARKERS[number % 6], f"C{number}")
        except RecipeError:
            continue  # it does not fit every layer and "dense" is no candidate
    if chosen is not None and chosen.kind == kind:
        mark(chosen, f"chosen: {chosen.budget or 'as given'}", "*", "red")
    axes.set_xlabel(LABELS[axis])
    axes.set_ylabel(f"predicted, summed over the layers: {NAMES[kind]}")
    axes.legend(fontsize=7)
    axes.set_title("trade-off")
