"""y = conv(x, W) + bias with W dense, channels last: the kernels that a sparse one has to beat."""

from twofour.kernels.dense_conv.direct_rows import direct_rows
from twofour.kernels.dense_conv.onednn import ONEDNN_CONV
from twofour.kernels.dense_conv.plain import PLAIN_CONV
from twofour.kernels.dense_conv.winograd_rows import winograd_rows

__all__ = ["ONEDNN_CONV", "PLAIN_CONV", "direct_rows", "winograd_rows"]
