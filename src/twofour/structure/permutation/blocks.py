"""Search for orders of channels in which whole blocks hold more of the scores.

For a block pattern both axes count: a group's channels are columns of the weights that sum over them and rows of those
that make them. With the blocks that stay held fixed, what is kept is a sum over channels of what each adds in its
place, so that the best order is a linear assignment; then the blocks that stay are chosen anew. Neither step keeps less
(block coordinate ascent, as in the clustering of rows and columns by Dhillon, Mallela and Modha 2003, but that clusters
have a size). Groups take turns, since rows and columns of one weight belong to different ones. The search runs from the
order as it is and from channels sorted by what they hold, and the better end is taken.

What is kept is measured in squares of the scores: the share of |W|^2 that a mask leaves, which is one minus the square
of the relative error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twofour import native
from twofour.patterns import Block
from twofour.structure.coupling import Group, Place
from twofour.structure.coupling.group import along
from twofour.structure.permutation.matrices import Consumer
from twofour.structure.permutation.report import Gain

CHANNELS = 256
"""Channels of one assignment, whose cost grows with the cube: of more, random parts take turns."""

ROUNDS, SWEEPS = 3, 4
"""Assignments of a group in its turn, and turns: further ones gained less than 1e-4 of the scores of MiniLM."""

SMALLEST = 1e-6
"""A gain below this share of what is kept is rounding: assignments are in float32."""

LEAST = 1e-4
"""A sweep that gains less of the scores is the last one."""


@dataclass(frozen=True, eq=False)
class _Member:
    """A weight that holds a group's channels along one axis: positions (blocks, size, occurrences)."""

    name: str
    axis: int
    positions: Tensor


class BlockSearch:
    """The scores of all weights with blocks, in the orders found so far.

    Args:
        consumers: The weights to be pruned, those of other patterns included, which have no say.
        groups: The channels that move together.
        seed: Of the parts that are assigned together.
    """

    def __init__(self, consumers: Sequence[Consumer], groups: Sequence[Group], seed: int = 0) -> None:
        self.weights = {c.weight.name: c for c in consumers if isinstance(c.pattern, Block)}
        self.scores = {name: c.scores.detach().cpu().float().square() for name, c in self.weights.items()}
        self.total = sum(float(scores.sum(dtype=torch.float64)) for scores in self.scores.values()) or 1.0
        self.groups = list(groups)
        self.members = [_members(group, self.scores) for group in groups]
        self.orders = [_same(group) for group in groups]
        self._random = torch.Generator().manual_seed(seed % 2**63)

    def kept(self) -> float:
        """Return the share of the scores that the patterns keep."""
        kept = (float((scores * self._mask(name)).sum(dtype=torch.float64)) for name, scores in self.scores.items())
        return sum(kept) / self.total

    def kept_by(self, index: int) -> float:
        """Return the share of their own scores that the weights of one group keep."""
        names = dict.fromkeys(member.name for member in self.members[index])
        total = sum(float(self.scores[name].sum(dtype=torch.float64)) for name in names) or 1.0
        return sum(float((self.scores[name] * self._mask(name)).sum(dtype=torch.float64)) for name in names) / total

    def bound(self, index: int) -> float:
        """Return the share that they would keep of as many values wherever these stand."""
        names = dict.fromkeys(member.name for member in self.members[index])
        total = sum(float(self.scores[name].sum(dtype=torch.float64)) for name in names) or 1.0
        flat = [(self.scores[name].flatten(), int(self._mask(name).sum())) for name in names]
        return sum(float(scores.topk(count).values.sum(dtype=torch.float64)) for scores, count in flat) / total

    def sort(self) -> None:
        """Order every group's channels by what they hold in all its weights, the largest first."""
        for index, (group, members) in enumerate(zip(self.groups, self.members, strict=True)):
            held = torch.zeros(group.blocks, group.size, dtype=torch.float64, device="cpu")
            for member in members:
                lines = self.scores[member.name].transpose(0, member.axis).flatten(1).sum(1, dtype=torch.float64)
                held += lines[member.positions].sum(-1) / lines.mean().clamp_min(1e-300)
            if members:
                self.move(index, held.argsort(dim=1, descending=True, stable=True))

    def climb(self) -> float:
        """Let the groups take turns until nothing gains; return the share that is kept then."""
        before = self.kept()
        for _ in range(SWEEPS):
            for index in range(len(self.groups)):
                self._turn(index)
            after = self.kept()
            if after - before < LEAST:
                return after
            before = after
        return before

    def move(self, index: int, orders: Tensor) -> None:
        """Put the channels of a group in other orders (blocks, size), new position -> old channel."""
        group = self.groups[index]
        for place in group.places:
            if place.name in self.scores:
                self.scores[place.name] = place.moved(self.scores[place.name], orders)
        self.orders[index] = self.orders[index].gather(1, orders)

    def _turn(self, index: int) -> None:
        for _ in range(ROUNDS if self.members[index] else 0):
            orders = self._assigned(index)
            if orders is None:
                return
            before = self.kept_by(index)
            self.move(index, orders)
            if self.kept_by(index) < before:  # a weight holds the channels along both axes: its sum is not linear
                self.move(index, orders.argsort(dim=1))
                return

    def _assigned(self, index: int) -> Tensor | None:
        """Return better orders of a group for the blocks that stay now, or None."""
        group, orders = self.groups[index], _same(self.groups[index])
        masks = {member.name: self._mask(member.name).float() for member in self.members[index]}
        better = False
        for block in range(group.blocks):
            gains = self._gains(index, block, masks)
            for part in torch.randperm(group.size, generator=self._random, device="cpu").split(CHANNELS):
                mine = gains[part][:, part].contiguous()
                channel_of = assign((mine.T / mine.max().clamp_min(1e-300)).float().contiguous())
                gained = float(mine[channel_of, torch.arange(len(part), device="cpu")].sum())
                if gained > float(mine.diagonal().sum()) * (1 + SMALLEST):
                    orders[block, part], better = part[channel_of], True
        return orders if better else None

    def _gains(self, index: int, block: int, masks: Mapping[str, Tensor]) -> Tensor:
        """Return what each channel (rows) would keep in each channel's place (columns): (size, size), float64."""
        group = self.groups[index]
        gains = torch.zeros(group.size, group.size, dtype=torch.float64, device="cpu")
        for member in self.members[index]:
            scores, mask = (
                each.transpose(0, member.axis).flatten(1) for each in (self.scores[member.name], masks[member.name])
            )
            for places in member.positions[block].unbind(-1):
                gains += scores[places] @ mask[places].T
        return gains

    def _mask(self, name: str) -> Tensor:
        """Return the blocks of a weight that stay, of its own shape."""
        consumer = self.weights[name]
        assert isinstance(consumer.pattern, Block), consumer.pattern
        scores = consumer.weight.reduction_last(self.scores[name])
        return consumer.weight.from_reduction_last(consumer.pattern.project(scores))


