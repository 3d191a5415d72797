"""The same choice on a GPU: search configurations, trust what agrees with the reference, time graphs of calls."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from twofour.compiler.case import Case
from twofour.errors import CompileError, KernelError
from twofour.kernels import Kernel, available
from twofour.kernels.base import Prepared
from twofour.kernels.cuda import CudaKernel
from twofour.kernels.nm_matmul.cuda import tuned
from twofour.kernels.nm_matmul.cuda.tuning import key
from twofour.measure import device_seconds
from twofour.measure.cache import Cache
from twofour.measure.chooser import fault, race
from twofour.native import gpu
from twofour.packing import Packed, dense_of, shape_of

logger = logging.getLogger("twofour.compiler")

GPU_TOKENS = (1, 8, 16, 64, 512, 4096)
"""Token counts measured on a GPU besides the example's: decoding, small batches, prefill."""

LARGEST_ERRORS = {"float32": 2e-3, "bfloat16": 2e-2, "float16": 5e-3, "int8": 6e-2, "float8": 1e-1, "int4": 2e-2}
"""Relative error of one product beyond which a kernel is not trusted: what its rounding costs on random numbers, twice.
float32 is cuBLAS's, which may use tf32 where the user allowed it. int4 is compared with the rounded weight."""


def require_for_gpu(data: Iterable[Any] | None, graph: bool | str) -> None:
    """Refuse what is built for the CPU alone.

    Raises:
        CompileError: Static ranges or a graph of our own are asked for.
    """
    if data is not None or graph:
        raise CompileError(
            "this is planned for models on a GPU, not built yet",
            got="data" if data is not None else f"graph={graph!r}",
            wanted="a model compiled layer by layer, 8-bit inputs rounded per token",
            remedy="leave it out; torch.compile or a CUDA graph around the compiled model take the launches away",
        )


def on_gpu(weight: Packed | Tensor, dtype: str) -> tuple[Kernel, ...]:
    """Return the GPU's rows of a computing type that could multiply by `weight`; int4 has bfloat16's dense one, too.

    Raises:
        KernelError: There is none.
    """
    rows, columns = shape_of(weight)
    sparse = [k for k in available("nm_matmul", "cuda") if isinstance(weight, Packed) and not k.refuses(weight)]
    types = (dtype, "bfloat16") if dtype == "int4" else (dtype,)
    dense = [k for k in available("dense_matmul", "cuda") if k.dtype in types]
    found = tuple(k for k in (*sparse, *dense) if isinstance(k, CudaKernel) and k.fits(rows, columns))
    if not found:
        raise KernelError(
            f"no {dtype} kernel takes this weight on this GPU",
            got="a packed weight" if isinstance(weight, Packed) else f"a dense {weight.dtype} weight",
            wanted="a computing type with kernels for this GPU",
            remedy="`twofour kernels` lists every kernel and what it needs; take another dtype",
        )
    return found


def times_on_gpu(
    source: Packed | Tensor,
    kernels: Sequence[Kernel],
    layout: Callable[[Kernel], Prepared],
    case: Case,
    copies: int,
    cache: Cache,
    name: str,
) -> dict[str, float]:
    """Return the seconds of each kernel that gives the right numbers, from the cache where the case is known.

    Args:
        source: The weight, canonical or dense: the reference multiplies by it.
        kernels: Candidates.
        layout: Returns the weight as a kernel has it.
        case: What is measured.
        copies: Copies of the weight to rotate over.
        cache: Times measured earlier on this GPU.
        name: From `cache.key`.

    Raises:
        KernelError: No kernel gives the right numbers.
    """
    names = hashlib.sha256(" ".join(kernel.name for kernel in kernels).encode()).hexdigest()[:8]
    name = f"{name}/{names}"
    known = {kernel.name: s for kernel in kernels if (s := cache.get(name).get(kernel.name)) is not None}
    if not known or not cache.looked_at(name):
        known = _measured(source, kernels, layout, case, copies)
        cache.put(name, known)
    return known


