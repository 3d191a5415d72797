"""allocate: the pattern of each layer that loses least within a budget, as a recipe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from glob import escape
from typing import Any, Literal, Self

from twofour import criteria, patterns
from twofour.allocation.knapsack import STATES, Frontier, frontier
from twofour.allocation.records import Candidate, LayerSensitivity, Loss, Sensitivities
from twofour.errors import RecipeError
from twofour.recipe import DENSE, Recipe

Axis = Literal["density", "latency"]
"""What a choice costs: the fraction of values kept, or milliseconds."""


@dataclass(frozen=True)
class Budget:
    """One limit; everything else is made as good as it can be.

    Attributes:
        loss: Largest total loss, in the unit of what was measured; the cheapest choice within it is taken.
        density: Largest fraction of the values of these layers that is kept, 0 to 1; the least loss within it is taken.
        latency: Largest time of these layers in milliseconds; the least loss within it is taken.
        minimise: Under a limit of loss: "latency" (default where it was measured) or "density".
    """

    loss: float | None = None
    density: float | None = None
    latency: float | None = None
    minimise: Axis | None = None

    def __new__(cls, *limits: object, **named: object) -> Self:
        """Refuse limits of other names.

        Raises:
            RecipeError: There is one.
        """
        if others := [name for name in named if name not in cls.__dataclass_fields__]:
            raise RecipeError(
                "a budget has no such limit",
                got=", ".join(f"{name}={named[name]!r}" for name in others),
                wanted="one of loss, density (the fraction of values kept) and latency (milliseconds)",
                remedy="Budget(density=0.5) keeps as many values as 2:4 everywhere, Budget(latency=1.5) allows 1.5 ms",
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        limits = {name: getattr(self, name) for name in ("loss", "density", "latency")}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        shown = ", ".join(f"{name}={limit!r}" for name, limit in given.items())
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) and v == v for v in given.values())
        if len(given) != 1 or not numbers:
            raise RecipeError(
                "a budget has one limit",
                got=shown or "no limit",
                wanted="a number for one of loss, density and latency",
                remedy="Budget(density=0.5) keeps as many values as 2:4 everywhere",
            )
        if (self.density is not None and not 0 < self.density <= 1) or (self.latency is not None and self.latency <= 0):
            raise RecipeError(
                "the budget's limit is impossible",
                got=shown,
                wanted="a density above 0 and at most 1, the fraction of values kept, a latency above 0 ms, or a loss",
                remedy="Budget(density=0.5) keeps as many values as 2:4 everywhere",
            )
        if self.minimise not in (None, "density", "latency") or (self.minimise and self.loss is None):
            raise RecipeError(
                "`minimise` cannot be used",
                got=f"minimise={self.minimise!r} in {self}",
                wanted='"latency" or "density", beside a limit of loss',
                remedy='Budget(loss=0.01, minimise="density"), or leave `minimise` out',
            )

    @property
    def limit(self) -> float:
        """The limit, whatever it limits."""
        return next(limit for limit in (self.loss, self.density, self.latency) if limit is not None)

    def __str__(self) -> str:
        if self.loss is not None:
            return f"loss at most {self.loss:g}"
        return f"density at most {self.density:g}" if self.density is not None else f"at most {self.latency:g} ms"


@dataclass(frozen=True)
class Allocation:
    """What was chosen.

    Attributes:
        recipe: For `twofour.prune`: one rule for each layer, by its exact name.
        chosen: Layer and the text of its pattern.
        loss: Predicted: the sum over the layers, each as if pruned alone.
        kind: What was summed, "task" or "error".
        density: Fraction of the values of these layers that is kept.
        latency: Predicted milliseconds of these layers, None where times were not measured.
        budget: The limit asked for; None for a `uniform` choice.
        exact: Whether no choice within the budget is better; else a better one may exist by less than the resolution
            that `knapsack` states.
        judged: What `confirm` found: names and how bad models so pruned are, smaller is better; empty before it.
    """

    recipe: Recipe
    chosen: tuple[tuple[str, str], ...]
    loss: float
    kind: Loss
    density: float
    latency: float | None
    budget: Budget | None = None
    exact: bool = True
    judged: tuple[tuple[str, float], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready fields."""
        budget = self.budget and dict(self.budget.__dict__)
        listed = {"recipe": self.recipe.to_toml(), "chosen": dict(self.chosen), "budget": budget}
        listed["judged"] = dict(self.judged)
        return {**self.__dict__, **listed}

    def __str__(self) -> str:
        width = max(len(layer) for layer, _ in self.chosen)
        lines = [f"{layer.ljust(width)}  {pattern}" for layer, pattern in self.chosen]
        time = "" if self.latency is None else f", {self.latency:.3f} ms"
        asked = f" ({self.budget})" if self.budget else ""
        total = f"predicted {self.kind} loss {self.loss:.4g}, density {self.density:.3f}{time}{asked}"
        told = [f"judged on data held back: {', '.join(f'{name} {figure:.4g}' for name, figure in self.judged)}"]
        return "\n".join([*lines, total, *(told if self.judged else [])])


