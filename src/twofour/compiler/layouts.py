"""Which layouts of a weight are worth their bytes, by the times of the kernels that read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from twofour.kernels import Kernel, find
from twofour.kernels.base import Prepared
from twofour.kernels.bits_matmul import BitsMatmul
from twofour.kernels.dense_matmul import PLAIN
from twofour.kernels.dispatch import DispatchTable, build_dispatch

WORTH_A_COPY = 1.05
"""A further copy of a weight, in another layout, must save at least 5 % of the time at some token count."""

Times = dict[int, dict[str, float]]
"""Token count -> kernel name -> median seconds."""


def few_layouts(
    kernels: Sequence[Kernel], times: Times, example: int | None = None, *, once: bool = False
) -> DispatchTable:
    """Take the fastest kernel at each count, but drop a layout that gains less than `WORTH_A_COPY` anywhere.

    Without that, noise in the times would keep three copies of a weight where one does.

    Args:
        kernels: What was measured.
        times: Their seconds by token count.
        example: The example's token count.
        once: Keep a dense layout alone: of float32 another one beside it would take more bytes than the dense model's.
    """
    layout_of = {kernel.name: kernel.layout for kernel in kernels}

    def best(found: dict[str, float], layouts: set[str]) -> float:
        return min((s for name, s in found.items() if layout_of[name] in layouts), default=math.inf)

    def loss(layouts: set[str]) -> float:
        return max(best(found, layouts) / best(found, everything) for found in times.values())

    everything = set(layout_of.values())
    # Within as much as a copy must gain a tie goes to the layout whose calls take in what stands beside the product.
    joining = {kernel.layout for kernel in kernels if kernel.whole_rows}
    kept = next(({layout} for layout in sorted(joining) if loss({layout}) <= WORTH_A_COPY), set(everything))
    while len(kept) > 1:
        # Against all layouts, not those still kept: small steps must not add up.
        losses = {layout: loss(kept - {layout}) for layout in kept}
        cheapest = min(sorted(kept), key=losses.__getitem__)
        if losses[cheapest] > WORTH_A_COPY:
            break
        kept.remove(cheapest)
    if once and any(not kernel.sparse and kernel.layout in kept for kernel in kernels):
        kept = _alone(kernels, times, example or 0, kept)
    fastest: dict[int, str] = {}
    exact: dict[int, str] = {}
    for count, found in times.items():
        names = [name for name in found if layout_of[name] in kept]
        others = [name for name in names if not find(name).one_count] or [PLAIN.name]
        fastest[count] = min(others, key=found.__getitem__)
        if find(best_name := min(names, key=found.__getitem__, default=PLAIN.name)).one_count:
            exact[count] = best_name
    return build_dispatch(fastest, exact)


def _alone(kernels: Sequence[Kernel], times: Times, example: int, kept: set[str]) -> set[str]:
    """Return the layout that serves all token counts best by itself; `kept` where none serves them all.

    At the example's token count it is the best one, or as good but for what a copy must gain.
    """
    names: dict[str, list[str]] = {}
    for kernel in kernels:
        if not kernel.one_count:
            names.setdefault(kernel.layout, []).append(kernel.name)
    if len(kept) == 1 and kept <= names.keys():
        return kept
    there = times.get(example, {})
    at = {layout: min(there.get(name, math.inf) for name in found) for layout, found in names.items()}
    near = [layout for layout in sorted(names) if not there or at[layout] <= WORTH_A_COPY * min(at.values())]
    costs = {layout: _cost(names[layout], times, example) for layout in near}
    best = min(costs, key=costs.__getitem__, default="")
    return {best} if costs and math.isfinite(costs[best]) else kept


def _cost(names: Sequence[str], times: Times, example: int) -> float:
    """Return the logarithm of the seconds at all token counts together; the example's weighs as much as all others."""
    logs = {count: math.log(min(found.get(name, math.inf) for name in names)) for count, found in times.items()}
    return sum(logs.values()) + logs.get(example, 0.0) * (len(logs) - 2)


def one_layout(
    kernels: Sequence[Kernel],
    times: Times,
    shape: tuple[int, int],
    example: int | None,
    layout: Callable[[Kernel], Prepared] | None = None,
) -> DispatchTable:
    """Keep the single layout with the best geometric mean over the token counts, sparse where there is one.

    A layout more than 5 % larger than the smallest one is not considered: it trades bytes for speed. Of codes that are
    2:4 all are, sparse or dense, by what `layout` prepares: a mask takes more than zeros of few bits do.
    """
    sparse = [kernel for kernel in kernels if kernel.sparse]
    # A plain dense weight is what the model holds anyway; a prepacked one would be a second copy.
    pool = sparse or [kernel for kernel in kernels if kernel.layout == "dense"] or kernels
    sizes = {kernel.layout: kernel.least_bytes(*shape) for kernel in pool}
    if layout is not None and any(isinstance(kernel, BitsMatmul) for kernel in sparse):
        pool, sizes = kernels, {kernel.layout: layout(kernel).nbytes for kernel in kernels}
    small = [name for name, size in sizes.items() if size <= 1.05 * min(sizes.values())]
    names = {layout: [kernel.name for kernel in pool if kernel.layout == layout] for layout in small}
    best = names[min(small, key=lambda layout: _cost(names[layout], times, example or 0))]
    return build_dispatch(
        {count: min(best, key=lambda name: found.get(name, math.inf)) for count, found in times.items()}
    )
