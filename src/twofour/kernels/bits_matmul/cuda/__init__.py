"""Products of codes on NVIDIA GPUs, by planes of their bits."""

from twofour.kernels.bits_matmul.cuda.planes import BIT_PLANES, BitPlanes, tile_of

__all__ = ["BIT_PLANES", "BitPlanes", "tile_of"]
