"""permutation: an order of the channels in which a mask keeps more; outputs stay what they were."""

from twofour.structure.permutation.channels import permute, require_unsharded
from twofour.structure.permutation.report import Gain, Report
from twofour.structure.permutation.stripes import Permutation, search

__all__ = ["Gain", "Permutation", "Report", "permute", "require_unsharded", "search"]
