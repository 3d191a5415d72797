"""by_time: widths within a budget of time, chosen by measured layers and held to what the whole model takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from twofour.shrinking.budget import Budget, Prices, UnmetError
from twofour.shrinking.choose import choose
from twofour.shrinking.curves import Curve
from twofour.shrinking.times import Clock, Times, times
from twofour.structure import shrink as structure
from twofour.structure.shrink import Channels, Cut, Cuttable

LANES = 8
"""Widths from 16 on are multiples of it where time is the budget, from 64 on of twice as many: the lanes of vectors of
AVX2 and of AVX-512, to which kernels of convolutions and products pad."""

ROUNDS, NEAR, AIM, FAR = 4, 1.03, 0.98, 0.94
"""How often widths are chosen, and how near the budget what was measured has to be: 3 % above it are noise, which is
taken where no try is within it; the next one aims 2 % below; where a small model is 6 % below, more could have stayed.
"""

AGAIN = 2
"""How often both models are compiled and measured once more where the small one may be chosen. These count alone: a
measurement that was chosen because it is below the budget is a lucky one more often than not."""


@dataclass(frozen=True)
class Tried:
    """What models of some widths took.

    Attributes:
        widths: The width of each group.
        large: Milliseconds of the large model, one of each time.
        small: Milliseconds of the small one, measured in turn with it.
    """

    widths: dict[str, int]
    large: tuple[float, ...]
    small: tuple[float, ...]

    @property
    def share(self) -> float:
        """The small model's share of the large one's time."""
        return sum(self.small) / sum(self.large)

    @property
    def milliseconds(self) -> tuple[float, float]:
        """Of the large and the small model, on average."""
        return sum(self.large) / len(self.large), sum(self.small) / len(self.small)


Step = Callable[[str, Callable[[], Any]], Any]
"""A step of a search, by its name: made now, or known of an earlier run."""


def multiple_of(group: Cuttable) -> int | None:
    """Return what the widths of a group are multiples of, None where vectors do not ask for any.

    A head is whole vectors already: each of its places has many positions for one head.
    """
    positions = min(int((place.index >= 0).sum()) for place in group.group.places)
    if group.size < 2 * LANES or positions >= LANES * group.size:
        return None
    return LANES if group.size < 8 * LANES else 2 * LANES


def chosen_by_time(
    found: Channels,
    curves: Mapping[str, Curve],
    limit: Budget,
    models: tuple[nn.Module, nn.Module],
    example: Any,
    uniform: bool,
    step: Step,
) -> tuple[dict[str, int], tuple[float, float], str]:
    """Choose by measured layers, cut a copy, measure it, and choose again where it takes another time than predicted.

    Args:
        found: Channels of the twin.
        curves: What each group that may be cut loses.
        limit: The budget.
        models: The large model, and its twin that is cut, which may have fewer layers.
        example: Input of one forward pass.
        uniform: As for `choose`.
        step: Notes what was measured, or gives what a stopped run has.

    Returns:
        The width of each group, milliseconds of the large and the small model, and how they were measured.

    Raises:
        UnmetError: No choice meets the budget, as predicted or within `NEAR` of it as measured.
    """
    clock, of_layers, whole = timed(found, curves, models, example, step)
    tried: dict[tuple[int, ...], Tried] = {}
    aim = limit.fraction
    for _ in range(ROUNDS):
        try:
            widths = choose(Prices(found, of_layers.price), curves, Budget(time=aim), whole, uniform=uniform)
        except UnmetError:
            if not tried:
                raise
            break  # narrower than the narrowest
        key = tuple(widths.values())
        if key not in tried:
            plan = found.plan({name: curves[name].kept(width) for name, width in widths.items()})
            tried[key] = _tried(widths, plan, clock, models, limit, step)
        share = tried[key].share / limit.fraction
        if FAR <= share <= 1:
            break
        aim = min(aim * AIM / share, 0.999)
    met = [one for one in tried.values() if one.share <= limit.fraction]
    near = [one for one in tried.values() if one.share <= NEAR * limit.fraction]
    if met or near:
        best = max(met, key=lambda one: one.share) if met else min(near, key=lambda one: one.share)
        return best.widths, best.milliseconds, clock.told
    raise _too_slow(limit, found, of_layers, whole, list(tried.values()))


def _tried(
    widths: dict[str, int], plan: Cut, clock: Clock, models: tuple[nn.Module, nn.Module], limit: Budget, step: Step
) -> Tried:
    """Measure a small model beside the large one; both anew, more than once, where it may be chosen."""
    model, twin = models
    said = f"time of a small model, {', '.join(map(str, widths.values()))}"

    def small() -> nn.Module:
        return clock.made(structure.cut(twin, plan))

    took = [step(said, lambda: clock.ms({"large": clock.large, "small": small()}))]
    if took[0]["small"] <= NEAR * limit.fraction * took[0]["large"]:
        again = [f"{said}, {number}" for number in range(1, 1 + AGAIN)]
        took = [step(name, lambda: clock.ms({"large": clock.made(model), "small": small()})) for name in again]
    return Tried(widths, tuple(one["large"] for one in took), tuple(one["small"] for one in took))


def timed(
    found: Channels, curves: Mapping[str, Curve], models: tuple[nn.Module, nn.Module], example: Any, step: Step
) -> tuple[Clock, Times, float]:
    """Return the clock, what the twin's layers take at several widths, and the milliseconds of the large model."""
    model, twin = models
    clock = Clock(model, example)
    whole = float(step("time of the large model", lambda: clock.ms({"large": clock.large})["large"]))
    axes = {(p.name, p.axis) for group in found.groups if group.name in curves for p in group.group.places}

    def measured() -> dict[str, Any]:
        alike = structure.cuts_of(twin) == structure.cuts_of(model)
        now = whole if alike else clock.ms({"twin": clock.made(twin)})["twin"]
        return times(twin, example, clock, axes, now).to_dict()

    return clock, Times.from_dict(step("times of layers", measured)), whole


def _too_slow(limit: Budget, found: Channels, of_layers: Times, whole: float, tried: Sequence[Tried]) -> UnmetError:
    """Return the error that says the least that was measured, and what that saved of what was predicted."""
    least = min(tried, key=lambda one: one.share)
    large, small = least.milliseconds
    error = UnmetError.of(
        f"{limit.fraction:.3f} of the time",
        least.share,
        f"the least that was measured, in {len(tried)} tries",
        'measure on a quiet machine, or ask for more; layers="auto" lets whole layers go too, streams=True every '
        "residual stream",
    )
    prices = Prices(found, of_layers.price)
    for group in found.groups:
        prices.set(group, least.widths.get(group.name, group.size))
    predicted, saved = of_layers.whole - prices.total, of_layers.whole - small * whole / large
    error.gain = min(1.0, max(saved, 0.0) / predicted) if predicted > 0 else 1.0
    return error
