"""permutation: an order of the channels in which a mask keeps more; outputs stay what they were."""

from twofour.permutation.mover import permute, require_whole
from twofour.permutation.report import Gain, Report
from twofour.permutation.stripes import Permutation, search

__all__ = ["Gain", "Permutation", "Report", "permute", "require_whole", "search"]
