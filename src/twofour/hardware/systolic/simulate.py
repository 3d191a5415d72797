"""simulate: what SCALE-Sim would report of a layer, from closed forms and from the addresses its folds ask for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from twofour.errors import HardwareError
from twofour.hardware.systolic.array import SystolicArray
from twofour.hardware.systolic.layer import Layer
from twofour.hardware.systolic.memory import Traffic, Written, fetch, fetch_ahead, write_back
from twofour.hardware.systolic.operands import LARGEST, NONE, Operands, operands
from twofour.hardware.systolic.settings import Settings
from twofour.hardware.systolic.streams import OPERANDS, Schedule

WORD = 32
"""Bits of a value where SCALE-Sim counts the metadata of "ellpack_block"; everywhere else it is one."""


@dataclass(frozen=True)
class Access:
    """Requests of one operand at the memory beside the array: first and last cycle, and how many."""

    start: int
    stop: int
    values: float


@dataclass(frozen=True)
class Storage:
    """Values that a filter takes: whole, compressed with its metadata, and the metadata alone."""

    original: int
    compressed: float
    metadata: float


@dataclass(frozen=True)
class Simulated:
    """One layer's report.

    Attributes:
        layer: The layer.
        cycles: Index of the last cycle, stalls counted, as SCALE-Sim's "Total Cycles": one less than the cycles.
        stalls: Cycles in which the array waited for memory.
        overall: Share of units times cycles that a dense layer's products would take, in percent; sparse above 100.
        mapping: Share of units that hold or make a value, over the folds, in percent.
        compute: Share of units times cycles of a fold that multiply, over the folds, in percent.
        accesses: Requests of inputs, weights and outputs at the memories beside the array.
        traffic: The same to and from the main memory.
        storage: Of the filter; None where everything is dense.
    """

    layer: Layer
    cycles: int
    stalls: int
    overall: float
    mapping: float
    compute: float
    accesses: tuple[Access, Access, Access]
    traffic: tuple[Traffic, Traffic, Traffic]
    storage: Storage | None

    @property
    def whole(self) -> int:
        """Cycles from the first fetch to the last write."""
        return self.traffic[2].stop - min(self.traffic[0].start, self.traffic[1].start)


def simulate(layer: Layer, settings: Settings) -> Simulated:
    """Report a layer as SCALE-Sim 3.0.0 does, exactly.

    Raises:
        HardwareError: Bandwidth is given and inputs or weights do not fit half of their memory; or layer or array are
            too large for their addresses.
    """
    sparse = settings.representation is not None
    found = operands(layer, sparse=sparse, block=settings.block, seed=settings.seed)
    schedule = Schedule(settings.array, found, settings.block)
    folds = math.prod(schedule.count)
    if (places := schedule.length * max(settings.array.rows, settings.array.columns)) > LARGEST:
        raise HardwareError(
            f"a fold of the layer `{layer.name}` is too large to lay its addresses out",
            got=f"{places} places",
            wanted=f"at most {LARGEST}",
            remedy="systolic.cycles tells its cycles from the sizes alone; or take a smaller array",
        )
    written = _written(schedule, settings)
    cycles = folds * schedule.length - 1 + sum(stall for _, stall in written.stalls)
    array = settings.array
    fold_cycles = schedule.length + (array.columns - 1) * (array.dataflow != "os")
    used, mapped = schedule.used().tolist(), schedule.mapped().tolist()
    return Simulated(
        layer=layer,
        cycles=cycles,
        stalls=cycles + 1 - folds * schedule.length,
        overall=layer.m * layer.n * layer.k * 100 / (cycles * array.units),
        mapping=sum(count / array.units for count in mapped) / folds * 100,
        compute=sum(count * schedule.spread[2] / (array.units * fold_cycles) for count in used) / folds * 100,
        accesses=_accesses(schedule, _requests(schedule, layer, sparse), written),
        traffic=(*_fetched(schedule, settings), written.traffic),
        storage=_storage(layer, found, settings) if sparse else None,
    )


def _requests(schedule: Schedule, layer: Layer, sparse: bool) -> tuple[float, float, float]:
    """Return requests of inputs, weights and outputs as SCALE-Sim 3.0.0 counts them, empty places among them."""
    down, across = schedule.count
    array, found = schedule.array, schedule.found
    inputs, weights, outputs = found.inputs.size, found.weights.size, found.outputs.size
    if array.dataflow == "is":
        return inputs, across * weights, down * outputs
    if array.dataflow == "os":  # the array's rows and columns are added to the writes of every fold
        return across * inputs, down * weights, outputs + down * across * (array.rows + array.columns)
    if schedule.block is not None:
        streamed = (len(found.whole) + array.rows - 1) * array.rows * schedule.block
        return down * across * streamed, weights, down * outputs
    if not sparse:
        return across * inputs, weights, down * outputs
    # A group of inputs is read once for each of the M / N rows of units that share it.
    sizes = np.minimum(array.rows, found.inputs.shape[1] - np.arange(down) * array.rows) * len(found.inputs)
    repeated = sum(size * (layer.group / layer.kept) for size in sizes.tolist() * across)
    return float(repeated), weights, down * outputs


def _accesses(
    schedule: Schedule, requests: tuple[float, float, float], written: Written
) -> tuple[Access, Access, Access]:
    """A request is answered in the next cycle; a write counts where the array has waited for it."""
    ends = [_ends(schedule, operand) for operand in OPERANDS]
    reads = [
        Access(begin + 1 + written.before(begin), end + 1 + written.before(end), values)
        for (begin, end), values in zip(ends[:2], requests, strict=False)
    ]
    begin, end = ends[2]
    outputs = Access(begin + written.before(begin + 1), end + written.before(end + 1), requests[2])
    return reads[0], reads[1], outputs


def _ends(schedule: Schedule, operand: str) -> tuple[int, int]:
    """Return the first and last cycle of an operand's requests; a last fold may be all padding."""
    last = -1
    while not len(lines := schedule.stream(operand, last).lines):
        last -= 1
    return int(schedule.stream(operand, 0).lines[0]), int(lines[-1])


