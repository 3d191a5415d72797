"""How it is computed: one folder per operation, one table of kernels."""

from twofour.kernels.base import Kernel
from twofour.kernels.select import matmul, select
from twofour.kernels.table import available, find, rows

__all__ = ["Kernel", "available", "find", "matmul", "rows", "select"]
