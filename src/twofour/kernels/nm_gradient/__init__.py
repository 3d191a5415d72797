"""A gradient pruned 2:4 along its channels, in one pass: dense, or packed for a product that sums over them."""

from __future__ import annotations

from twofour.kernels.nm_gradient.cpu import MODES, nm_gradient, nm_gradient_packed, nm_gradient_through, refuses
from twofour.kernels.nm_gradient.reference import nm_gradient_reference
from twofour.kernels.nm_unbiased import packed_bytes

__all__ = [
    "MODES",
    "nm_gradient",
    "nm_gradient_packed",
    "nm_gradient_reference",
    "nm_gradient_through",
    "packed_bytes",
    "refuses",
]
