"""LayerNorm and RMSNorm over the last axis in one pass through the cache."""

from twofour.kernels.norm.cpu import norm
from twofour.kernels.norm.reference import reference

__all__ = ["norm", "reference"]
