"""The product of two dense matrices at the kept places of a 2:4 weight."""

from __future__ import annotations

from twofour.kernels.nm_sddmm.cpu import nm_sddmm, row_for
from twofour.kernels.nm_sddmm.reference import nm_sddmm_reference

__all__ = ["nm_sddmm", "nm_sddmm_reference", "row_for"]