def _measured(
    source: Packed | Tensor, kernels: Sequence[Kernel], layout: Callable[[Kernel], Prepared], case: Case, copies: int
) -> dict[str, float]:
    with torch.inference_mode():
        calls, reasons = trusted(source, kernels, layout, case, copies)
        if not calls:
            raise KernelError(
                "no kernel of this GPU computes the layer's product",
                reasons=reasons,
                remedy="take another dtype, or compile the model on the CPU",
            )
        return race(calls, seconds=0.2, gpu=True)[0]


def trusted(
    source: Packed | Tensor, kernels: Sequence[Kernel], layout: Callable[[Kernel], Prepared], case: Case, copies: int
) -> tuple[dict[str, list[Callable[[], object]]], list[str]]:
    """Search each kernel's configurations and compare it with the reference.

    Args:
        source: The weight, canonical or dense: the reference multiplies by it.
        kernels: Candidates.
        layout: Returns the weight as a kernel has it.
        case: What is computed.
        copies: Copies of the weight that the calls of a kernel use in turn.

    Returns:
        The calls of each kernel whose numbers are right, and the reason why another one is left out.
    """
    operands = case.operands(gpu.device())
    reference = _reference(source, case, operands)
    calls: dict[str, list[Callable[[], object]]] = {}
    reasons: list[str] = []
    for kernel in kernels:
        assert isinstance(kernel, CudaKernel), kernel

        def searched(kernel: CudaKernel = kernel) -> Tensor:
            _search(kernel, layout(kernel), case, operands, reference)
            return _run(kernel, layout(kernel), case, operands)

        if why := fault(searched, reference, LARGEST_ERRORS[kernel.dtype]):
            reasons.append(f"{kernel.name}: {why}")
            continue
        prepared = layout(kernel)
        weights = [prepared, *(prepared.copy() for _ in range(copies - 1))]
        calls[kernel.name] = [partial(_run, kernel, weight, case, operands) for weight in weights]
    for reason in reasons:
        logger.warning("(%d, %d) at %d tokens: not used: %s", case.problem.rows, case.columns, case.tokens, reason)
    tuned().save()
    return calls, reasons


def _run(kernel: Kernel, weight: Prepared, case: Case, operands: tuple[Tensor, ...]) -> Tensor:
    x, *other = operands
    return kernel.run(x, weight, case.bias, case.problem, other[0] if other else None)


def _reference(source: Packed | Tensor, case: Case, operands: tuple[Tensor, ...]) -> Tensor:
    """Return the product in float64, which no setting rounds to tf32."""
    weight = dense_of(source).to(gpu.device(), torch.float64)
    x, *other = operands
    y = x.double() @ weight.t()
    y = y if case.bias is None else y + case.bias
    return case.problem.epilogue.apply(y, other[0].double() if other else None)


def _search(
    kernel: CudaKernel, prepared: Prepared, case: Case, operands: tuple[Tensor, ...], reference: Tensor
) -> None:
    """Find the kernel's best configuration for this product, unless it is known or there is one way alone."""
    sizes = case.problem.rows, case.columns, case.tokens
    name, ways = key(kernel.name, *sizes), kernel.configurations(*sizes)
    if not ways or tuned().configuration(name) is not None:
        return
    x, *other = operands
    second = other[0] if other else None

    def run(configuration: tuple[int, ...]) -> Tensor:
        return kernel.run_as(configuration, x, prepared, case.bias, case.problem, second)

    found = tuned().search(
        name,
        ways,
        run,
        reference,
        lambda call: device_seconds([call], repeats=3),
        tolerance=LARGEST_ERRORS[kernel.dtype],
    )
    if found is not None:
        logger.info("%s: %s of %d, %.1f us", name, found.configuration, found.tried, 1e6 * found.seconds)
    elif math.prod(reference.shape):
        logger.warning("%s: no configuration gives the right numbers; its default is checked as it is", name)