def search_blocks(
    consumers: Sequence[Consumer], groups: Sequence[Group], seed: int = 0
) -> tuple[list[Tensor], list[Gain]]:
    """Return the best orders found, one (blocks, size) for each group, and what each group won.

    Where none keeps more than the order as it is, that is the answer.

    Args:
        consumers: The weights to be pruned and their scores.
        groups: The channels that move together.
        seed: As for `BlockSearch`.
    """
    given, straight, by_size = (BlockSearch(consumers, groups, seed) for _ in range(3))
    by_size.sort()
    best = max((straight, by_size), key=BlockSearch.climb)
    best = best if best.kept() > given.kept() else given
    return best.orders, [_gain(given, best, index) for index in range(len(groups))]


def _gain(given: BlockSearch, best: BlockSearch, index: int) -> Gain:
    group = given.groups[index]
    gain = Gain(group.consumers, group.producers, group.size, group.blocks)
    if not given.members[index]:
        return replace(gain, reason="each place of these channels belongs to a block of its own: not searched")
    before, after, bound = given.kept_by(index), best.kept_by(index), given.bound(index)
    return replace(gain, before=before, after=after, efficacy=(after - before) / max(bound - before, 1e-12))


def assign(gains: Tensor) -> Tensor:
    """Return the column of each row so that the sum of `gains` (n, n), float32, is largest, each column taken once.

    Raises:
        KernelError: They are no square of finite numbers.
    """
    columns = torch.empty(len(gains), dtype=torch.int64, device="cpu")
    native.extension().assign_rows(gains, columns)
    return columns


def _same(group: Group) -> Tensor:
    return torch.arange(group.size, device="cpu").repeat(group.blocks, 1)


def _members(group: Group, scores: Mapping[str, Tensor]) -> list[_Member]:
    """Return where the group's channels stand in the weights that have a say."""
    places = [place for place in group.places if place.name in scores]
    found = [(place, _positions(place, group, scores[place.name].ndim)) for place in places]
    return [_Member(place.name, place.axis, positions) for place, positions in found if positions is not None]


def _positions(place: Place, group: Group, ndim: int) -> Tensor | None:
    """Return (blocks, size, occurrences): where each channel stands along the axis; None: its block depends on others.

    A grouped convolution holds a group's inputs and outputs along different axes; it moves along without a say.
    """
    numbers = place.blocks(ndim)
    along_axis = along(torch.zeros_like(place.index), place.axis, ndim) + numbers
    if along_axis.numel() != len(place.index):
        return None
    here = (place.index >= 0).nonzero().flatten()
    key = along_axis.flatten()[here] * group.size + place.index[here]
    if len(here) % (group.size * group.blocks) or not len(here):
        return None
    positions = here[key.argsort(stable=True)].view(group.blocks, group.size, -1)
    channels = place.index[positions]
    return positions if bool((channels == torch.arange(group.size, device="cpu").view(1, -1, 1)).all()) else None
