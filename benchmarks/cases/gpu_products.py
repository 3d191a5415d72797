"""One product at a time on the GPU: every row of the kernel table that gives the right numbers, on random data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from twofour.compiler.choose import Case
from twofour.compiler.choose_gpu import on_gpu, trusted
from twofour.compiler.computing import Computing
from twofour.errors import KernelError
from twofour.kernels import Kernel, Prepared
from twofour.kernels.cuda import CudaKernel
from twofour.kernels.problem import Problem
from twofour.measure import Record, compare_on_gpu
from twofour.native import gpu
from twofour.packing import Packed
from twofour.patterns import parse

TOKENS = (1, 8, 16, 64, 512, 4096, 16384)
LAYERS = {
    "bert-large": ((3072, 1024), (4096, 1024), (1024, 4096)),
    "llama3-8b": ((6144, 4096), (28672, 4096), (4096, 14336)),
    "vit-b16": ((3072, 768), (768, 3072)),
}
SQUARES = (1024, 2048, 4096, 8192, 16384)
LEFT_OUT = {(28672, 4096, 16384)}
"""Its answer alone is 0.9 GB; what is left are 60 products."""

SMALL_TOKENS = (1, 4, 8, 16, 32)
COPIES = 64
"""Copies of a weight at most: small weights rotate over less than four times the cache."""


@dataclass(frozen=True)
class GpuCase:
    """One measurement.

    Attributes:
        name: Of its file.
        run: Measures it.
    """

    name: str
    run: Callable[[], Record]


def grid() -> list[GpuCase]:
    """Return 60 products in bfloat16, float8 and int8."""
    shapes = [(*shape, tokens) for layer in LAYERS.values() for shape in layer for tokens in TOKENS]
    shapes = [shape for shape in shapes if shape not in LEFT_OUT] + [(size, size, size) for size in SQUARES]
    return [_case("grid", dtype, *shape) for dtype in ("bfloat16", "float8", "int8") for shape in shapes]


def small() -> list[GpuCase]:
    """Return what decoding multiplies, in bfloat16 and with int4 weights, against dense bfloat16 and dense int4."""
    shapes = [(*shape, tokens) for shape in LAYERS["llama3-8b"] for tokens in SMALL_TOKENS]
    return [_case("small", dtype, *shape) for dtype in ("bfloat16", "int4") for shape in shapes]


def _case(part: str, dtype: str, rows: int, columns: int, tokens: int) -> GpuCase:
    name = f"{part}-{dtype}-{rows}x{columns}-{tokens}"
    return GpuCase(name, lambda: product(dtype, rows, columns, tokens, {"part": part}))


def product(dtype: str, rows: int, columns: int, tokens: int, meta: dict[str, object]) -> Record:
    """Time every trusted kernel of a computing type on one product; the dense ones are the baseline.

    Raises:
        KernelError: No kernel gives the right numbers.
    """
    dense = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * columns**-0.5
    dense *= parse("2:4").project(dense, absolute=True)
    source, _ = Computing.of(dtype, "cuda").encode(dense, parse("2:4"))
    assert isinstance(source, Packed), source
    kernels = [k for k in on_gpu(source, dtype) if isinstance(k, CudaKernel) and k.serves(tokens)]
    layouts: dict[str, Prepared] = {}

    def layout(kernel: Kernel) -> Prepared:
        if kernel.layout not in layouts:
            layouts[kernel.layout] = kernel.prepare(source)
        return layouts[kernel.layout]

    case = Case(Problem(rows), columns, None, tokens, torch.bfloat16)
    copies = min(COPIES, 1 + 4 * gpu.l2_bytes() // max(1, int(Computing.of(dtype, "cuda").bytes_of(rows, columns))))
    calls, reasons = trusted(source, kernels, layout, case, copies)
    if not calls:
        raise KernelError("no kernel of this GPU computes the product", reasons=reasons)
    shape = {"dtype": dtype, "rows": rows, "columns": columns, "tokens": tokens, "copies": copies}
    baseline = [name for name in calls if name.startswith("dense_")]
    return compare_on_gpu(
        calls,
        baseline=baseline,
        repeats=8,
        seconds=0.6,
        noise=True,
        energy=True,
        meta={**meta, **shape, "left_out": reasons},
    )
