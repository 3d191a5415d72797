"""Measure every kernel that could serve a layer, at several token counts, and keep the fastest."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from twofour.compiler.case import Case
from twofour.compiler.choose_gpu import on_gpu, times_on_gpu
from twofour.compiler.layer import CompiledLinear, PreparedWeights
from twofour.compiler.layouts import Times, few_layouts, one_layout
from twofour.compiler.worth import WIDE, worth_measuring
from twofour.errors import CompileError, KernelError
from twofour.kernels import Kernel, available, find, sparse_products
from twofour.kernels.base import Prepared, R, Row
from twofour.kernels.bits_matmul import GROUPS, BitWeight, bits_rows
from twofour.kernels.dense_matmul import PLAIN
from twofour.kernels.dispatch import DispatchTable
from twofour.kernels.problem import Problem
from twofour.kernels.quantization import DYNAMIC, Quantization
from twofour.measure.cache import Cache
from twofour.measure.chooser import race
from twofour.measure.machine import free_memory_bytes
from twofour.native import gpu
from twofour.packing import Packed, shape_of

logger = logging.getLogger("twofour.compiler")

DEFAULT_TOKENS = (1, 8, 32, 128, 512)
"""Token counts measured besides the example's, so that later batch sizes are served well too."""

QUICK_TOKENS = (1, 32)
"""The same with `effort="quick"`."""

ROTATED_BYTES = 64 << 20
"""Copies of a layer's weight that one candidate rotates over, at most: the footprint of a mid-sized model."""

PACKED_APART = 1 << 18
"""Numbers in a weight from which MKL may pack it for the example's token count: that adds 8 MB and more, so it is done
for one count, not for each, and not for small layers."""

Progress = Callable[[int, int, str], None]
"""Called with steps done, steps in all, and the name of the next."""


@dataclass(frozen=True)
class Choice:
    """What was measured for one layer and what was chosen.

    Attributes:
        dispatch: Kernels by token count.
        times: Median seconds of every candidate at every measured token count.
        layouts: The weight in each layout the dispatch table needs.
        origin: Where the times come from that were not taken on this machine, "" where all were.
    """

    dispatch: DispatchTable
    times: Times
    layouts: dict[str, Prepared]
    origin: str = ""

    def runs(self, tokens: int) -> Row:
        """Return the kernel that was chosen for `tokens`."""
        return find(self.dispatch.names[bisect_left(self.dispatch.limits, tokens)], Row)

    def at(self, tokens: int, *, sparse: bool) -> float | None:
        """Return seconds at `tokens` of the chosen kernel if it is sparse, or dense, else of the fastest that is."""
        kernel = self.runs(tokens)
        if kernel.sparse is sparse and kernel.name in self.times[tokens]:
            return self.times[tokens][kernel.name]
        found = self.best(tokens, sparse=sparse)
        return found and found[1]

    def best(self, tokens: int, *, sparse: bool) -> tuple[str, float] | None:
        """Return name and seconds of the fastest sparse, or dense, kernel at `tokens`, if one was measured."""
        found = [(s, n) for n, s in self.times[tokens].items() if find(n, Row).sparse is sparse]
        return (min(found)[1], min(found)[0]) if found else None


def candidates(
    weight: Packed | Tensor | BitWeight,
    dtype: str = "float32",
    device: str = "cpu",
    *,
    native_alone: bool = False,
    problem: Problem | None = None,
) -> tuple[Kernel, ...]:
    """Return the kernels of a computing type that could multiply by `weight` here: sparse ones only for a packed one.

    A weight of codes has kernels of its own, whatever the computing type.

    Of the native rows only those of AVX-512 and above are worth measuring, below it those of the highest
    instruction-set level of each layout.

    Raises:
        KernelError: There is none.
    """
    if device == "cuda":
        assert not isinstance(weight, BitWeight)
        return on_gpu(weight, dtype)
    if isinstance(weight, BitWeight):
        return _of_codes(weight, problem.quantization if problem else DYNAMIC)
    fitting = [kernel for kernel in sparse_products() if isinstance(weight, Packed) and not kernel.refuses(weight)]
    rows, columns = shape_of(weight)
    dense = [kernel for kernel in available("dense_matmul") if kernel.dtype == dtype and kernel.fits(rows, columns)]
    found = (*worth_measuring(fitting), *worth_measuring(dense))
    if native_alone:
        found = tuple(kernel for kernel in found if kernel.native_product is not None)
    if not found:
        raise KernelError(
            f"no {dtype} kernel takes this weight here",
            got="a packed weight" if isinstance(weight, Packed) else f"a dense {weight.dtype} weight",
            wanted="a computing type with kernels for this CPU",
            remedy="`twofour kernels` lists every kernel and what it needs; lift TWOFOUR_ISA or take another dtype",
        )
    return found


