"""y = x @ W.T + bias with W dense: the kernels that a sparse one has to beat."""

from twofour.kernels.dense_matmul.onednn import ONEDNN, OneDnnMatmul
from twofour.kernels.dense_matmul.plain import PLAIN, PlainMatmul

__all__ = ["ONEDNN", "PLAIN", "OneDnnMatmul", "PlainMatmul"]
