"""report: one self-contained page about a run: quality beside its control, times, sizes, layers, curves, machine."""

from twofour.report.page import to_html, write
from twofour.report.read import read
from twofour.report.run import Curve, Layer, Quality, Run, Score, Weight

__all__ = ["Curve", "Layer", "Quality", "Run", "Score", "Weight", "read", "to_html", "write"]
