"""shrinking: a smaller model within a budget, cut once."""

from twofour.shrinking.budget import Budget
from twofour.shrinking.plot import plot
from twofour.shrinking.report import Report, Width, report_of
from twofour.shrinking.shrink import shrink

__all__ = ["Budget", "Report", "Width", "plot", "report_of", "shrink"]
