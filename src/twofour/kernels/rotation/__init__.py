"""Heads turned by their positions (rotary embeddings), one pass over the columns of a product."""

from twofour.kernels.rotation.cpu import DTYPES, rotation
from twofour.kernels.rotation.reference import reference

__all__ = ["DTYPES", "reference", "rotation"]
