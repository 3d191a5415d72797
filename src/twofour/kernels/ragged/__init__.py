"""Ragged batches: rows of real tokens one behind the other, without the padding between sequences."""

from twofour.kernels.ragged.cpu import Layout, lay_out, pad_tokens, real_tokens, take_tokens
from twofour.kernels.ragged.reference import reference

__all__ = ["Layout", "lay_out", "pad_tokens", "real_tokens", "reference", "take_tokens"]