def _of_codes(weight: BitWeight, quantization: Quantization) -> tuple[Kernel, ...]:
    """Return the rows that multiply by a weight of codes and inputs of these bits."""
    reasons = {row: row.refuses_weight(weight, quantization) for row in bits_rows()}
    found = [row for row, reason in reasons.items() if reason is None]
    if not found:
        grouped = weight.group or weight.shifted or quantization.real
        near = [(row, reason) for row, reason in reasons.items() if bool(grouped) is (row.layout == GROUPS)]
        here = [reason for row, reason in near if row.unavailable() is None and reason]
        inputs = "floats" if quantization.real else f"{quantization.bits} bits"
        raise KernelError(
            f"no kernel multiplies {weight.levels.bits} bits by {inputs} here"
            + "".join(f": it {why}" for why in here[:1]),
            reasons=[f"{row.name}: {reason}" for row, reason in reasons.items()],
            remedy="`twofour kernels` lists every kernel and what it needs; lift TWOFOUR_ISA",
        )
    lacking = any(row.isa.startswith(WIDE) and row.unavailable() for row in reasons)
    return tuple(worth_measuring(found, lacking=lacking))


def _promising(kernel: Kernel, tokens: int, everywhere: bool, alone: bool) -> bool:
    return kernel.serves(tokens) and alone if kernel.one_count else everywhere or kernel.serves(tokens)


def choose(
    weight: Packed | Tensor | BitWeight,
    bias: Tensor | None,
    tokens: Iterable[int],
    *,
    memory: str,
    footprint: int,
    cache: Cache,
    problem: Problem | None = None,
    example: int | None = None,
    dtype: str = "float32",
    activations: torch.dtype = torch.float32,
    device: str = "cpu",
    native_alone: bool = False,
) -> Choice:
    """Measure the candidates for one layer and keep the fastest at each token count.

    Args:
        weight: Canonical packed weight of `dtype`, a dense one (out, in), or one of codes.
        bias: float32 (out,) or None.
        tokens: Token counts to measure.
        memory: "fast" keeps every layout that wins somewhere; "small" keeps one, sparse where there is one.
        footprint: Bytes of the whole model's weights: that many bytes of copies are rotated (up to a cap), so that
            each call finds its weights as far from the core as it would inside the model.
        cache: Times measured earlier on this machine.
        problem: int8: the input's static range; what the layer does to its product, inside the timing.
        example: The example's token count, which weighs as much as all others where one layout has to serve all.
        dtype: Computing type; of codes the widths, such as "w2a2".
        activations: dtype of the input.
        device: "cpu" or "cuda".
        native_alone: Measure those alone that other native calls can run inside.

    Raises:
        KernelError: No kernel of that type takes the weight here.
        CompileError: A count of tokens does not fit into memory.
    """
    kernels = candidates(weight, dtype, device, native_alone=native_alone, problem=problem)
    layouts: dict[str, Prepared] = {}

    def layout(kernel: Kernel) -> Prepared:
        if kernel.layout not in layouts:
            layouts[kernel.layout] = kernel.prepare(cast(Any, weight))
        return layouts[kernel.layout]

    rows, columns = weight.header.shape if isinstance(weight, Packed) else weight.shape
    problem = problem or Problem(rows)
    copies = _copies(rows, columns, footprint, device)
    timed = _times if device == "cpu" else partial(times_on_gpu, cast(Any, weight))
    small, keys = memory == "small", list[str]()
    times: Times = {}
    for count in require_room(tokens, rows + columns):
        # One layout has to serve every count, so "small" measures each kernel everywhere.
        alone = count == example and memory == "fast" and rows * columns >= PACKED_APART
        measured = [kernel for kernel in kernels if _promising(kernel, count, small, alone)]
        case = Case(problem, columns, bias, count, activations)
        keys.append(cache.key(case.text(dtype, weight), copies))
        times[count] = timed(measured, layout, case, copies, cache, keys[-1])
    several = None if small else few_layouts(kernels, times, example, once=(dtype, device) == ("float32", "cpu"))
    dispatch = several or one_layout(kernels, times, (rows, columns), example, layout)
    kept = {kernel.layout: layout(kernel) for kernel in map(find, dispatch.names)}
    return Choice(dispatch, times, kept, cache.origin(keys))


