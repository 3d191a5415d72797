"""Squeeze-and-excite: the channels of an image scaled by what two small products make of their means."""

from twofour.kernels.squeeze_excite.cpu import SqueezeExcite
from twofour.kernels.squeeze_excite.reference import GATES, reference

__all__ = ["GATES", "SqueezeExcite", "reference"]
