"""softmax(scale Q K^T + mask) V in one call, a head at a time in the core's own caches."""

from twofour.kernels.attention.cpu import (
    attention,
    attention_of_columns,
    attention_of_sequences,
    attention_of_windows,
)
from twofour.kernels.attention.gradient import attention_dropped, attention_gradient, side_by_side
from twofour.kernels.attention.reference import bytes_reference, reference, whole_reference

__all__ = [
    "attention",
    "attention_dropped",
    "attention_gradient",
    "attention_of_columns",
    "attention_of_sequences",
    "attention_of_windows",
    "bytes_reference",
    "reference",
    "side_by_side",
    "whole_reference",
]
