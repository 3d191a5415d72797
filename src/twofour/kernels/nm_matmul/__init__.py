"""y = x @ W.T + bias with W packed N:M: reference and native kernels."""

from twofour.kernels.nm_matmul.cpu import NativeMatmul, native_rows
from twofour.kernels.nm_matmul.layout import from_layout, to_layout
from twofour.kernels.nm_matmul.reference import REFERENCE, nm_matmul_int8_reference, nm_matmul_reference
from twofour.kernels.quantization import DYNAMIC, Quantization, quantize_input

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
    "to_layout",
]
