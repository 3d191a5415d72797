"""The search over groups of stripes in NumPy and float64: what the native one is compared with. Readable, slow.

Source: Pool and Yu 2021, "Channel Permutations for N:M Sparsity" (NeurIPS), section 4, as NVIDIA apex implements it; an
escape is ours: six random swaps, undone unless the descent after them ends at least as high.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

SWAPS = 6
SMALLEST = 1e-6
"""A gain below this share of what a group keeps is rounding."""


def kept(scores: NDArray[np.floating], n: int, m: int) -> float:
    """Return the sum of the `n` largest of every `m` consecutive scores (rows, in), in float64."""
    groups = scores.astype(np.float64).reshape(len(scores), -1, m)
    return float(np.partition(groups, m - n, axis=2)[:, :, m - n :].sum())


def partitions(columns: tuple[int, ...], m: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield every way to deal `columns` into sets of `m`, the order as it is first."""
    if not columns:
        yield ()
        return
    first, rest = columns[0], columns[1:]
    for companions in combinations(rest, m - 1):
        others = tuple(column for column in rest if column not in companions)
        for dealt in partitions(others, m):
            yield ((first, *companions), *dealt)


class SplitMix64:
    """Pseudo-random numbers, those of the native search (Steele, Lea and Flood 2014)."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def below(self, count: int) -> int:
        """Return a number in [0, count)."""
        mask = 2**64 - 1
        self.state = (self.state + 0x9E3779B97F4A7C15) & mask
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return (z ^ (z >> 31)) % count


def refine(
    scores: NDArray[np.floating],
    order: NDArray[np.int64],
    n: int,
    m: int,
    window: int,
    escapes: int = 0,
    seed: int = 0,
) -> NDArray[np.int64]:
    """Return a better order: try every way to deal the columns of each `window` / m stripes, best first, and again.

    Args:
        scores: (rows, in), not negative.
        order: New position -> column.
        n: Values kept of each group.
        m: Values of a group.
        window: Columns looked at together: 8 and 12 are usual for 2:4.
        escapes: How often to leave the local optimum.
        seed: Of the escapes.
    """
    search = _Search(scores.astype(np.float64), order.reshape(-1, m).copy(), n, window // m)
    random = SplitMix64(seed)
    search.descend()
    best, gains = search.stripes.copy(), dict(search.gains)
    for _ in range(escapes if len(search.groups) else 0):
        lost = sum(search.leave(random) for _ in range(SWAPS)) - search.descend()
        if lost <= 0:
            best, gains = search.stripes.copy(), dict(search.gains)
        else:
            search.stripes, search.gains = best.copy(), dict(gains)
    return best.ravel()


class _Search:
    def __init__(self, scores: NDArray[np.float64], stripes: NDArray[np.int64], n: int, parts: int) -> None:
        self.scores, self.stripes, self.n, self.parts = scores, stripes, n, parts
        self.m = stripes.shape[1]
        self.groups = list(combinations(range(len(stripes)), parts))
        self.ways = list(partitions(tuple(range(parts * self.m)), self.m))
        self.subsets = {subset: 0.0 for way in self.ways for subset in way}
        self.gains: dict[tuple[int, ...], float] = {}
        self.changed = set(range(len(stripes)))

    def look(self, group: tuple[int, ...]) -> tuple[float, float, int]:
        """Gain of the best way to deal a group's columns, what the group keeps now, and which way that is."""
        columns = self.scores[:, self.stripes[list(group)].ravel()]
        sums = {subset: kept(columns[:, list(subset)], self.n, self.m) for subset in self.subsets}
        totals = [sum(sums[subset] for subset in way) for way in self.ways]
        best = int(np.argmax(totals))
        gain = totals[best] - totals[0]
        return (0.0, totals[0], 0) if gain <= SMALLEST * totals[0] else (gain, totals[0], best)

    def descend(self) -> float:
        total = 0.0
        while True:
            for group in self.groups:
                if self.changed.intersection(group):
                    self.gains[group] = self.look(group)[0]
            self.changed = set()
            gaining = sorted((group for group in self.groups if self.gains[group] > 0), key=lambda g: -self.gains[g])
            for group in gaining:
                if not self.changed.intersection(group):
                    total += self.gains[group]
                    columns = self.stripes[list(group)].ravel()
                    self.stripes[list(group)] = columns[np.array(self.ways[self.look(group)[2]])]
                    self.changed |= set(group)
            if not gaining:
                return total

    def leave(self, random: SplitMix64) -> float:
        group = self.groups[random.below(len(self.groups))]
        first = random.below(self.parts)
        second = (first + 1 + random.below(self.parts - 1)) % self.parts
        before = self.look(group)[1]
        a, b = (group[first], random.below(self.m)), (group[second], random.below(self.m))
        self.stripes[a], self.stripes[b] = self.stripes[b], self.stripes[a]
        self.changed |= {group[first], group[second]}
        return before - self.look(group)[1]
