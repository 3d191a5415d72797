"""The user's data in two parts, for calibration and for judging, and the example that is timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from twofour.calibration import Batch, pieces, take
from twofour.errors import DataError, integer_from

SEED = 0
HELD = 4
"""One sample in so many is held back at least; of more data than calibration takes, the rest up to `MOST_HELD`."""
MOST_HELD = 256
LEAST = 8
"""Samples below which there is nothing to hold back."""


@dataclass(frozen=True)
class Samples:
    """The user's data.

    Attributes:
        used: Batches for calibration.
        held: Batches that no step but the judging sees.
        said: In words, how many of each.
    """

    used: tuple[Batch, ...]
    held: tuple[Batch, ...]
    said: str

    @property
    def count(self) -> int:
        """Samples for calibration."""
        return _count(self.used)

    @property
    def calibration(self) -> list[Batch]:
        """The data that pruning and int8 ranges are made with."""
        return list(self.used)


def parted(model: nn.Module, data: Any, samples: int | Callable[[Batch], int]) -> Samples:
    """Hold a part of the data back, drawn by a fixed seed: whole batches where there are several, else parts of them.

    Args:
        model: Its forward tells pairs from arguments.
        data: As `twofour.prune` takes them.
        samples: Samples of calibration at most; or what tells the number when it is given each batch in turn.

    Raises:
        DataError: There are fewer than `LEAST` samples, or what `calibration.take` refuses.
    """
    if not callable(samples):
        remedy = "leave it out to use 128, as SparseGPT and Wanda do, and more of short ones"
        integer_from(1, "`samples` cannot be used", DataError, remedy, samples=samples)
    asked: list[int] = []

    def wanted(batch: Batch) -> int:
        asked.append(samples(batch) if callable(samples) else samples)
        return asked[-1] + MOST_HELD

    batches = take(model, data, wanted)
    most, total = asked[-1], _count(batches)
    if total < LEAST:
        raise DataError(
            "there are too few data to hold some of them back for judging",
            got=f"{total} samples",
            wanted=f"at least {LEAST}, of which one in {HELD} is held back",
            remedy="more inputs, as the model sees them where it works",
        )
    if len(batches) < HELD:  # a few large batches: each gives its share
        batches = [piece for batch in batches for piece in pieces(batch, max(1, batch.samples // (2 * HELD)))]
    if len(batches) < 2:
        raise _not_parted(batches[0])
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(SEED), device="cpu").tolist()
    count = max(1, round(len(batches) * max(1 / HELD, (total - most) / total)))
    held, used = ([batches[index] for index in sorted(part)] for part in (order[:count], order[count:]))
    taken = take(model, used, most)
    said = f"judged on {_count(held)} samples held back, calibrated on {_count(taken)} others"
    return Samples(tuple(taken), tuple(held), said)


def _not_parted(batch: Batch) -> DataError:
    return DataError(
        "the data cannot be parted to hold some of them back for judging",
        got=f"one batch: {batch.whole}",
        wanted="several batches, or one whose axes tell its samples",
        remedy="give smaller batches",
    )


def _count(batches: Sequence[Batch]) -> int:
    return sum(batch.samples for batch in batches)


def example_of(batches: Sequence[Batch], count: int) -> Any:
    """Return the inputs of `count` samples whose size is the median of all such groups; padding of all of them is cut.

    Raises:
        DataError: No batch has so many samples.
    """
    groups = [trimmed(piece.inputs) for batch in batches for piece in pieces(batch, count) if piece.samples == count]
    if not groups:
        raise DataError(
            f"no batch of the data has {count} samples",
            got=f"batches of at most {max(batch.samples for batch in batches)}",
            wanted="batches with as many samples as are to be timed in one call",
            remedy="ask for fewer (batch=1), or give larger batches",
        )
    return sorted(groups, key=_values)[len(groups) // 2]


def sizes_of(batches: Sequence[Batch], count: int) -> tuple[int, ...]:
    """Return the tokens of a small, a median and a large call of `count` samples: tenths of the data lie beyond."""
    groups = [piece.inputs for batch in batches for piece in pieces(batch, count) if piece.samples == count]
    sizes = sorted(tokens_of(trimmed(inputs)) for inputs in groups)
    return tuple(sorted({sizes[round(share * (len(sizes) - 1))] for share in (0.1, 0.5, 0.9)}))


def trimmed(inputs: Any) -> Any:
    """Return arguments without the places at the end that an attention mask hides in every sample."""
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return inputs
    seen = (mask != 0).any(0).nonzero()
    length = int(seen.max()) + 1 if len(seen) else mask.shape[1]
    alike = mask.shape
    return {
        name: value[:, :length].contiguous() if isinstance(value, Tensor) and value.shape[:2] == alike else value
        for name, value in inputs.items()
    }


def tokens_of(inputs: Any) -> int:
    """Return the tokens of one call, of ids (batch, tokens) or values (batch, tokens, width); else its samples."""
    first = next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    axes = 2 if first.ndim == 3 or (first.ndim == 2 and not first.is_floating_point()) else 1
    return math.prod(first.shape[:axes])


def _values(inputs: Any) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
