"""y = x @ W.T + bias with W dense: the kernels that a sparse one has to beat."""

from twofour.kernels.dense_matmul.bf16 import ONEDNN_BF16, PLAIN_BF16, Bf16Matmul
from twofour.kernels.dense_matmul.float32_rows import Float32Matmul
from twofour.kernels.dense_matmul.int4_rows import Int4Matmul, group_of
from twofour.kernels.dense_matmul.int8 import ONEDNN_INT8, OneDnnInt8Matmul, stored_rows, whole_rows
from twofour.kernels.dense_matmul.int8_rows import Int8Panels
from twofour.kernels.dense_matmul.mkl import MKL, MklMatmul
from twofour.kernels.dense_matmul.native_dense import RealPanels
from twofour.kernels.dense_matmul.native_rows import native_dense_rows
from twofour.kernels.dense_matmul.onednn import ATTRIBUTES, ONEDNN, OneDnnMatmul
from twofour.kernels.dense_matmul.plain import PLAIN, PlainMatmul

__all__ = [
    "ATTRIBUTES",
    "MKL",
    "ONEDNN",
    "ONEDNN_BF16",
    "ONEDNN_INT8",
    "PLAIN",
    "PLAIN_BF16",
    "Bf16Matmul",
    "Float32Matmul",
    "Int4Matmul",
    "Int8Panels",
    "MklMatmul",
    "OneDnnInt8Matmul",
    "OneDnnMatmul",
    "PlainMatmul",
    "RealPanels",
    "group_of",
    "native_dense_rows",
    "stored_rows",
    "whole_rows",
]
