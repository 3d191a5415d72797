"""y = x @ W.T + bias with W of two regions, 2:4 and dense: rows of 2:4 on inputs that are widened."""

from twofour.kernels.nm_matmul.hybrid.cpu import HybridMatmul, hybrid_rows
from twofour.kernels.nm_matmul.hybrid.layout import from_layout, to_layout

__all__ = ["HybridMatmul", "from_layout", "hybrid_rows", "to_layout"]
