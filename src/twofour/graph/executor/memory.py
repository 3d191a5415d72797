"""One arena for memories that live one after the other: where each begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Bytes: a cache line, and torch's own."""


@dataclass(frozen=True)
class Lifetime:
    """When something is needed.

    Attributes:
        nbytes: Its size.
        first: The call that writes it.
        last: The last call that reads it; it is there until that one has ended.
    """

    nbytes: int
    first: int
    last: int


def offsets(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Return where in an arena each begins, and the arena's bytes.

    The largest are placed first, each at the lowest offset that nothing of its time has: "greedy by size" of Pisarchyk
    and Lee, "Efficient Memory Management for Deep Neural Net Inference" (arXiv 2001.03288).

    Args:
        lifetimes: In any order.
    """
    found = [0] * len(lifetimes)
    placed: list[int] = []
    for index in sorted(range(len(lifetimes)), key=lambda i: (-lifetimes[i].nbytes, lifetimes[i].first)):
        one = lifetimes[index]
        beside = [i for i in placed if lifetimes[i].first <= one.last and one.first <= lifetimes[i].last]
        begin = 0
        for other in sorted(beside, key=lambda i: found[i]):
            if begin + one.nbytes <= found[other]:
                break
            begin = max(begin, _rounded(found[other] + lifetimes[other].nbytes))
        found[index] = begin
        placed.append(index)
    return found, max((begin + one.nbytes for begin, one in zip(found, lifetimes, strict=True)), default=0)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
