"""memory: how the memories beside the array fetch their operands, as SCALE-Sim 3.0.0 models it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twofour.hardware.systolic.operands import Addresses
from twofour.hardware.systolic.streams import Stream

SETS = 100
"""Parts of a memory; half of them are read while the other half is fetched (SCALE-Sim's constants, as those below)."""
LATENCY, ESTIMATED = 1, 10
"""Cycles until memory answers; values a cycle at which the first fetch of estimated bandwidth runs."""


@dataclass(frozen=True)
class Traffic:
    """Requests of one operand, at the memory beside the array or at the main one: first and last cycle, and values."""

    start: int
    stop: int
    values: float

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


@dataclass(frozen=True)
class Ahead:
    """Fetches of an operand at a given bandwidth, in the order in which folds ask for it first.

    Attributes:
        lines: Cycles of the first fetch, which ends before the first line; of each later one.
        bandwidth: Values a cycle.
        misses: (line, fetches): lines that ask for what the memory does not hold yet, and how many fetches bring it.
    """

    lines: tuple[int, int]
    bandwidth: int
    misses: tuple[tuple[int, int], ...]

    def done(self, fetches: int) -> int:
        """Return the cycle in which a number of later fetches has ended."""
        return fetches * (self.lines[1] + 1) - 1

    def traffic(self) -> Traffic:
        """Return all fetches together."""
        count = sum(fetches for _, fetches in self.misses)
        values = (self.lines[0] + count * self.lines[1]) * self.bandwidth
        return Traffic(-self.lines[0], self.done(count), values)


def fetch_ahead(
    streams: Iterable[Stream], order: Addresses, places: int, kilobytes: int, bandwidth: int, space: int
) -> Ahead:
    """Follow an operand's requests through a memory filled in a fixed order, half of it while the other is read.

    Args:
        streams: What each fold asks for.
        order: Addresses as they are fetched.
        places: Places of the operand's folds, those without a value among them.
        kilobytes: Size of the memory.
        bandwidth: Values a cycle.
        space: One more than the largest address.
    """
    total = kilobytes * 1024
    active = -(-total // 2)
    lines = (min(-(-active // bandwidth), -(-places // bandwidth)), -(-(total - active) // bandwidth))
    window = _Window(order, total, active, space)
    misses: list[tuple[int, int]] = []
    if window.ahead:
        for stream in streams:
            misses += window.misses(stream)
    return Ahead(lines, bandwidth, tuple(misses))


class _Window:
    """Which parts of an operand a memory holds: a window over parts in the order of fetching, round and round."""

    def __init__(self, order: Addresses, total: int, active: int, space: int) -> None:
        size = -(-total // SETS)
        self.parts = [np.unique(order[at : at + size]) for at in range(0, len(order) + 1, size)]
        self.active = min(len(self.parts), -(-active // size))
        self.ahead = min(len(self.parts) - self.active, -(-(total - active) // size))
        self.start = 0
        self.held = np.zeros(space, np.int64)
        self._count(1)
        if self.ahead:  # which parts hold an address: those of the addresses before it stand before its own
            where = np.repeat(np.arange(len(self.parts)), [len(part) for part in self.parts])
            addresses = np.concatenate(self.parts)
            self.where = where[np.argsort(addresses, kind="stable")]
            self.first = np.concatenate(([0], np.cumsum(np.bincount(addresses, minlength=space))))

    def turn(self, address: int) -> int:
        """Give the oldest parts up for those fetched meanwhile until an address is held; return how many times over.

        The window moves by no more than its width, so the first part that it reaches tells.
        """
        count = len(self.parts)
        places = self.where[self.first[address] : self.first[address + 1]]
        away = int(((places - self.start) % count).min())
        turns = -(-(away - self.active + 1) // self.ahead)
        self._count(-1)
        self.start = (self.start + turns * self.ahead) % count
        self._count(1)
        return turns

    def _count(self, by: int) -> None:
        for index in range(self.start, self.start + self.active):
            self.held[self.parts[index % len(self.parts)]] += by

    def misses(self, stream: Stream) -> Iterator[tuple[int, int]]:
        """Tell at which lines, and how often, the window turns until it holds what is asked for."""
        at, span = 0, 1 << 10
        while at < len(stream.addresses):
            missed = self.held[stream.addresses[at : at + span]] == 0
            if not missed.any():
                at, span = at + span, 2 * span
                continue
            at, span = at + int(missed.argmax()), 1 << 10
            yield int(stream.lines[at]), self.turn(int(stream.addresses[at]))
