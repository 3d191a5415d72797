"""choose: the width of every group within a budget, the least loss for what is saved, step by step."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from twofour.shrinking.budget import Budget, Prices, UnmetError
from twofour.shrinking.curves import Curve
from twofour.structure.shrink import Channels, Cuttable

Member = tuple[Cuttable, Curve]


def choose(
    prices: Prices, curves: Mapping[str, Curve], budget: Budget, whole: float, *, uniform: bool = False
) -> dict[str, int]:
    """Return the width of each group: narrower and narrower, each time where the least is lost for what is saved.

    The loss of a group counts as -log(1 - share), so that one group is not emptied before others are touched.

    Args:
        prices: Of the model at its own widths; afterwards at those that were chosen.
        curves: What each group loses, by its name.
        budget: What is counted, and how much of it may stay.
        whole: What the large model has of it.
        uniform: Groups of one size get one width, as one number of a configuration says it. Those that one number of a
            forward counts always do, and stay whole where they cannot, or where one of them is not to be cut.

    Raises:
        UnmetError: The narrowest widths are too wide for the budget.
    """
    held = [(group, curves[group.name]) for group in prices.found.groups if group.name in curves]
    bundles = [_Bundle(prices, members) for members in _together(prices.found, curves, uniform)]
    _fill(bundles, budget, whole, prices.total)
    widths = {group.name: curve.widths[bundle.step] for bundle in bundles for group, curve in bundle.members}
    return {group.name: group.size for group, _ in held} | widths


def choose_layers(
    prices: Prices,
    curves: Mapping[str, Curve],
    budget: Budget,
    whole: float,
    layers: Mapping[str, float],
    uniform: bool,
) -> tuple[str, ...]:
    """Return the layers that go where layers and channels are chosen together, the least loss for what is saved.

    Args:
        prices: Of the model at its own widths; afterwards at those that were chosen.
        curves: What each group loses, as a share of its layer's output.
        budget: What is counted, and how much of it may stay.
        whole: What the large model has of it.
        layers: What each layer loses by going, as a share of its output. One of each list of layers stays.
        uniform: As for `choose`.

    Raises:
        UnmetError: What is narrowest and shallowest is too large for the budget.
    """
    bundles = [_Bundle(prices, members) for members in _together(prices.found, curves, uniform)]
    entire = [_Entire(prices, name, loss, tuple(layers), bundles) for name, loss in layers.items()]
    _fill([*bundles, *entire], budget, whole, prices.total)
    return tuple(one.name for one in entire if one.step)


def _fill(bundles: Sequence[_Bundle | _Entire], budget: Budget, whole: float, now: float) -> None:
    limit = budget.fraction * whole
    while now > limit:
        ranked = [(*bundle.next(), bundle) for bundle in bundles]
        rank, by, best = min(ranked, key=lambda one: one[0], default=(math.inf, 0, None))
        if best is None or rank == math.inf:
            raise _too_small(budget, now / whole)
        now -= best.go(by)
    # The last steps may have saved more than was asked for: what lost most comes back where it fits.
    for bundle in sorted(bundles, key=lambda bundle: -bundle.loss(bundle.step)):
        while bundle.step and now - bundle.rank(-1)[1] <= limit:
            now -= bundle.go(-1)


def _together(channels: Channels, curves: Mapping[str, Curve], uniform: bool) -> list[list[Member]]:
    """Return the groups that get one width: by their size where asked for, and those that one number counts.

    Those that one number counts are left out where one is not to be cut, or may have other widths.
    """
    units = list(channels.bound)
    units += [[group] for group in channels.groups if all(group not in bound for bound in channels.bound)]
    found: dict[Hashable, list[Member]] = {}  # by kind and widths; units that have one in common share the list
    for unit in units:
        members = [(group, curves[group.name]) for group in unit if group.name in curves]
        widths = {curve.widths for _, curve in members}
        if len(members) < len(unit) or len(widths) > 1:
            continue
        keys = [(group.size, curve.widths) if uniform else group.name for group, curve in members]
        others = {id(found[key]): found[key] for key in keys if key in found}
        members += [member for several in others.values() for member in several]
        found |= {key: members for key in [*keys, *(key for key, held in found.items() if id(held) in others)]}
    return [*{id(members): members for members in found.values()}.values()]


@dataclass(eq=False)
class _Bundle:
    """Groups that have one width.

    Attributes:
        prices: Of the model at the widths that its groups have now.
        members: The groups with what they lose; all may have the same widths.
        step: Which of these they have.
    """

    prices: Prices
    members: Sequence[Member]
    step: int = 0

    def loss(self, step: int) -> float:
        """Return what their losses count as at a step."""
        stay = [curve for group, curve in self.members if not self.prices.went(group.group.places[0].name)]
        return sum(cost(curve.losses[step]) for curve in stay)

    def go(self, by: int) -> float:
        """Go on by some steps; return what that saves."""
        self.step += by
        return sum(self.prices.set(group, curve.widths[self.step]) for group, curve in self.members)

    def next(self) -> tuple[float, int]:
        """Return the loss for what is saved by going on, and by how many steps: one, or more where one saves nothing.

        Kernels take as long for some widths as for others. Infinite where no step saves anything.
        """
        for by in range(1, len(self.members[0][1].widths) - self.step):
            if (rank := self.rank(by)[0]) < math.inf:
                return rank, by
        return math.inf, 0

    def rank(self, by: int) -> tuple[float, float]:
        """Return the loss for what is saved by going on, infinite at the end, and what is saved."""
        step = self.step
        if not 0 <= step + by < len(self.members[0][1].widths):
            return math.inf, 0
        saved = self.go(by)
        self.go(-by)
        return (self.loss(step + by) - self.loss(step)) / saved if saved > 0 else math.inf, saved


@dataclass(eq=False)
class _Entire:
    """A whole layer.

    Attributes:
        prices: Of the model at the widths that its groups have now.
        name: Of the layer.
        lost: Share of its output that is lost without it.
        others: All layers that may go.
        bundles: Groups of channels, some of them in the layer.
        step: 1 once it went.
    """

    prices: Prices
    name: str
    lost: float
    others: Sequence[str]
    bundles: Sequence[_Bundle]
    step: int = 0

    def loss(self, step: int) -> float:
        """Return what its loss counts as."""
        return step * cost(self.lost)

    def go(self, by: int) -> float:
        """Take it out, or put it back; return what that saves."""
        self.step += by
        return self.prices.drop(self.name, back=by < 0)

    def next(self) -> tuple[float, int]:
        """Return the loss for what is saved by its going, and the one step of it."""
        return self.rank(1)[0], 1

    def rank(self, by: int) -> tuple[float, float]:
        """Return the loss for what is saved, less what its own channels have lost by now, and what is saved."""
        parent = self.name.rpartition(".")[0]
        stay = [one for one in self.others if one.rpartition(".")[0] == parent and one not in self.prices.gone]
        if not 0 <= self.step + by <= 1 or (by > 0 and len(stay) < 2):
            return math.inf, 0
        before = sum(bundle.loss(bundle.step) for bundle in self.bundles)
        saved = self.go(by)
        inner = before - sum(bundle.loss(bundle.step) for bundle in self.bundles)
        self.go(-by)
        return max(by * cost(self.lost) - inner, 0.0) / saved if saved > 0 else math.inf, saved


def cost(share: float) -> float:
    """Return what a lost share of the outputs' energy counts as."""
    return -math.log(max(1.0 - share, 1e-6)) + max(share - 1.0, 0.0)


def _too_small(budget: Budget, least: float) -> UnmetError:
    return UnmetError.of(
        f"{budget.fraction:.3f} of the {budget.kind}",
        least,
        "the narrowest widths of all that can be cut",
        'layers="auto" lets whole layers go too, streams=True every residual stream, `least` sets how narrow a group '
        "may become; `twofour.structure.shrink.channels(model, example).uncut` says what stays whole and why",
    )
