"""permutation: an order of the channels in which a mask keeps more; outputs stay what they were."""

from twofour.permutation.mover import permute
from twofour.permutation.report import Gain, Report
from twofour.permutation.stripes import Permutation, search

__all__ = ["Gain", "Permutation", "Report", "permute", "search"]
