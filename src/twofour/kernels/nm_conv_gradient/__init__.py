"""dL/dx of a convolution from a packed dL/dz that is 2:4 along its channels; README.md has the design."""

from twofour.kernels.nm_conv_gradient.cpu import ConvGradient, DataGradient, conv_gradient_rows
from twofour.kernels.nm_conv_gradient.reference import nm_conv_gradient_reference

__all__ = ["ConvGradient", "DataGradient", "conv_gradient_rows", "nm_conv_gradient_reference"]
