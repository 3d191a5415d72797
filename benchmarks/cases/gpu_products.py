"""One product at a time on the GPU: every row of the kernel table that gives the right numbers, on random data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from twofour.compiler.choose import Case
from twofour.compiler.choose_gpu import on_gpu, trusted
from twofour.compiler.computing import Computing
from twofour.errors import KernelError
from twofour.kernels import Kernel, Prepared, find
from twofour.kernels.bits_matmul import TERNARY, BitWeight, bipolar, twos
from twofour.kernels.bits_matmul.cuda import BIT_PLANES
from twofour.kernels.cuda import CudaKernel
from twofour.kernels.problem import Problem
from twofour.kernels.quantization import Quantization, quantize_input
from twofour.measure import Record, compare_on_gpu
from twofour.measure.distance import distance
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
BITS_TOKENS = (1, 8, 64)
WIDTHS = {
    "w1a1": (bipolar(1), 1),
    "w1a2": (bipolar(1), 2),
    "w2a2": (twos(2), 2),
    "w1.58a8": (TERNARY, 8),
    "w2a8": (twos(2), 8),
    "w4a8": (twos(4), 8),
}
"""Levels of the weights, bits of the inputs."""

EXACT = 4e-3
"""Distance of answers that are exact but for one rounding to bfloat16."""

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


def bits() -> list[GpuCase]:
    """Return what decoding multiplies with weights of 1 to 4 bits by planes, against dense bfloat16 and int8."""
    shapes = [(*shape, tokens) for shape in LAYERS["llama3-8b"] for tokens in BITS_TOKENS]
    return [
        GpuCase(f"bits-{width}-{shape[0]}x{shape[1]}-{shape[2]}", partial(product_of_codes, width, *shape))
        for width in WIDTHS
        for shape in shapes
    ]


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


def product_of_codes(width: str, rows: int, columns: int, tokens: int) -> Record:
    """Time the product of planes, rounding of the inputs included; dense bfloat16 and int8 are the baseline.

    Raises:
        KernelError: Its numbers are wrong, or it cannot run.
    """
    (levels, bits), device = WIDTHS[width], gpu.device()
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(0, levels.largest_code + 1, (rows, columns), generator=random, dtype=torch.uint8)
    weight, quantization = BitWeight(codes, levels, torch.rand(rows, generator=random) + 0.5), Quantization(bits=bits)
    if reason := BIT_PLANES.refuses_weight(weight, quantization):
        raise KernelError("no kernel of this GPU computes the product", reasons=[reason])
    real = weight.real()
    x, problem = (
        torch.randn(tokens, columns, device=device, dtype=torch.bfloat16),
        Problem(rows, quantization=quantization),
    )
    found, scale, zero = quantize_input(x, quantization)
    want = (found.double() * quantization.factor - zero) * scale.double() @ real.to(device).double().T
    prepared = BIT_PLANES.prepare(weight)
    if not (off := distance([BIT_PLANES.run(x, prepared, None, problem)], [want])) < EXACT:
        raise KernelError("the product of planes is wrong", got=f"a distance of {off:.1e}", wanted=f"below {EXACT}")
    dense = ("dense_matmul_bf16_linear__cuda", "dense_matmul_int8_scaled__cuda")
    plain: dict[str, tuple[Kernel, Prepared, Problem]] = {
        name: (find(name), find(name).prepare(real), Problem(rows)) for name in dense
    }
    every = {**plain, BIT_PLANES.name: (BIT_PLANES, prepared, problem)}
    copies = {name: min(COPIES, 1 + 4 * gpu.l2_bytes() // one.nbytes) for name, (_, one, _) in every.items()}
    calls = {
        name: [partial(row.run, x, one.copy() if i else one, None, asked) for i in range(copies[name])]
        for name, (row, one, asked) in every.items()
    }
    shape = {"width": width, "rows": rows, "columns": columns, "tokens": tokens, "copies": copies}
    meta: dict[str, object] = {
        "part": "bits",
        "bytes": {name: one.nbytes for name, (_, one, _) in every.items()},
        **shape,
    }
    return compare_on_gpu(calls, baseline=dense, repeats=8, seconds=0.6, noise=True, energy=True, meta=meta)
