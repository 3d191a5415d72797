"""waiting: when the array stands still, for operands that are not fetched yet or for outputs that find no room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from twofour.hardware.systolic.memory import LATENCY, Ahead, Traffic
from twofour.hardware.systolic.operands import Addresses
from twofour.hardware.systolic.streams import Stream

_SETTLED = 4
"""Fetches of a miss after which two of them add the time of two, whatever came before: the wait alternates."""


@dataclass
class Waiting:
    """Cycles in which the array stands still, by line, a line being a cycle that it works.

    Attributes:
        traffic: Of the outputs.
        lines: Lines at which it waits, rising.
        waited: Cycles waited before each of them, and in all at the end.
        own: How much later than the line each operand was served, (inputs, weights, outputs).
    """

    traffic: Traffic = Traffic(0, 0, 0)  # noqa: RUF009 - frozen
    lines: list[int] = field(default_factory=list)
    waited: list[int] = field(default_factory=lambda: [0])
    own: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def total(self) -> int:
        """All cycles waited."""
        return self.waited[-1]

    def note(self, line: int, own: tuple[int, int, int]) -> None:
        """Let the array wait as long as the last operand at a line."""
        self.lines.append(line)
        self.own.append(own)
        self.waited.append(self.total + max(own))

    def served(self, line: int, operand: int) -> int:
        """Return the cycle at which an operand's request of a line is served, a hit taking none."""
        at = int(np.searchsorted(self.lines, line))
        here = at < len(self.lines) and self.lines[at] == line
        return line + self.waited[at] + (self.own[at][operand] if here else 0)


def wait(
    outputs: Iterable[Stream], length: int, kilobytes: int, bandwidth: int, reads: Sequence[Ahead] = ()
) -> Waiting:
    """Work through a layer's lines; half of the outputs' memory drains at once when more than a half is filled.

    Args:
        outputs: What each fold writes.
        length: Cycles of the layer without waiting.
        kilobytes: Size of the outputs' memory.
        bandwidth: Values a cycle to the main memory.
        reads: Fetches of inputs and weights; none where they never miss.
    """
    found = Waiting()
    writer = _Writer(np.concatenate([stream.lines for stream in outputs]), _Drained(kilobytes * 1024, bandwidth), found)
    misses: list[dict[int, int]] = [{} for _ in reads]
    for read, missed in zip(reads, misses, strict=True):  # an operand may miss several times in one line
        for line, fetches in read.misses:
            missed[line] = missed.get(line, 0) + fetches
    fetched = [0] * len(reads)
    for line in sorted(set().union(*misses)):
        writer.advance(line)
        late = [0, 0]
        for index, (read, missed) in enumerate(zip(reads, misses, strict=True)):
            if line in missed:
                late[index] = _late(read, line + found.total, fetched[index], missed[line])
                fetched[index] += missed[line]
        found.note(line, (late[0], late[1], writer.line(line)))
    writer.advance(length)
    found.traffic = writer.memory.end(found.served(length - 1, 2))
    return found


def _late(read: Ahead, cycle: int, before: int, fetches: int) -> int:
    """Return how late an operand is served that waits for some fetches; SCALE-Sim adds the wait for each of them twice.

    Where a fetch has ended long ago the operand is early: its trace says so, and the array does not wait.
    """
    late = LATENCY
    skipped = max(0, fetches - _SETTLED) // 2 * 2
    for step in range(1, fetches - skipped + 1):
        at = step + skipped if step > _SETTLED else step
        wait = read.done(before + at) - cycle - late
        late += wait + max(wait, 0)
        if step == _SETTLED:
            late += skipped * (read.done(1) - read.done(0))
    return late - LATENCY


class _Writer:
    """Writes of the layer, followed line by line only where the memory drains or is full."""

    def __init__(self, lines: Addresses, memory: _Drained, found: Waiting) -> None:
        self.lines, self.memory, self.found = lines, memory, found
        self.stored = 0

    def store(self, end: int) -> None:
        self.memory.store(end - self.stored)
        self.stored = end

    def advance(self, line: int) -> None:
        """Write all that comes before a line."""
        end = int(np.searchsorted(self.lines, line))
        while True:
            free = int(np.searchsorted(self.lines, self.memory.busy - self.found.total))
            free = max(self.stored, free)  # the first value that finds the port free
            full = max(self.stored, self.stored + self.memory.free - 1)
            event = full if full < free else max(free, self.stored + self.memory.free - self.memory.active)
            if event >= end:
                self.store(end)
                return
            at = int(self.lines[event])
            self.store(max(self.stored, int(np.searchsorted(self.lines, at))))
            if late := self.line(at):
                self.found.note(at, (0, 0, late))

    def line(self, line: int) -> int:
        """Write the values of one line; return how long the last of them waits."""
        end, late = int(np.searchsorted(self.lines, line, side="right")), 0
        while True:
            cycle = line + self.found.total + late
            busy = cycle < self.memory.busy
            left = self.memory.free - 1 if busy else self.memory.free - self.memory.active
            event = self.stored + max(0, left)
            if event >= end:
                self.store(end)
                return late
            self.store(event + 1)
            if busy:
                late += self.memory.busy - cycle
            else:
                self.memory.drain(cycle)


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

    def end(self, cycle: int) -> Traffic:
        """Write all that is left from a cycle on; return the whole traffic."""
        self.flush()
        while self.lines:
            cycle = self.drain(cycle) + 1
        return Traffic(self.start, self.stop, self.values)
