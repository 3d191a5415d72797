"""Sums over the rows of a matrix, read in the order of memory."""

from twofour.kernels.column_sums.cpu import DTYPES, column_sums

__all__ = ["DTYPES", "column_sums"]
