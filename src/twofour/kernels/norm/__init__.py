"""LayerNorm and RMSNorm over the last axis in one pass through the cache."""

from twofour.kernels.norm.cpu import RowNorm, norm, norm_in_place
from twofour.kernels.norm.reference import reference

__all__ = ["RowNorm", "norm", "norm_in_place", "reference"]
