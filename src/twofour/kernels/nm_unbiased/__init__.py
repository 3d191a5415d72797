"""An unbiased 2:4 estimate of a gradient, made and packed in one pass."""

from __future__ import annotations

from twofour.kernels.nm_unbiased.cpu import LAYOUTS, nm_unbiased, packed_bytes, with_header
from twofour.kernels.nm_unbiased.reference import nm_unbiased_reference, uniform

__all__ = ["LAYOUTS", "nm_unbiased", "nm_unbiased_reference", "packed_bytes", "uniform", "with_header"]
