"""Graphs as a figure: side by side, a box for each call in the colour of its mapping type, bytes on the edges."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from twofour.drawing import drawn
from twofour.errors import CompileError
from twofour.graph.mapping import MappingType
from twofour.graph.outline import VIEW, Call, Outline

COLOURS = {
    MappingType.ONE_TO_ONE: "#c7e3b5",
    MappingType.ONE_TO_MANY: "#f5e0a3",
    MappingType.MANY_TO_MANY: "#f2b8a0",
    MappingType.REORGANIZE: "#dcdcdc",
    MappingType.SHUFFLE: "#c9d3ee",
    None: "#ffffff",
}
"""Fill of a call; white: an operator without a row."""

WIDTH, HEIGHT = 1.5, 0.24
"""Inches of a box."""

COLUMN, LINE = 1.7, 0.46
"""Inches from box to box, to the side and down."""

SWEEPS = 4
"""Times that the calls of each line are put in the order of what they read, then of what reads them."""


def draw(outlines: Mapping[str, Outline], path: str | os.PathLike[str]) -> None:
    """Draw graphs side by side.

    Args:
        outlines: By what stands above each.
        path: File to write, .svg, .png or .pdf.

    Raises:
        CompileError: matplotlib is not installed, or the file cannot be written.
    """
    placed = {name: places(outline.calls) for name, outline in outlines.items()}
    lines = 2 + max((1 + line for found in placed.values() for _, line in found), default=1)
    widths = [max((1 + column for column, _ in found), default=1) for found in placed.values()]
    size = (COLUMN * (sum(widths) + len(widths)), LINE * (lines + 1))
    with drawn(path, size, CompileError, "print(plan)") as figure:
        figure.set_layout_engine("none")
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, size[0]), ylim=(size[1], 0))
        axes.axis("off")
        _legend(axes)
        left = COLUMN / 2
        for (name, outline), width in zip(outlines.items(), widths, strict=True):
            found = [(left + COLUMN * column, LINE * (line + 2)) for column, line in placed[name]]
            shown = f"{name}: {outline.computing} calls, {readable(outline.nbytes)} written"
            axes.text(left, LINE, shown, fontsize=11, weight="bold", va="center")
            _draw(axes, outline.calls, found)
            left += COLUMN * (width + 1)


def places(calls: Sequence[Call]) -> list[tuple[float, int]]:
    """Return column and line of each call: below all that it reads, near to it, no two in one place."""
    lines: list[int] = []
    for call in calls:
        lines.append(1 + max((lines[read] for read in call.reads), default=-1))
    rows: list[list[int]] = [[] for _ in range(1 + max(lines, default=-1))]
    for index, line in enumerate(lines):
        rows[line].append(index)
    readers: list[list[int]] = [[] for _ in calls]
    for index, call in enumerate(calls):
        for read in call.reads:
            readers[read].append(index)
    column = {index: float(place) for row in rows for place, index in enumerate(row)}
    for sweep in range(SWEEPS):
        near = readers if sweep % 2 else [call.reads for call in calls]
        for row in rows[:: -1 if sweep % 2 else 1]:
            wanted = {i: sum(column[n] for n in near[i]) / len(near[i]) if near[i] else column[i] for i in row}
            for place, index in enumerate(sorted(row, key=lambda i: (wanted[i], i))):
                column[index] = float(place)
    return [(column[index], lines[index]) for index in range(len(calls))]


def readable(nbytes: int) -> str:
    """Return bytes as people read them."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} B"


def _draw(axes: Any, calls: Sequence[Call], found: Sequence[tuple[float, float]]) -> None:
    from matplotlib.patches import FancyBboxPatch

    for call, (x, y) in zip(calls, found, strict=True):
        for read in call.reads:
            start = (found[read][0] + WIDTH / 2, found[read][1] + HEIGHT / 2)
            end = (x + WIDTH / 2, y - HEIGHT / 2)
            axes.plot(*zip(start, end, strict=True), color="#999999", linewidth=0.6, zorder=1)
            if calls[read].nbytes:
                middle = [(3 * b + a) / 4 for a, b in zip(start, end, strict=True)]
                axes.text(*middle, readable(calls[read].nbytes), fontsize=5, color="#666666", ha="center", zorder=2)
        style = "round,pad=0,rounding_size=0.08" if call.kind == "fused" else "square,pad=0"
        colour = COLOURS[call.mapping]
        box = FancyBboxPatch(
            (x, y - HEIGHT / 2), WIDTH, HEIGHT, style, facecolor=colour, edgecolor="#555555", linewidth=0.6, zorder=3
        )
        axes.add_patch(box)
        faint = "#888888" if call.kind == VIEW else "#000000"
        text = call.label if len(call.label) <= 28 else f"{call.label[:27]}…"
        axes.text(x + WIDTH / 2, y, text, fontsize=6, color=faint, ha="center", va="center", zorder=4)


def _legend(axes: Any) -> None:
    for index, (mapping, colour) in enumerate(COLOURS.items()):
        name = "no row" if mapping is None else mapping.value
        axes.text(
            COLUMN / 2 + 1.2 * index, LINE / 3, name, fontsize=7, va="center", bbox={"facecolor": colour, "pad": 2}
        )
