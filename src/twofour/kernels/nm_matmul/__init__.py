"""y = x @ W.T + bias with W packed N:M: reference and native kernels."""

from twofour.kernels.nm_matmul.cpu import NativeMatmul, native_rows
from twofour.kernels.nm_matmul.layout import from_layout, refill, to_layout
from twofour.kernels.nm_matmul.quantization import DYNAMIC, Quantization, quantize_input
from twofour.kernels.nm_matmul.reference import REFERENCE, nm_matmul_int8_reference, nm_matmul_reference

__all__ = [
    "DYNAMIC",
    "REFERENCE",
    "NativeMatmul",
    "Quantization",
    "from_layout",
    "native_rows",
    "nm_matmul_int8_reference",
    "nm_matmul_reference",
    "quantize_input",
    "refill",
    "to_layout",
]
