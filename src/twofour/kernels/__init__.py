"""How it is computed: one folder per operation, one table of kernels."""

from twofour.kernels.base import Kernel, Prepared
from twofour.kernels.select import matmul, select
from twofour.kernels.table import add, available, convolutions, find, rows, sparse_products

__all__ = [
    "Kernel",
    "Prepared",
    "add",
    "available",
    "convolutions",
    "find",
    "matmul",
    "rows",
    "select",
    "sparse_products",
]
