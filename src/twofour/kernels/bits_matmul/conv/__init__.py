"""y = conv(x, W) + bias with x and W of 1 to 8 bits: reference, native kernels, and answers in codes."""

from twofour.kernels.bits_matmul.conv.codes import (
    MOST_BITS,
    CodedImages,
    Requantised,
    pool_codes,
    requantise,
)
from twofour.kernels.bits_matmul.conv.reference import bits_conv_reference, whole_convolution
from twofour.kernels.bits_matmul.conv.rows import AfterConv, BitsConv, BitsConvProblem, bits_conv_rows

__all__ = [
    "MOST_BITS",
    "AfterConv",
    "BitsConv",
    "BitsConvProblem",
    "CodedImages",
    "Requantised",
    "bits_conv_reference",
    "bits_conv_rows",
    "pool_codes",
    "requantise",
    "whole_convolution",
]
