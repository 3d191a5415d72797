"""Sums over the rows of a matrix, and means over the pixels of images, read in the order of memory."""

from twofour.kernels.column_sums.cpu import DTYPES, column_sums, pixel_means

__all__ = ["DTYPES", "column_sums", "pixel_means"]
