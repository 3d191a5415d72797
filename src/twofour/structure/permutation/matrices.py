"""The matrices that a group of channels is searched by: the scores of all its consumers, one above the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.layers import PrunableWeight
from twofour.patterns import NM, PairedNM, Pattern
from twofour.structure.coupling import Group, Place
from twofour.structure.coupling.group import along

_MOST_VALUES = 1 << 28  # 1 GB of scores a block; of more, every k-th row stands for all


@dataclass(frozen=True)
class Consumer:
    """A weight that sums over a group's channels.

    Attributes:
        weight: The weight.
        pattern: The pattern it will carry.
        scores: Importance of each value, of the weight's shape, not negative.
    """

    weight: PrunableWeight
    pattern: Pattern
    scores: Tensor


def matrices(group: Group, consumers: Sequence[Consumer]) -> tuple[Pattern, list[Tensor]] | str:
    """Return the pattern and, for each block of the group, the scores (rows, size) of its consumers; or why not.

    Consumers of another pattern than most move along without a say.
    """
    sizes: dict[Pattern, int] = {}
    for consumer in consumers:
        if not isinstance(consumer.pattern, NM | PairedNM):
            continue
        sizes[consumer.pattern] = sizes.get(consumer.pattern, 0) + consumer.scores.numel()
    if not sizes:
        return f"no order is searched for the pattern {consumers[0].pattern.name}"
    pattern = max(sizes, key=sizes.__getitem__)
    if group.size % pattern.group:
        return f"{group.size} channels are no multiple of {pattern.group}"
    found: list[list[Tensor]] = [[] for _ in range(group.blocks)]
    reason = ""
    for consumer in consumers:
        if consumer.pattern != pattern:
            continue
        for place in group.places_of(consumer.weight.name):
            parts = _blocks(consumer, place, group, pattern.group)
            if isinstance(parts, str):
                reason = parts
                continue
            for block, rows in zip(found, parts, strict=True):
                block += rows
    if not all(found):
        return reason or "no weight sums over these channels"
    return pattern, [_capped(torch.cat(parts)) for parts in found]


def _blocks(consumer: Consumer, place: Place, group: Group, m: int) -> list[list[Tensor]] | str:
    """Cut the scores of a weight into the columns (and rows) of each block."""
    weight, scores = consumer.weight, consumer.scores
    shape, ndim = scores.shape, scores.ndim
    last = weight.reduction_last(scores)
    matrix = last.flatten(0, -2)

    def line(values: Tensor) -> Tensor:
        lasting = weight.reduction_last(values.expand(shape))
        return lasting[(0,) * (lasting.ndim - 1)]

    channels = line(along(place.index, place.axis, ndim))
    found: list[list[Tensor]] = [[] for _ in range(group.blocks)]
    if channels.numel() < 2 or not bool((channels != channels[0]).any()):
        return found  # along the rows alone: no column depends on the order
    # The block of a value is the sum of a number of its row and one of its column.
    blocks = place.blocks(ndim)
    of_column = line(blocks)
    of_row = weight.reduction_last(blocks.expand(shape))[..., 0].flatten()
    of_column = of_column - of_column[0]
    for offset in of_column[channels >= 0].unique().tolist():
        columns = ((channels >= 0) & (of_column == offset)).nonzero().flatten().view(-1, group.size)
        ordered = torch.equal(channels[columns], torch.arange(group.size, device="cpu").expand_as(columns))
        consecutive = bool((columns.diff(dim=1) == 1).all()) and not bool((columns[:, 0] % m).any())
        if not ordered or not consecutive:
            return f"`{weight.name}` holds the channels apart: no group of {m} lies within them"
        for number in of_row.unique().tolist():
            mine = of_row == number
            rows = matrix if bool(mine.all()) else matrix[mine]
            found[number + offset] += [rows[:, run] for run in columns]
    return found


def _capped(matrix: Tensor) -> Tensor:
    step = -(-matrix.numel() // _MOST_VALUES)
    return matrix[::step] if step > 1 else matrix
