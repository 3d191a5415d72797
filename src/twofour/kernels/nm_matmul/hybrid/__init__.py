"""y = x @ W.T + bias with W of two regions, 2:4 and dense: rows of 2:4 on inputs that are widened."""

from twofour.kernels.nm_matmul.hybrid.cpu import HybridMatmul, hybrid_rows, two_regions
from twofour.kernels.nm_matmul.hybrid.layout import PREFIX, from_layout, to_layout

__all__ = ["PREFIX", "HybridMatmul", "from_layout", "hybrid_rows", "to_layout", "two_regions"]
