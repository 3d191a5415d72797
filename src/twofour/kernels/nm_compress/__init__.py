"""A dense weight to the canonical packed form in one pass: mask and pack."""

from __future__ import annotations

from twofour.kernels.nm_compress.reference import nm_compress_reference

__all__ = ["nm_compress_reference"]