def allocate(
    sensitivities: Sensitivities, budget: Budget, *, loss: Loss | None = None, states: int = STATES
) -> Allocation:
    """Choose a pattern for each layer so that the sum of their losses is least within the budget.

    The sum takes the layers as independent, which holds to first order: pruned together they usually lose more. Solved
    as a multiple-choice knapsack, exactly unless `Allocation.exact` says otherwise; see `knapsack`.

    Args:
        sensitivities: From `sensitivity`, or from `timed` for a budget of latency.
        budget: The limit.
        loss: "task" or "error"; default: "task" where it was measured.
        states: Partial sums that the search keeps.

    Raises:
        RecipeError: There is no budget, it cannot be met, or what it limits was not measured.
    """
    if not isinstance(budget, Budget):
        raise RecipeError(
            "there is no budget",
            got=repr(budget),
            wanted="a Budget, which says what is limited: loss, density or latency",
            remedy=f"allocate(found, Budget(density={budget if isinstance(budget, float) else 0.5}))",
        )
    kind = sensitivities.require(loss)
    axis = _axis(sensitivities, budget)
    found = _frontier(sensitivities, axis, kind, states)
    unit = sensitivities.values if axis == "density" else 1.0
    index = found.within_cost(budget.limit * unit) if budget.loss is None else found.within_value(budget.loss)
    if index is None:
        raise _impossible(sensitivities, budget, kind, found, unit)
    options = found.options(index)
    chosen = [layer.candidates[option] for layer, option in zip(sensitivities.layers, options, strict=True)]
    return _allocation(sensitivities, chosen, kind, budget, found.exact)


def uniform(sensitivities: Sensitivities, pattern: str, *, loss: Loss | None = None) -> Allocation:
    """Return the same pattern for all layers as an allocation, to compare with; where it does not fit, dense.

    Raises:
        RecipeError: The pattern is no candidate of some layer, nor is "dense".
    """
    kind = sensitivities.require(loss)
    chosen = [layer.find(pattern) or layer.find(DENSE) for layer in sensitivities.layers]
    if pattern not in sensitivities.patterns or None in chosen:
        raise sensitivities.without(pattern)
    return _allocation(sensitivities, [entry for entry in chosen if entry], kind, None, True)


def trade_off(
    sensitivities: Sensitivities, axis: Axis = "density", *, loss: Loss | None = None, states: int = STATES
) -> tuple[tuple[float, float], ...]:
    """Return the least loss at every cost where it changes: pairs of cost and predicted loss, ascending in cost.

    Args:
        sensitivities: From `sensitivity` or `timed`.
        axis: "density" (fraction of values kept) or "latency" (milliseconds).
        loss: "task" or "error".
        states: Partial sums that the search keeps.

    Raises:
        RecipeError: What is asked for was not measured.
    """
    _require_times(sensitivities, axis)
    found = _frontier(sensitivities, axis, sensitivities.require(loss), states)
    unit = sensitivities.values if axis == "density" else 1.0
    return tuple(zip((found.costs / unit).tolist(), found.values.tolist(), strict=True))


def _axis(sensitivities: Sensitivities, budget: Budget) -> Axis:
    axis: Axis = "latency" if budget.latency is not None else "density"
    if budget.loss is not None:
        axis = budget.minimise or ("latency" if sensitivities.timing else "density")
    _require_times(sensitivities, axis)
    return axis


def _require_times(sensitivities: Sensitivities, axis: Axis) -> None:
    if axis == "latency" and not sensitivities.timing:
        raise RecipeError(
            "the times of the layers were not measured",
            got="sensitivities without times",
            wanted="twofour.allocation.timed(sensitivities, model, example)",
            remedy="measure them, or ask for a density",
        )


def _frontier(sensitivities: Sensitivities, axis: Axis, kind: Loss, states: int) -> Frontier:
    def cost(candidate: Candidate) -> float:
        # A layer that was not timed takes the same time with every pattern.
        return float(candidate.kept) if axis == "density" else candidate.ms or 0.0

    costs = [[cost(candidate) for candidate in layer.candidates] for layer in sensitivities.layers]
    losses = [[candidate.loss(kind) for candidate in layer.candidates] for layer in sensitivities.layers]
    return frontier(costs, losses, states)


def _allocation(
    sensitivities: Sensitivities, chosen: Sequence[Candidate], kind: Loss, budget: Budget | None, exact: bool
) -> Allocation:
    pairs = list(zip(sensitivities.layers, chosen, strict=True))
    times = [candidate.ms for candidate in chosen if candidate.ms is not None]
    return Allocation(
        _recipe(sensitivities, pairs),
        tuple((layer.layer, candidate.pattern) for layer, candidate in pairs),
        math.fsum(candidate.loss(kind) for candidate in chosen),
        kind,
        sum(candidate.kept for candidate in chosen) / sensitivities.values,
        math.fsum(times) if sensitivities.timing else None,
        budget,
        exact,
    )


def _recipe(sensitivities: Sensitivities, pairs: Sequence[tuple[LayerSensitivity, Candidate]]) -> Recipe:
    # A rule holds for the layers inside its layer too, so those inside come first.
    ordered = sorted(pairs, key=lambda pair: -pair[0].layer.count("."))
    rules = tuple(
        (escape(layer.layer) or "*", None if found.pattern == DENSE else patterns.parse(found.pattern))
        for layer, found in ordered
    )
    return Recipe(rules, criteria.parse(sensitivities.criterion), (), sensitivities.eligibility)


def _impossible(sensitivities: Sensitivities, budget: Budget, kind: Loss, found: Frontier, unit: float) -> RecipeError:
    if budget.loss is not None:
        least = f"a predicted {kind} loss of {found.values[-1]:.4g}"
        remedy = 'a larger loss, or "dense" among the patterns'
    else:
        cost = found.costs[0] / unit
        least = f"a density of {cost:.4f}" if budget.density is not None else f"{cost:.4f} ms"
        remedy = "a larger budget, or sparser patterns among the candidates"
    return RecipeError(
        "no choice of patterns is within the budget",
        got=str(budget),
        wanted=f"at least {least}, the least of {len(sensitivities.layers)} layers with the candidates "
        f"{', '.join(sensitivities.patterns)}",
        remedy=remedy,
    )
