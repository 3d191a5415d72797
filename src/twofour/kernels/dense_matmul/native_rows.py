"""The rows of dense_matmul.inc, each as the kernel of its kind of weights."""

from __future__ import annotations

from twofour import native
from twofour.kernels.dense_matmul.float32_rows import Float32Matmul
from twofour.kernels.dense_matmul.int4_rows import Int4Matmul
from twofour.kernels.dense_matmul.int8_rows import Int8Panels
from twofour.kernels.dense_matmul.native_dense import NativeDenseMatmul, RealPanels

KINDS: dict[str, type[NativeDenseMatmul]] = {
    "float32": Float32Matmul,
    "bfloat16": RealPanels,
    "int8": Int8Panels,
    "int4": Int4Matmul,
}
"""Encoding of a row's weights -> its kernel."""


def native_dense_rows() -> list[NativeDenseMatmul]:
    """Return the rows of dense_matmul.inc in their order there."""
    return [
        KINDS[row.dtype](row.name, row.operation, row.pattern, row.dtype, "cpu", row.isa, row.layout, row.index)
        for row in native.rows("dense_matmul")
    ]
