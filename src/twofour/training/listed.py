"""A list of batches in place of a loader: what is taken of it in part is spread over it.

A loader that shuffles shows data of all kinds in its first batches. A list keeps its order: of one that is sorted by
class, the first batches are of one class.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from twofour.calibration import Batch
from twofour.calibration.batches import part, picked, pieces, spread
from twofour.training import randomness
from twofour.training.batches import pair

PART, PIECE = 8, 16
"""Samples of a batch that judge at least, and that calibrate before other batches have given as many."""
GOLDEN = 2654435769
"""2**32 over the golden ratio."""


def is_list(loader: object) -> bool:
    """Whether batches stand at places in the order they are walked in; not where the loader walks in a way of its own.

    A DataLoader has no places, and one that shuffles itself has a walk of its own.
    """
    if isinstance(loader, str | bytes | Mapping | Tensor):
        return False
    walk = getattr(type(loader), "__iter__", None)
    placed = hasattr(type(loader), "__getitem__") and hasattr(type(loader), "__len__")
    return placed and walk in (None, list.__iter__, tuple.__iter__, Sequence.__iter__)


def judging(data: Any, seed: int, share: int, least: int, most: int) -> dict[int, Batch]:
    """Return what judges of a list of two batches or more, by places: parts of batches, of half of them at most.

    Args:
        data: The list.
        seed: Random numbers that it draws follow from it.
        share: One sample in so many judges,
        least: but so many at least, where half of the batches have them,
        most: and about so many at most.
    """
    half, found, samples, wanted = len(data) // 2, dict[int, Batch](), 0, 0
    for place, batch in _at(data, seed, spread(len(data))):
        wanted = wanted or min(most, max(least, math.ceil(len(data) / share) * batch.samples))
        size = max(PART, math.ceil(wanted / half))
        found[place] = part(mixed(batch), 0, size) if _is_divisible(batch) and batch.samples > size else batch
        samples += found[place].samples
        # Batches that cannot be parted give more than they have to, so that they are of as many kinds.
        if len(found) == half or samples >= most or (samples >= wanted and PART * len(found) >= wanted):
            return found
    return found


def calibrating(data: Any, seed: int, but: Collection[int]) -> Iterator[tuple[int, Batch]]:
    """Yield a list's batches with their places, `but` those at some: a piece of each in turn, until all is yielded."""
    places = [place for place in spread(len(data)) if place not in but]
    for turn in itertools.count():
        left = []
        for place, batch in _at(data, seed, places):
            cut = pieces(mixed(batch), PIECE) if _is_divisible(batch) else [batch]
            left += [place] if len(cut) > turn + 1 else []
            if turn < len(cut):  # not where an item has fewer samples than when it was read last, or none
                yield place, cut[turn]
        if not (places := left):
            return


def beside(data: Any, seed: int, judged: Mapping[int, int]) -> Iterator[tuple[Any, Any]]:
    """Yield as pairs what does not judge of a list, spread over it; `judged` are the samples that do, by places.

    Less than `PART` samples of a batch are left out: batch norms cannot train on one, nor well on a few.
    """
    for place, batch in _at(data, seed, spread(len(data))):
        taken = judged.get(place, 0)
        if batch.samples - taken >= (PART if taken else 1):
            batch = part(mixed(batch), taken, batch.samples) if taken else batch
            yield batch.inputs, batch.target


def mixed(batch: Batch) -> Batch:
    """Return a batch with its samples in an order of which each part is spread over it, however they are sorted.

    They come by the fractions of their places times the golden ratio. Those within a range are spread over all places,
    and over each so-many-th of them too, where even steps could fall on one class of several that take turns (Knuth,
    "The Art of Computer Programming", volume 3, section 6.4, theorem S).
    """
    order = (torch.arange(batch.samples, device="cpu") * GOLDEN % 2**32).argsort()
    return picked(batch, lambda tensor: tensor[order.to(tensor.device)])


def _at(data: Any, seed: int, places: Iterable[int]) -> Iterator[tuple[int, Batch]]:
    """Yield the batches of a list at places; random numbers that it draws follow from the seed."""
    randomness.seed_loader(data, seed, 0)
    stream = randomness.Stream(randomness.derive(seed, 0, "data"))
    for place in places:
        with stream:
            item = data[place]
        yield place, Batch(*pair(item))


def _is_divisible(batch: Batch) -> bool:
    """Whether a batch can be cut by samples with its target, all of whose tensors have a row for each."""
    targets = [] if batch.target is None else tree_leaves(batch.target)
    rows = [leaf.shape[0] if isinstance(leaf, Tensor) and leaf.ndim else 0 for leaf in targets]
    return not batch.whole and all(count == batch.samples for count in rows)
