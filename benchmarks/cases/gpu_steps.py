"""What surrounds products on the GPU: pruning and packing a weight, and blocks of models end to end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import twofour
from cases.gpu_products import GpuCase
from models.blocks import bert_large, llama_decoding, llama_prefill
from twofour.measure import Record, compare_on_gpu
from twofour.native import gpu

SIZE = 4096
"""Rows and columns of the weight that is compressed: DESIGN's goal is 25 us."""

BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "bert-large-8x128": (bert_large, (8, 128, 1024)),
    "bert-large-32x512": (bert_large, (32, 512, 1024)),
    "llama-prefill-1x512": (llama_prefill, (1, 512, 4096)),
    "llama-prefill-1x4096": (llama_prefill, (1, 4096, 4096)),
    **{f"llama-decode-{batch}": (partial(llama_decoding, batch), (batch, 1, 4096)) for batch in (1, 8, 16, 32)},
}
"""Name -> model, shape of its input."""

DTYPES = ("bfloat16", "float8", "int8", "int4")


def compress() -> list[GpuCase]:
    """Return mask, values and positions of one weight, against a copy of it and against torch's own ways."""
    return [GpuCase(f"compress-{str(d).removeprefix('torch.')}-{SIZE}x{SIZE}", partial(_compress, d)) for d in _TYPES]


_TYPES = (torch.bfloat16, torch.float32)


def _compress(dtype: torch.dtype) -> Record:
    from twofour.kernels.nm_compress.on_gpu import compress as packed
    from twofour.patterns.nm_mask_triton import mask
    from twofour.patterns.nm_tiles_triton import tiles

    copies = 1 + 4 * gpu.l2_bytes() // (SIZE * SIZE * dtype.itemsize)
    weights = [torch.randn(SIZE, SIZE, device=gpu.device()).to(dtype) for _ in range(copies)]
    ways: dict[str, Callable[[Tensor], object]] = {
        "copy": torch.clone,
        "mask": lambda w: mask(w, absolute=True),
        "mask along both axes": lambda w: tiles(w, absolute=True),
        "canonical": packed,
        "canonical and mask": lambda w: packed(w, mask=True),
    }
    if dtype is torch.bfloat16:
        ways["cutlass and mask"] = lambda w: packed(w, cutlass=True, mask=True)
        ways["torch: prune_dense_static_sort"] = _torchs
    left_out = [reason for name in list(ways) if (reason := _fails(name, ways, weights[0]))]
    calls = {name: [partial(way, weight) for weight in weights] for name, way in ways.items()}
    moved = {"bytes_read": SIZE * SIZE * dtype.itemsize, "copies": copies, "left_out": left_out}
    return compare_on_gpu(calls, baseline="copy", repeats=10, seconds=2.0, noise=True, energy=True, meta=moved)


def _fails(name: str, ways: dict[str, Callable[[Tensor], object]], weight: Tensor) -> str:
    """Drop a way that raises and return why; "" where it runs."""
    try:
        ways[name](weight)
    except (RuntimeError, NotImplementedError) as error:
        del ways[name]
        return f"{name}: {str(error).splitlines()[0]}"
    return ""


def _torchs(weight: Tensor) -> object:
    return torch.sparse.SparseSemiStructuredTensorCUTLASS.prune_dense_static_sort(weight)


def blocks() -> list[GpuCase]:
    """Return the stacks of blocks, dense and 2:4, in every computing type; a CUDA graph of the whole call is timed."""
    return [GpuCase(f"blocks-{dtype}-{name}", partial(_block, name, dtype)) for dtype in DTYPES for name in BLOCKS]


def _block(name: str, dtype: str) -> Record:
    build, shape = BLOCKS[name]
    model = build().eval().requires_grad_(False).to(gpu.device(), torch.bfloat16)
    x = torch.randn(shape, device=gpu.device(), dtype=torch.bfloat16)
    tokens = shape[0] * shape[1]
    ways: dict[str, nn.Module] = {"dense torch bfloat16": model}
    if dtype != "bfloat16":
        ways[f"dense {dtype}"] = twofour.compile(model, x, dtype=dtype, tokens=(tokens,))
    pruned = twofour.prune(build().eval(), "2:4").to(gpu.device(), torch.bfloat16)
    fast = twofour.compile(pruned, x, dtype=dtype, tokens=(tokens,))
    ways[f"2:4 {dtype}"] = fast
    plan = {"plan": str(fast.plan), "bytes": [fast.plan.bytes_before, fast.plan.bytes_after], "error": fast.plan.error}
    calls = {label: partial(module, x) for label, module in ways.items()}
    dense = [label for label in calls if label.startswith("dense")]
    shown = {"model": name, "dtype": dtype, "tokens": tokens, **plan}
    return compare_on_gpu(calls, baseline=dense, repeats=10, seconds=2.0, noise=True, energy=True, meta=shown)
