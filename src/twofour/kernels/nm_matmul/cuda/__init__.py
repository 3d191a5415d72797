"""2:4 products on NVIDIA GPUs: cuSPARSELt, torch's CUTLASS kernels, and our own for few tokens."""

from twofour.kernels.nm_matmul.cuda.cusparselt import CUSPARSELT, CusparseltMatmul
from twofour.kernels.nm_matmul.cuda.cutlass import CUTLASS, CutlassMatmul
from twofour.kernels.nm_matmul.cuda.eight_bits import TYPES, rescaled, rounded, rounded_reference
from twofour.kernels.nm_matmul.cuda.few_tokens import FEW_TOKENS, FewTokens
from twofour.kernels.nm_matmul.cuda.library import LibraryMatmul
from twofour.kernels.nm_matmul.cuda.sealed_buffers import ALIGNED, Part, joined, opened, size
from twofour.kernels.nm_matmul.cuda.tuning import Tuning, tuned

__all__ = [
    "ALIGNED",
    "CUSPARSELT",
    "CUTLASS",
    "FEW_TOKENS",
    "TYPES",
    "CusparseltMatmul",
    "CutlassMatmul",
    "FewTokens",
    "LibraryMatmul",
    "Part",
    "Tuning",
    "joined",
    "opened",
    "rescaled",
    "rounded",
    "rounded_reference",
    "size",
    "tuned",
]