def require_room(tokens: Iterable[int], features: int) -> list[int]:
    """Return token counts in order; refuse one whose input and output do not fit into memory.

    Args:
        tokens: Token counts to measure.
        features: Inputs and outputs of the layer together, in float32.

    Raises:
        CompileError: The largest count does not fit.
    """
    counts = sorted(set(tokens))
    most = max(counts, default=0)
    need, free = 4 * most * features, free_memory_bytes()
    if free is not None and need > free:
        raise CompileError(
            "a token count does not fit into memory",
            got=f"{most} tokens, {need / 1e9:.4g} GB of inputs and outputs of a layer; {free / 1e9:.4g} GB are free",
            wanted="token counts that are measured with real inputs",
            remedy="tokens=(1, 8, 128): batch times sequence length of the calls to come",
        )
    return counts


def _copies(rows: int, columns: int, footprint: int, device: str) -> int:
    """Return how many copies of a weight to rotate over: the model's bytes, up to a cap; on a GPU four times its L2."""
    most = ROTATED_BYTES if device == "cpu" else 4 * gpu.l2_bytes()
    return max(1, min(footprint, most) // (rows * columns * 4))


def _times(
    kernels: Sequence[Kernel],
    layout: Callable[[Kernel], Prepared],
    case: Case,
    copies: int,
    cache: Cache,
    key: str,
) -> dict[str, float]:
    """Return the seconds of each kernel, from the cache where it has them all."""
    return cache.times(key, [kernel.name for kernel in kernels], lambda: _measure(kernels, layout, case, copies))


def _measure(
    kernels: Sequence[Kernel], layout: Callable[[Kernel], Prepared], case: Case, copies: int
) -> tuple[dict[str, float], float]:
    operands = case.operands()

    def call(kernel: Kernel, weight: Prepared) -> Callable[[], object]:
        return partial(_layer(kernel, weight, case), *operands)

    what = f"({case.problem.rows}, {case.columns}) at {case.tokens} tokens"
    return race_kernels(kernels, layout, call, copies, what)


def race_kernels(
    kernels: Sequence[R],
    prepare: Callable[[R], Prepared],
    call: Callable[[R, Prepared], Callable[[], object]],
    copies: int,
    what: str,
) -> tuple[dict[str, float], float]:
    """Race kernels on copies of one weight; return the seconds of each, and in how much doubt their order is.

    Args:
        kernels: Candidates; those of one layout share the copies.
        prepare: Returns the weight as a kernel has it.
        call: Returns the layer on one copy as the compiled model would hold it, so that what its call costs in Python
            is measured too.
        copies: Copies to rotate over.
        what: Named in the log.
    """
    copied: dict[str, list[Prepared]] = {}

    def calls(kernel: R) -> list[Callable[[], object]]:
        if kernel.layout not in copied:
            first = prepare(kernel)
            fit = ROTATED_BYTES // first.nbytes  # MKL's are larger than the weight
            copied[kernel.layout] = [first, *(first.copy() for _ in range(min(copies, max(fit, 1)) - 1))]
        return [call(kernel, weight) for weight in copied[kernel.layout]]

    with torch.inference_mode():
        found, doubt = race({kernel.name: calls(kernel) for kernel in kernels}, cold=copies > 1)
    best = min(found, key=found.__getitem__)
    logger.info("%s: %s, %.4f ms", what, best, found[best] * 1e3)
    return found, doubt


def _layer(kernel: Kernel, weight: Prepared, case: Case) -> nn.Module:
    """Return the layer as the compiled model would hold it: `nn.Linear` itself where that is what runs."""
    columns, problem, bias = case.columns, case.problem, case.bias
    if kernel is not PLAIN or not problem.epilogue.plain:
        prepared = PreparedWeights([weight])
        layer = CompiledLinear("measured", columns, problem, DispatchTable((), (kernel.name,)), prepared, bias)
        layer.read_bytes()
        return layer
    plain = nn.Linear(columns, problem.rows, bias=bias is not None, device="meta")
    plain.weight = nn.Parameter(weight.tensor, requires_grad=False)
    if bias is not None:
        plain.bias = nn.Parameter(bias, requires_grad=False)
    return plain
