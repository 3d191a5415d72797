"""y = activation(conv(x, W) + bias + other) in int8, W 2:4 or dense: products whose tokens are windows; README.md."""

from twofour.kernels.window_conv.reference import window_conv_reference
from twofour.kernels.window_conv.rows import WindowConv, window_conv_rows

__all__ = ["WindowConv", "window_conv_reference", "window_conv_rows"]
