"""LayerNorm and RMSNorm over the last axis in one pass through the cache."""

from twofour.kernels.norm.cpu import DTYPES, RowNorm, norm, norm_in_place, norm_to_bytes
from twofour.kernels.norm.reference import reference

__all__ = ["DTYPES", "RowNorm", "norm", "norm_in_place", "norm_to_bytes", "reference"]
