"""room: whether a budget can be met at all, which shapes tell before anything is ranked, and what stands in the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from twofour.shrinking.budget import Budget, Prices, UnmetError
from twofour.shrinking.choose import choose, choose_layers
from twofour.shrinking.curves import Curve
from twofour.structure.shrink import Channels, Cuttable

LARGE = 0.25
"""Share of the least that can be from which a tensor that stays whole is named."""

Narrow = Callable[[int | None, float], Mapping[str, tuple[Cuttable, tuple[int, ...]]]]
"""Multiple and least share -> the groups that may be cut then, by name, with their widths."""


@dataclass(frozen=True, eq=False)
class Room:
    """What a budget leaves.

    Attributes:
        found: Channels of the model that is cut.
        price: Name and sizes of a tensor -> what it costs of the budget.
        limit: The budget.
        whole: What the large model has of it.
        layers: That may go; None where they do not compete with channels.
        uniform: As for `choose`.
        narrow: What may be cut, and how far.
    """

    found: Channels
    price: Callable[[str, tuple[int, ...]], float]
    limit: Budget
    whole: float
    layers: Sequence[str] | None
    uniform: bool
    narrow: Narrow

    def require(self, multiple: int | None, least: float) -> None:
        """Refuse a budget that the narrowest widths do not meet.

        Raises:
            UnmetError: It cannot be met; the options that are why are named, and the largest tensor that stays.
        """
        error, prices = self._narrowest(multiple, least)
        if error is None:
            return
        reasons = self._largest(prices, error.least)
        for name, others in ((f"multiple={multiple}", (None, least)), (f"least={least:g}", (multiple, 0.0))):
            other, _ = self._narrowest(*others)
            if other is None:
                reasons.append(f"{name} stands in the way: the budget can be met without it")
            elif name.startswith("multiple") and other.least < error.least:
                reasons.append(f"{name} stands in the way: {other.least:.3f} is the least without it")
        error.reasons = tuple(reasons)
        raise error

    def _narrowest(self, multiple: int | None, least: float) -> tuple[UnmetError | None, Prices]:
        """Return why the narrowest widths do not suffice, None where they do, and the prices at these."""
        groups = self.narrow(multiple, least)
        curves = {name: _flat(group, widths) for name, (group, widths) in groups.items()}
        prices, told = Prices(self.found, self.price), (curves, self.limit, self.whole)
        try:
            if self.layers is None:
                choose(prices, *told, uniform=self.uniform)
            else:
                choose_layers(prices, *told, dict.fromkeys(self.layers, 0.0), self.uniform)
        except UnmetError as error:
            return error, prices
        return None, prices

    def _largest(self, prices: Prices, least: float) -> list[str]:
        """Return a sentence about the largest tensor that stays whole where it is much of the least."""
        costs = {name: prices.of(name) for name, shape in self.found.shapes.items()}
        held = {name: cost for name, cost in costs.items() if cost == self.price(name, self.found.shapes[name])}
        name = max(held, key=lambda one: held[one], default="")
        share = held.get(name, 0.0) / self.whole
        return (
            [f"`{name}` alone is {share:.3f} of the {self.limit.kind} and stays whole"] if share > LARGE * least else []
        )


def _flat(group: Cuttable, widths: tuple[int, ...]) -> Curve:
    """Return the curve of a group that loses nothing, at its own width and its narrowest."""
    return Curve(torch.arange(group.size, device="cpu"), (widths[0], widths[-1]), (0.0, 0.0), "shape")
