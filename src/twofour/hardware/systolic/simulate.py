"""simulate: what SCALE-Sim would report of a layer, from closed forms and from the addresses its folds ask for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from twofour.errors import HardwareError
from twofour.hardware.systolic.array import SystolicArray
from twofour.hardware.systolic.layer import Layer
from twofour.hardware.systolic.memory import LATENCY, Ahead, Traffic, fetch, fetch_ahead
from twofour.hardware.systolic.operands import LARGEST, Operands, operands, too_large
from twofour.hardware.systolic.settings import Settings
from twofour.hardware.systolic.streams import OPERANDS, Schedule
from twofour.hardware.systolic.waiting import Waiting, wait

WORD = 32
"""Bits of a value where SCALE-Sim counts the metadata of "ellpack_block"; everywhere else it is one."""


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
    accesses: tuple[Traffic, Traffic, Traffic]
    traffic: tuple[Traffic, Traffic, Traffic]
    storage: Storage | None

    @property
    def span(self) -> int:
        """Cycles from the first fetch to the last write."""
        return self.traffic[2].stop - min(self.traffic[0].start, self.traffic[1].start)


def simulate(layer: Layer, settings: Settings) -> Simulated:
    """Report a layer as SCALE-Sim 3.0.0 does, exactly.

    Raises:
        HardwareError: Layer or array are too large for their addresses, or the layer takes a single cycle.
    """
    sparse = settings.representation is not None
    found = operands(layer, sparse=sparse, block=settings.block, seed=settings.seed)
    schedule = Schedule(settings.array, found, settings.block)
    folds = math.prod(schedule.count)
    array, length = settings.array, folds * schedule.length
    _require_size(layer, array, schedule.length, length)
    fetched, ahead = _fetched(schedule, settings)
    outputs = settings.array.columns if settings.bandwidth is None else settings.bandwidth[2]
    waiting = wait(schedule.streams("outputs"), length, settings.kilobytes[2], outputs, ahead)
    cycles = waiting.served(length - 1, 2)
    fold_cycles = schedule.length + (array.columns - 1) * (array.dataflow != "os")
    used, mapped = schedule.used().tolist(), schedule.mapped().tolist()
    return Simulated(
        layer=layer,
        cycles=cycles,
        stalls=waiting.total,
        overall=layer.m * layer.n * layer.k * 100 / (cycles * array.units),
        mapping=sum(count / array.units for count in mapped) / folds * 100,
        compute=sum(count * schedule.spread[2] / (array.units * fold_cycles) for count in used) / folds * 100,
        accesses=_accesses(schedule, _requests(schedule, layer, sparse), waiting),
        traffic=(*fetched, waiting.traffic),
        storage=_storage(layer, found, settings) if sparse else None,
    )


def _require_size(layer: Layer, array: SystolicArray, fold: int, length: int) -> None:
    if (places := fold * max(array.rows, array.columns)) > LARGEST:
        raise too_large(f"a fold of the layer `{layer.name}`", f"{places} places", "take a smaller array")
    if length == 1:  # SCALE-Sim divides by the index of the last cycle, 0
        raise HardwareError(
            f"the layer `{layer.name}` is too small for a report",
            got="one cycle",
            wanted="two cycles or more, over which shares and rates are taken",
            remedy="leave its row out",
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
    schedule: Schedule, requests: tuple[float, float, float], waiting: Waiting
) -> tuple[Traffic, Traffic, Traffic]:
    """An operand is there in the cycle after it is asked for, an output in the cycle that writes it."""
    found = []
    for index, operand in enumerate(OPERANDS):
        latency = LATENCY if operand != "outputs" else 0
        first, last = (waiting.served(line, index) + latency for line in _ends(schedule, operand))
        found.append(Traffic(first, last, requests[index]))
    return found[0], found[1], found[2]


def _ends(schedule: Schedule, operand: str) -> tuple[int, int]:
    """Return the first and last cycle of an operand's requests; a last fold may be all padding."""
    last = -1
    while not len(lines := schedule.stream(operand, last).lines):
        last -= 1
    return int(schedule.stream(operand, 0).lines[0]), int(lines[-1])


def _fetched(schedule: Schedule, settings: Settings) -> tuple[tuple[Traffic, Traffic], tuple[Ahead, ...]]:
    """Return the fetches of inputs and weights, and where bandwidth is given, at which lines they are late."""
    found, sizes = schedule.found, settings.kilobytes
    matrices = (found.inputs if settings.block is None else found.whole, found.weights)
    if settings.bandwidth is None:
        each = [fetch(schedule.streams(OPERANDS[i]), matrices[i], sizes[i]) for i in range(2)]
        return (each[0], each[1]), ()
    places = _places(schedule.array, matrices[0], found)
    ahead = tuple(
        fetch_ahead(
            *(schedule.streams(OPERANDS[i]), schedule.order(OPERANDS[i]), places[i]),
            *(sizes[i], settings.bandwidth[i], int(matrices[i].max()) + 1),
        )
        for i in range(2)
    )
    return (ahead[0].traffic(), ahead[1].traffic()), ahead


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
