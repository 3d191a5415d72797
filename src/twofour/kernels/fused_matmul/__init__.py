"""A product with the norms beside it, or two in a row by strips of tokens, as one native call."""

from twofour.kernels.fused_matmul.cpu import Factor, FusedMatmul

__all__ = ["Factor", "FusedMatmul"]
