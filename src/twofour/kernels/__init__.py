"""How it is computed: one folder per operation, one table of kernels."""

from twofour.kernels.base import Kernel
from twofour.kernels.select import matmul, select
from twofour.kernels.table import add, available, convolutions, find, find_convolution, rows

__all__ = ["Kernel", "add", "available", "convolutions", "find", "find_convolution", "matmul", "rows", "select"]
