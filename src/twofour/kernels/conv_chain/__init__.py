"""Convolutions in a row as one native call."""

from twofour.kernels.conv_chain.chain import ConvChain, Link

__all__ = ["ConvChain", "Link"]
