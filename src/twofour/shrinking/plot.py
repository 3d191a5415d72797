"""plot: the width of every group before and after, as bars."""

from __future__ import annotations

import os
from pathlib import Path

from twofour.drawing import drawn
from twofour.errors import ShrinkError
from twofour.shrinking.report import Report


def plot(report: Report, path: str | os.PathLike[str]) -> Path:
    """Draw how wide every group that could be cut was and is; needs matplotlib.

    Args:
        report: From `report_of`.
        path: File to write, .svg, .png or .pdf.

    Returns:
        The path.

    Raises:
        ShrinkError: matplotlib is not installed, or the file cannot be written.
    """
    target, widths = Path(path), report.widths
    with drawn(target, (8, 1.2 + 0.2 * len(widths)), ShrinkError, "Report.to_dict()") as figure:
        axes = figure.subplots()
        places = range(len(widths))
        axes.barh(places, [width.before for width in widths], color="#c8d0d8", label="before")
        axes.barh(places, [width.after for width in widths], color="#2b6c9e", height=0.5, label="after")
        axes.set_yticks(places, [width.name for width in widths], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("channels")
        axes.legend(frameon=False)
        for edge in ("top", "right"):
            axes.spines[edge].set_visible(False)
    return target
