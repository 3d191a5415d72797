"""memory: how the memories beside the array fetch and write back, as SCALE-Sim 3.0.0 models them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twofour.errors import HardwareError
from twofour.hardware.systolic.operands import Addresses
from twofour.hardware.systolic.streams import Stream

SETS = 100
"""Parts of a memory; half of them are read while the other half is fetched (SCALE-Sim's constants, as those below)."""
LATENCY, ESTIMATED = 1, 10
"""Cycles until memory answers; values a cycle at which the first fetch of estimated bandwidth runs."""


@dataclass(frozen=True)
class Traffic:
    """What passes between a memory beside the array and the main one: first and last cycle, and values."""

    start: int
    stop: int
    values: int

    @property
    def rate(self) -> float:
        """Values a cycle from the first to the last."""
        return self.values / (self.stop - self.start + 1)


def fetch(streams: Iterable[Stream], addresses: Addresses, kilobytes: int) -> Traffic:
    """Return the fetches of an operand where bandwidth is whatever no cycle waits for (InterfaceBandwidth: CALC).

    New addresses fill sets in the order in which they are first asked for; when the half that is read and the one
    fetched meanwhile are full, the older half's addresses are forgotten.

    Args:
        streams: What each fold asks for.
        addresses: All that they may ask for, in any order.
        kilobytes: Size of the memory.
    """
    space = int(addresses.max()) + 1
    fetched = _Fetched(kilobytes * 1024 // SETS, SETS // 2, np.full(space, -1, np.int64))
    distinct = np.zeros(space + 1, bool)
    distinct[addresses.reshape(-1)] = True  # NONE is the last place
    if (count := int(distinct[:-1].sum())) < fetched.half * fetched.size:
        fetched.held = count
        return fetched.end()
    for stream in streams:
        fetched.take(stream)
    return fetched.end()


class _Fetched:
    """The state of one memory while requests arrive."""

    def __init__(self, size: int, half: int, set_of: NDArray[np.int64]) -> None:
        self.size, self.half, self.set_of = size, half, set_of
        self.first_seen = np.empty_like(set_of)
        self.held = 0  # addresses ever put into a set
        self.oldest = 0  # first set that is still known
        self.first: int | None = None
        self.start: int | None = None
        self.window = (-2, -1)
        self.values = 0
        self.stop = 0

    def take(self, stream: Stream) -> None:
        lines, addresses = stream.lines, stream.addresses
        if len(lines) and self.first is None:
            self.first = int(lines[0])
        at = 0
        while at < len(addresses):
            room = (self.oldest + self.half) * self.size - self.held
            part = addresses[at : at + 4 * room]
            new = self._new(part)
            if len(new) >= room:
                new = new[:room]
            chosen = part[new]
            self.set_of[chosen] = (self.held + np.arange(len(new))) // self.size
            self.held += len(new)
            if len(new) < room:
                at += len(part)
                continue
            at += int(new[-1]) + 1
            self._turn(int(lines[at - 1]))

    def _new(self, part: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where addresses that are not held are first asked for."""
        missed = np.nonzero(self.set_of[part] < self.oldest)[0]
        asked = part[missed]
        self.first_seen[asked[::-1]] = missed[::-1]
        return missed[self.first_seen[asked] == missed]

    def _turn(self, line: int) -> None:
        """The sets known are full: fetch half a memory, forget the older half."""
        values = self.half * self.size
        if self.start is None:
            assert self.first is not None
            end = self.first - 1 - LATENCY
            self._fetch(end - -(-values // ESTIMATED) + 1, end, values)
        else:
            self._fetch(*self.window, values)
        self.window = (self.stop - LATENCY + 1, line)
        self.oldest += self.half

    def _fetch(self, start: int, end: int, values: int) -> None:
        self.start = start + LATENCY if self.start is None else self.start
        self.stop = end + LATENCY
        self.values += values

    def end(self) -> Traffic:
        """Fetch what no full half has brought."""
        if self.start is None:
            sets = -(-self.held // self.size)
            end = -1 - LATENCY
            self._fetch(end - -(-sets * self.size // ESTIMATED) + 1, end, self.held)
        else:
            self._fetch(*self.window, self.held - self.oldest * self.size)
        assert self.start is not None
        return Traffic(self.start, self.stop, self.values)


def fetch_ahead(places: int, values: int, kilobytes: int, bandwidth: int, what: str) -> Traffic:
    """Return the fetch of an operand at a given bandwidth, all of it before the first cycle.

    Args:
        places: Places of the operand's folds, those without a value among them.
        values: Values among them.
        kilobytes: Size of the memory.
        bandwidth: Values a cycle.
        what: The operand, for the error.

    Raises:
        HardwareError: The operand does not fit half of the memory: stalls for reading are not modelled.
    """
    total = kilobytes * 1024
    part, active = -(-total // SETS), -(-total // 2)
    if values // part + 1 > -(-active // part):
        raise HardwareError(
            f"the {what} do not fit half of their memory, and stalls for reading are not modelled",
            got=f"{values} values, {kilobytes} kB",
            wanted=f"at most {(-(-active // part)) * part - 1} values with InterfaceBandwidth: USER",
            remedy="InterfaceBandwidth: CALC tells the bandwidth at which nothing waits; or a larger memory",
        )
    lines = min(-(-active // bandwidth), -(-places // bandwidth))
    return Traffic(-lines, -1, lines * bandwidth)


@dataclass(frozen=True)
class Written:
    """Writes of the outputs: their traffic, and the cycles (line, how many) in which the array waits for it."""

    traffic: Traffic
    stalls: tuple[tuple[int, int], ...]

    def before(self, line: int) -> int:
        """Cycles waited before a line."""
        return sum(cycles for at, cycles in self.stalls if at < line)


def write_back(streams: Iterable[Stream], length: int, kilobytes: int, bandwidth: int) -> Written:
    """Return the writes of outputs: half of the memory drains at once when more than a half is filled.

    Args:
        streams: What each fold writes.
        length: Cycles of the layer without stalls.
        kilobytes: Size of the memory.
        bandwidth: Values a cycle to the main memory.
    """
    lines = np.concatenate([stream.lines for stream in streams])
    memory = _Drained(kilobytes * 1024, bandwidth)
    stored, waited = 0, 0
    stalls: list[tuple[int, int]] = []
    while True:
        free = max(stored, int(np.searchsorted(lines, memory.busy - waited)))  # the first that finds the port free
        full = max(stored, stored + memory.free - 1)
        event = full if full < free else max(free, stored + memory.free - memory.active)
        if event >= len(lines):
            break
        memory.store(event + 1 - stored)
        stored, line = event + 1, int(lines[event])
        if full < free:
            stalls.append((line, memory.busy - line - waited))
            waited += stalls[-1][1]
        else:
            memory.drain(line + waited)
    memory.store(len(lines) - stored)
    cycle = length - 1 + waited
    memory.flush()
    while memory.lines:
        cycle = memory.drain(cycle) + 1
    return Written(Traffic(memory.start, memory.stop, memory.values), tuple(stalls))


class _Drained:
    """The state of the memory of the outputs: values are gathered into lines as wide as the port."""

    def __init__(self, total: int, bandwidth: int) -> None:
        self.bandwidth, self.free = bandwidth, total
        self.active = -(-total // 2)
        self.size = total - self.active
        self.loose = 0  # values in no line yet
        self.lines: list[tuple[int, int]] = []  # (count, values missing in the last)
        self.busy = 0
        self.start, self.stop, self.values = 1 << 62, 0, 0

    def store(self, values: int) -> None:
        self.free -= values
        self.loose += values

    def flush(self) -> None:
        """Put loose values into lines, the last one short."""
        if self.loose:
            count = -(-self.loose // self.bandwidth)
            self.lines.append((count, count * self.bandwidth - self.loose))
        self.loose = 0

    def drain(self, cycle: int) -> int:
        """Write up to half of the memory from a cycle on; return the last cycle."""
        self.flush()
        left = -(-self.size // self.bandwidth)
        taken, short = 0, 0
        while left and self.lines:
            count, missing = self.lines.pop(0)
            used = min(count, left)
            if used < count:
                self.lines.insert(0, (count - used, missing))
            taken, left, short = taken + used, left - used, missing if used == count else 0
        values = taken * self.bandwidth - short  # a short line within is counted whole, as SCALE-Sim does
        self.free += values
        self.values += values
        self.start, self.stop = min(self.start, cycle), max(self.stop, cycle + taken - 1)
        self.busy = cycle + taken - 1
        return self.busy
