"""Convolutions with a filter of its own for each channel, channels last, W dense."""

from twofour.kernels.depthwise_conv.cpu import DepthwiseConv, depthwise_rows

__all__ = ["DepthwiseConv", "depthwise_rows"]
