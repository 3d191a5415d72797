"""y = activation(conv(x, W) + bias + other) with W 2:4 along its input channels; README.md has the design."""

from twofour.kernels.nm_conv.cpu import NativeConv, hybrid_conv_rows, native_conv_rows, pointwise_rows
from twofour.kernels.nm_conv.layout import LAYOUT, from_conv_layout, to_conv_layout, to_rows, to_turned_rows
from twofour.kernels.nm_conv.reference import CONV_REFERENCE, nm_conv_reference

__all__ = [
    "CONV_REFERENCE",
    "LAYOUT",
    "NativeConv",
    "from_conv_layout",
    "hybrid_conv_rows",
    "native_conv_rows",
    "nm_conv_reference",
    "pointwise_rows",
    "to_conv_layout",
    "to_rows",
    "to_turned_rows",
]
