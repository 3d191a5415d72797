"""Costs: seconds of products from the limits of a machine, the best of every cut; `gemm` of one product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twofour.errors import HardwareError
from twofour.hardware.fitted import FITTED, Fitted
from twofour.hardware.machine import BITS, Machine, group_of
from twofour.hardware.machines import machine as find
from twofour.hardware.sizes import require_integers
from twofour.hardware.work import SPLITS, Array, Work, cut

STATIC = 0.2
"""Share of the power limit that flows whatever is computed (leakage, memory, fans): a round figure, only the
energy depends on it."""


@dataclass(frozen=True)
class Costs:
    """What products take, one value a product.

    Attributes:
        seconds: Of one product among others of its kind, launch included.
        launch: Seconds of that in which nothing is computed.
        math: Seconds of the units, whole waves of tiles.
        memory: Seconds of the traffic to memory.
        power: Least seconds within the power limit.
        joules: Energy.
        bytes: Traffic to memory.
        tile: Index of the cut, into `TILES` times `SPLITS`.
    """

    seconds: Array
    launch: Array
    math: Array
    memory: Array
    power: Array
    joules: Array
    bytes: Array
    tile: NDArray[np.int64]

    @property
    def bound(self) -> list[str]:
        """What takes longest of each product: "math" (units or power), "memory" or "launch"."""
        rows = np.stack([np.maximum(self.math, self.power), self.memory, self.launch])
        return [("math", "memory", "launch")[index] for index in rows.argmax(0)]


def costs(
    machine: Machine,
    dtype: str,
    sparse: bool,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    *,
    batch: ArrayLike = 1,
    cold: bool = False,
    fitted: Fitted = FITTED,
) -> Costs:
    """Price products of (m, k) by (k, n).

    Args:
        machine: The machine.
        dtype: Computing type.
        sparse: Whether the operand of n is 2:4 (1:2 in tf32, 4:8 in int4).
        m: Tokens; whole numbers, one or an array.
        n: Outputs.
        k: Reduction.
        batch: How many such products run in one launch.
        cold: Whether the weight stands in memory; else in the cache if it fits, as where a benchmark repeats a product.
        fitted: Constants.

    Raises:
        HardwareError: The machine has no unit for this.
    """
    machine.peak(dtype, sparse=sparse)
    return price(cut(machine, dtype, sparse, m, n, k, batch), machine, dtype, sparse, cold=cold, fitted=fitted)


def price(work: Work, machine: Machine, dtype: str, sparse: bool, *, cold: bool, fitted: Fitted) -> Costs:
    """Price products that are cut already and take the cheapest cut of each, as a library's search would.

    Units and memory work side by side after the launch, (math^8 + memory^8)^(1/8); the power limit holds for the whole
    time, launch included, in which nothing is computed, and is joined to it in the same way. A wave takes the longest
    of the units' peak, of what a unit can load and of the loads' latency; then the tile's pipeline fills and its output
    is stored.
    """
    math = _waves(work, machine, dtype, sparse, fitted)
    held = machine.l2 * fitted.cache
    footprint = work.operands + work.output
    missed = np.clip(footprint / held - 1, 0, 1)
    traffic = missed * (footprint + np.maximum(0, work.stream - work.operands)) + (1 - missed) * work.weights * cold
    memory = traffic / (machine.bandwidth * fitted.memory)
    power, watts = _power(work, machine, dtype, sparse, fitted)
    launch = fitted.launch_of(machine, sparse)
    alone = launch + (_raised(math) + _raised(memory)) ** (1 / 8)
    total = np.where(_allowed(work, machine, dtype, sparse), (_raised(alone) + _raised(power)) ** (1 / 8), np.inf)
    best = total.argmin(1)[:, None]
    pick = lambda array: np.take_along_axis(np.broadcast_to(array, total.shape), best, 1)[:, 0]  # noqa: E731
    seconds = pick(total)
    joules = STATIC * machine.watts * seconds + (1 - STATIC) * np.minimum(
        pick(watts[0]) + pick(watts[1]) / seconds, machine.watts * seconds
    )
    return Costs(
        seconds=seconds,
        launch=np.full_like(seconds, launch),
        math=pick(math),
        memory=pick(memory),
        power=pick(power),
        joules=joules,
        bytes=pick(traffic),
        tile=best[:, 0],
    )


def _raised(array: Array) -> Array:
    return np.square(np.square(np.square(array)))


def is_sync(machine: Machine, dtype: str, sparse: bool) -> bool:
    """Whether the library's kernels copy by threads (cp.async) rather than by a copy engine (TMA).

    All of them before Hopper. Later, int8 dense (cuBLASLt's kernels scale as Ampere's on all four GPUs) and 16-bit 2:4
    on Hopper (cuSPARSELt's take three times as long per element of the reduction as its 8-bit ones).
    """
    if not machine.copy_engine:
        return True
    return dtype == "int8" if not sparse else machine.family == "hopper" and BITS[dtype] >= 16


def _allowed(work: Work, machine: Machine, dtype: str, sparse: bool) -> NDArray[np.bool_]:
    """Cuts the library offers: dense products split the reduction, but not in int8; 2:4 ones in 16 bits before Hopper.

    Read off the published times, where the time of few tokens grows with the whole reduction or only with part of it.
    """
    if sparse:
        return work.parts <= (4 if BITS[dtype] >= 16 and not machine.copy_engine else 1)
    return work.parts <= (1 if dtype == "int8" else max(SPLITS))


def _waves(work: Work, machine: Machine, dtype: str, sparse: bool, fitted: Fitted) -> Array:
    sync = is_sync(machine, dtype, sparse)
    speed = (fitted.load_sync if sync else fitted.load_async) * machine.clock
    units = work.tiles / machine.units
    whole = fitted.sparse_quantized if sparse else fitted.quantized
    waves = np.where(units <= 1, 1, whole * np.ceil(units) + (1 - whole) * units)
    peak = (
        machine.peak(dtype, sparse=sparse)
        / machine.units
        * (fitted.sparse_issue_async if sparse and machine.copy_engine else fitted.issue)
    )
    step = fitted.step_sync if sync else 0.0
    loop = np.maximum(np.maximum(2 * work.area * work.depth / peak, work.loads / speed), step * work.depth)
    fill = (fitted.sparse_tile if sparse else fitted.tile) * 1.5e9 / machine.clock
    store = 2 * work.area * np.where(work.parts > 1, 2, 1) / speed
    return waves * (loop + fill + store) + fitted.split * (work.parts > 1)


def _power(work: Work, machine: Machine, dtype: str, sparse: bool, fitted: Fitted) -> tuple[Array, tuple[Array, Array]]:
    """Return the least seconds t within the power limit W: W t = e F^2 / (t P) + loads.

    Voltage rises with the clock, so an operation at a fraction x = F / (t P) of the peak P takes x times the energy e
    that it takes at the peak. Also returned: joules of the loads, and e F^2 / P, to be divided by the time taken.
    """
    peak = machine.peak(dtype, sparse=sparse)
    energy = machine.watts / (fitted.sustained_of(machine, sparse) ** 2 * peak) * fitted.energy_of(machine, dtype)
    loads = (work.tiles * work.loads + work.output) * fitted.load_energy
    square = energy * np.square(work.flops) / peak
    return (loads + np.sqrt(loads * loads + 4 * machine.watts * square)) / (2 * machine.watts), (loads, square)


def gemm(
    machine: str | Machine, dtype: str, *, m: int, n: int, k: int, sparse: bool = False, cold: bool = False
) -> float:
    """Predict the seconds of (m, k) by (k, n) among repetitions of itself, as benchmarks measure it.

    What is modelled and how far it is from published times: docs/hardware.md.

    Args:
        machine: A name in `MACHINES`, or a machine.
        dtype: Computing type, one of `DTYPES`.
        m: Tokens.
        n: Outputs.
        k: Reduction.
        sparse: Whether the weight (n, k) is 2:4 along k; 1:2 in tf32, 4:8 pairs in int4.
        cold: Whether the weight stands in memory; else in the last cache, where it fits.

    Raises:
        HardwareError: The machine is unknown or has no unit for this, or a size is impossible.
    """
    return float(explain(machine, dtype, m=m, n=n, k=k, sparse=sparse, cold=cold).seconds[0])


def explain(
    machine: str | Machine, dtype: str, *, m: int, n: int, k: int, sparse: bool = False, cold: bool = False
) -> Costs:
    """Return what `gemm` adds up: seconds of the units, of memory, of the power limit, joules, bytes; arrays of one.

    Raises:
        HardwareError: As `gemm`.
    """
    device = find(machine)
    device.peak(dtype, sparse=sparse)
    m, n, k = require_integers("a product cannot have this size", "m tokens, n outputs, k reduction", m=m, n=n, k=k)
    group = group_of(dtype)
    if sparse and k % group:
        raise HardwareError(
            f"a reduction of {k} cannot be sparse in {dtype}",
            got=f"k={k}",
            wanted=f"a multiple of {group}",
            remedy=f"k={-(-k // group) * group} with zeros, or sparse=False",
        )
    return costs(device, dtype, sparse, m, n, k, cold=cold)
