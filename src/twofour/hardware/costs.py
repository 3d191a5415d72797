"""Costs: seconds of products from the limits of a machine, the best of every cut; `gemm` of one product."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

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

MMA_SYNC_INT8 = 2048
"""int8 multiply-adds a cycle of one multiprocessor by mma.sync, as on A100 (its whitepaper); an H100 reached 2360 (the
record of benchmarks/gpu.py's rates): what cuBLASLt of CUDA 12.9 runs dense on B200, whose own instructions reach three
times the rate in float8."""


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
    repeats: tuple[ArrayLike, ArrayLike] = (1, 1),
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
        repeats: How often a value of the operand of m, and of n, stands in its matrix; see `cut`.
        fitted: Constants.

    Raises:
        HardwareError: The machine has no unit for this.
    """
    machine.peak(dtype, sparse=sparse)
    work = cut(machine, dtype, sparse, m, n, k, batch, repeats=repeats)
    return price(work, machine, dtype, sparse, cold=cold, fitted=fitted)


def price(work: Work, machine: Machine, dtype: str, sparse: bool, *, cold: bool, fitted: Fitted) -> Costs:
    """Price products that are cut already and take the cheapest cut of each, as a library's search would.

    Units and memory work side by side after the launch, (math^8 + memory^8)^(1/8); what the machine keeps up within its
    power limit holds for the whole time and is joined to it in the same way. A wave takes the longest of the units'
    peak, of what a unit can load and of the loads' latency; then the tile's pipeline fills and its output is stored.
    """
    math = _waves(work, machine, dtype, sparse, fitted)
    held = machine.l2 * fitted.cache
    missed = _missed(work.operands + work.output, held)
    traffic = missed * (work.operands + work.output) + (1 - missed) * work.weights * cold
    traffic = traffic + _missed(work.reach, held) * work.again
    memory = traffic / (machine.bandwidth * fitted.memory)
    own = machine.peak if machine.graphics or machine.copy_engine else partial(_peak, machine, fitted=fitted)
    power = work.flops / (fitted.sustained_of(machine, sparse) * own(dtype, sparse=sparse))
    launch = fitted.launch_of(machine)
    alone = launch + (_raised(math) + _raised(memory)) ** (1 / 8)
    # Registers hold the sums of no larger tile; those of tcgen05, Blackwell's own instructions, have a memory.
    sums = np.inf if machine.family == "blackwell" and not is_sync(machine, dtype, sparse) else 256 * 128
    allowed = work.offered & (work.parts <= _parts(machine, dtype, sparse)) & (work.area <= sums)
    total = np.where(allowed, (_raised(alone) + _raised(power)) ** (1 / 8), np.inf)
    best = total.argmin(1)[:, None]
    pick = lambda array: np.take_along_axis(np.broadcast_to(array, total.shape), best, 1)[:, 0]  # noqa: E731
    seconds = pick(total)
    # Voltage rises with the clock: an operation at a fraction of the rate takes that fraction of its energy there.
    moving = np.minimum(np.square(pick(power)) / seconds, seconds)
    return Costs(
        seconds=seconds,
        launch=np.full_like(seconds, launch),
        math=pick(math),
        memory=pick(memory),
        power=pick(power),
        joules=machine.watts * (STATIC * seconds + (1 - STATIC) * moving),
        bytes=pick(traffic),
        tile=best[:, 0],
    )


def _raised(array: Array) -> Array:
    return np.square(np.square(np.square(array)))


def _missed(size: Array, held: float) -> Array:
    """Return the share of so many bytes that the cache has lost by the time they are read again."""
    return np.clip(size / held - 1, 0, 1)


def is_sync(machine: Machine, dtype: str, sparse: bool) -> bool:
    """Whether the library's kernels copy by threads (cp.async) rather than by a copy engine (TMA).

    All of them before Hopper and on graphics boards. Else int8 dense (cuBLASLt's kernels scale as Ampere's on all GPUs)
    and 16-bit 2:4 on Hopper (cuSPARSELt's take three times as long per element of the reduction as its 8-bit ones).
    """
    if not machine.copy_engine:
        return True
    return dtype == "int8" if not sparse else machine.family == "hopper" and BITS[dtype] >= 16


def _peak(machine: Machine, dtype: str, sparse: bool, fitted: Fitted) -> float:
    """Return the peak of the units that the library uses; for int8 dense those of mma.sync, but on Hopper."""
    peak = machine.peak(dtype, sparse=sparse) * (fitted.boost if machine.graphics else 1)
    if dtype != "int8" or sparse or machine.family == "hopper":
        return peak
    if machine.family == "blackwell":
        peak = min(peak, 2 * MMA_SYNC_INT8 * machine.units * machine.clock)
    return peak * fitted.int8_issue


def _parts(machine: Machine, dtype: str, sparse: bool) -> int:
    """Return how far the library splits the reduction.

    Read off the algorithms that the published searches name: int8 dense is never split, nor are 2:4 ones in int8
    without a copy engine and in float8 on Ada.
    """
    if not sparse:
        return 1 if dtype == "int8" else max(SPLITS)
    narrow = dtype in ("int8", "int4") or (dtype == "float8" and machine.family == "ada")
    return 1 if narrow and not machine.copy_engine else max(SPLITS)


def _waves(work: Work, machine: Machine, dtype: str, sparse: bool, fitted: Fitted) -> Array:
    """Return the seconds of all waves of tiles.

    On graphics boards the last cache is what units share: they load no faster than it delivers to those at work.
    """
    sync, share = is_sync(machine, dtype, sparse), np.minimum(1, work.tiles / machine.units)
    if not sync:
        bytes_a_cycle = fitted.load_async / share
    else:
        bytes_a_cycle = np.minimum(fitted.port, fitted.load_shared / share) if machine.graphics else fitted.port
    speed = bytes_a_cycle * machine.clock
    units = work.tiles / machine.units
    waves = np.where(units <= 1, 1, fitted.quantized * np.ceil(units) + (1 - fitted.quantized) * units)
    issue = fitted.sparse_issue if sparse and machine.family == "hopper" else 1.0
    peak = _peak(machine, dtype, sparse, fitted) / machine.units * issue
    step = (fitted.sparse_step if sparse else fitted.step) if sync else 0.0
    loop = np.maximum(np.maximum(2 * work.area * work.depth / peak, work.loads / speed), step * work.depth)
    fill = fitted.sparse_tile * sparse * 1.5e9 / machine.clock
    store = 2 * work.area * np.where(work.parts > 1, 2, 1) / speed
    return waves * (loop + fill + store) + fitted.split * (work.parts > 1)


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