def _written(schedule: Schedule, settings: Settings) -> Written:
    length = math.prod(schedule.count) * schedule.length
    bandwidth = settings.array.columns if settings.bandwidth is None else settings.bandwidth[2]
    return write_back(schedule.streams("outputs"), length, settings.kilobytes[2], bandwidth)


def _fetched(schedule: Schedule, settings: Settings) -> tuple[Traffic, Traffic]:
    found, sizes = schedule.found, settings.kilobytes
    inputs = found.inputs if settings.block is None else found.whole
    if settings.bandwidth is None:
        return (
            fetch(schedule.streams("inputs"), inputs, sizes[0]),
            fetch(schedule.streams("weights"), found.weights, sizes[1]),
        )
    places = _places(schedule.array, inputs, found)
    held = [int((values != NONE).sum()) for values in (inputs, found.weights)]
    each = [
        fetch_ahead(places[i], held[i], sizes[i], settings.bandwidth[i], name)
        for i, name in enumerate(("inputs", "weights"))
    ]
    return each[0], each[1]


def _places(array: SystolicArray, inputs: np.ndarray, found: Operands) -> tuple[int, int]:
    """Places of all folds, those that fill the last ones up among them: inputs, weights."""
    up = lambda size, step: -(-size // step) * step  # noqa: E731
    (m, reduction), (kept, n) = inputs.shape, found.weights.shape
    return {
        "os": (reduction * up(m, array.rows), kept * up(n, array.columns)),
        "ws": (m * up(reduction, array.rows), kept * up(n, array.columns)),
        "is": (reduction * up(m, array.columns), n * up(reduction, array.rows)),
    }[array.dataflow]


def _storage(layer: Layer, found: Operands, settings: Settings) -> Storage:
    """SCALE-Sim's counts, in values: an index is as large as a value, but in "ellpack_block"."""
    original, kept = found.mask.size, int(found.mask.sum())
    if settings.representation == "ellpack_block":
        metadata = found.weights.size * math.ceil(math.log2(layer.group)) / WORD
        return Storage(original, found.weights.size + metadata, metadata)
    lines = found.mask.shape[0 if settings.representation == "csr" else 1] + 1
    return Storage(original, 2 * kept + lines, kept + lines)


def simulated(layers: tuple[Layer, ...], settings: Settings) -> Iterator[Simulated]:
    """Report layers one after the other.

    Raises:
        HardwareError: As `simulate`, the layer named.
    """
    for layer in layers:
        try:
            yield simulate(layer, settings)
        except HardwareError as error:
            raise error.for_layer(layer.name) from None
