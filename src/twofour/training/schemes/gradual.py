"""Gradual pruning: sparser from level to level at steps of your training, each level a pattern itself.

After Zhu and Gupta 2017, "To prune, or not to prune" (arXiv 1710.01878). N:M goes from M - 1 of M values a group
down to N, one fewer at a time. Blocks follow their equation 1, s = S (1 - (1 - t)^3), t from 0 to 1: fast while there
is much to spare, slow at the end. Pruned values stay pruned, so the last mask is part of each earlier one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from twofour import criteria, masks
from twofour.criteria import Criterion
from twofour.errors import TrainingError
from twofour.layers import PrunableWeight
from twofour.patterns import NM, Block, Pattern, parse
from twofour.recipe import Recipe
from twofour.training.schemes.base import Masking, assigned

LEVELS = 100
"""Levels of blocks at most: Zhu and Gupta prune every 100 steps or so."""

_log = logging.getLogger("twofour.training")


Patterns = str | Pattern | Mapping[str, str | Pattern] | Recipe
"""What `twofour.prune` takes too."""


def attach(
    model: nn.Module,
    pattern: Patterns = "2:4",
    *,
    end: int,
    begin: int = 0,
    criterion: str | Criterion | None = None,
    skip: str | Sequence[str] = (),
    eligibility: str = "asp",
) -> Gradual:
    """Start a schedule; call `step()` after each optimiser step.

    Args:
        model: A dense model.
        pattern: The N:M or the blocks to end with; or, as `twofour.prune` takes them, a mapping from layer globs to
            patterns or "dense", or a `Recipe`.
        end: The step at which it is reached.
        begin: The step at which the first values are pruned.
        criterion: Which values go: "magnitude" or "random", which need no data. Default: a recipe's own, else
            "magnitude".
        skip: Globs of layers to leave dense.
        eligibility: As in `twofour.prune`.

    Example:
        >>> schedule = twofour.training.gradual.attach(model, "2:4", begin=100, end=1000)
        >>> for x, y in loader: ...; optimizer.step(); schedule.step()

    Raises:
        TrainingError: The model is masked already, nothing can be pruned, not 0 <= begin <= end, end is 0, or the
            criterion needs data.
        RecipeError: The text is not a criterion, a rule is malformed, matches no layer, or contradicts an option.
        LayerError: A rule asks for a layer that cannot be pruned.
    """
    recipe = _recipe(pattern, criterion=criterion, skip=skip, eligibility=eligibility)
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end or not end:
        raise TrainingError(
            "the schedule's steps are impossible",
            got=f"begin={begin!r}, end={end!r}",
            wanted="whole numbers, 0 <= begin <= end and end >= 1: with end=0 all goes at once, before any step",
            remedy="twofour.prune prunes at once; else count optimiser steps: end=len(loader) * epochs // 2 leaves "
            "half of the training to recover",
        )
    if recipe.criterion.need is not None:
        raise TrainingError(
            "a gradual schedule has no data for its criterion",
            got=f"criterion={recipe.criterion.name!r}",
            wanted='"magnitude" or "random"',
            remedy="twofour.prune(model, ..., data=loader) prunes at once by any criterion",
        )
    groups: dict[Pattern, list[PrunableWeight]] = {}
    for weight, laid in assigned(model, recipe):
        groups.setdefault(recipe.pattern_for(*weight.layers) or laid, []).append(weight)
    return Gradual(model, groups, begin, end, recipe.criterion)


def during(pattern: Patterns, **options: Any) -> Callable[[nn.Module, int], Gradual]:
    """Return what attaches a schedule over the first half of a run's steps, for `finetune(..., scheme=)`.

    Args:
        pattern: What to end with, as for `attach`.
        options: As for `attach`, but for `end`.
    """
    _recipe(pattern)
    return lambda model, steps: attach(model, pattern, end=max(1, steps // 2), **options)


def _recipe(pattern: Patterns, **options: Any) -> Recipe:
    """Return the recipe of patterns that have levels before them.

    Raises:
        TrainingError: One has none.
    """
    recipe = Recipe.parse(pattern, **options)
    for _, final in recipe.rules:
        if final is not None:
            _final(final)
    return recipe


def _final(pattern: Pattern) -> NM | Block:
    """Return a pattern that has levels before it.

    Raises:
        TrainingError: It has none.
    """
    if isinstance(pattern, NM | Block):
        return pattern
    raise TrainingError(
        "a gradual schedule is defined for N:M and for blocks",
        got=pattern.name,
        wanted='"2:4", "1:4", "block:16x16@0.9", ...',
        remedy="twofour.training.sr_ste takes every pattern",
    )


def _levels(final: NM | Block, begin: int, end: int) -> Iterator[tuple[int, NM | Block]]:
    """Yield the step at which each pattern comes into force."""
    if isinstance(final, Block):
        count = min(end - begin, LEVELS) or 1
        for level in range(1, count + 1):
            share = level / count
            step = begin + round((end - begin) * share)
            yield step, final if level == count else final.at(final.sparsity * (1 - (1 - share) ** 3))
        return
    kept = range(final.m - 1, final.n - 1, -1)
    spread = max(1, len(kept) - 1)
    for index, n in enumerate(kept):
        yield (begin + round((end - begin) * index / spread) if len(kept) > 1 else end), NM(n, final.m)


@dataclass
class _Group:
    """The weights that end with one pattern, the steps at which each level comes, and the one in force."""

    weights: list[PrunableWeight]
    levels: tuple[tuple[int, Pattern], ...]
    now: Pattern | None = None


class Gradual(Masking):
    """The schedule; the parameters are plain ones, masked more from level to level.

    Attributes:
        layers: Names of its weights.
        levels: The step of each level and its pattern; of several patterns in the end, of all of them by their steps.
        steps: Optimiser steps so far.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Mapping[Pattern, Sequence[PrunableWeight]],
        begin: int,
        end: int,
        criterion: Criterion,
    ) -> None:
        super().__init__(model)
        self._criterion = criterion
        self._groups = {
            final.name: _Group(list(of_final), tuple(_levels(_final(final), begin, end)))
            for final, of_final in weights.items()
        }
        pruned = [weight for of_final in weights.values() for weight in of_final]
        self.layers = tuple(weight.name for weight in pruned)
        levels = [level for group in self._groups.values() for level in group.levels]
        self.levels = tuple(sorted(levels, key=lambda level: level[0]))
        self.steps = 0
        self._advance()
        self._begin("gradual pruning", [weight.module for weight in pruned])

    @property
    def now(self) -> Pattern | None:
        """The pattern in force, None before the first level; of several in the end, that of the first one's weights."""
        return next(iter(self._groups.values())).now

    def step(self) -> None:
        """Count one optimiser step, and go to the next level where its step has come."""
        self.steps += 1
        self._advance()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold beside the states of model and optimiser: steps, level and masks."""
        now = {final: group.now.name for final, group in self._groups.items() if group.now is not None}
        return {"plan": self._plan(), "steps": self.steps, "now": now, "masks": masks.state_dict(self.model)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; load the model's own state afterwards, so that no old mask cuts it.

        Raises:
            TrainingError: The state is of another schedule, or the scheme is over.
            MaskError: Its masks do not fit the model.
        """
        self._require_attached()
        if not {"plan", "steps", "now", "masks"} <= set(state) or state["plan"] != self._plan():
            raise TrainingError(
                "the state is of another gradual schedule",
                got=str(state.get("plan", f"keys {', '.join(map(str, state))}")),
                wanted=str(self._plan()),
                remedy="attach with the pattern, steps, criterion and layers of the run that is resumed",
            )
        masks.detach(self.model)  # the state may be from before the first level
        masks.load_state_dict(self.model, state["masks"])
        self.steps = state["steps"]
        for final, group in self._groups.items():
            group.now = parse(state["now"][final]) if final in state["now"] else None

    def _plan(self) -> dict[str, Any]:
        levels = {
            final: [[step, pattern.name] for step, pattern in group.levels] for final, group in self._groups.items()
        }
        return {"levels": levels, "criterion": self._criterion.name, "layers": list(self.layers)}

    def finish(self) -> nn.Module:
        """Go to the last level now, if it has not come; see `Scheme.finish`."""
        self._require_attached()
        self._prune({final: group.levels[-1][1] for final, group in self._groups.items()})
        self._end()
        return self.model

    def _advance(self) -> None:
        if self.attached:
            due = {
                final: [pattern for step, pattern in group.levels if step <= self.steps]
                for final, group in self._groups.items()
            }
            self._prune({final: patterns[-1] for final, patterns in due.items() if patterns})

    def _prune(self, patterns: Mapping[str, Pattern]) -> None:
        """Bring the weights of each final pattern to a level, those that change in one choice."""
        new = {final: pattern for final, pattern in patterns.items() if pattern != self._groups[final].now}
        if not new:
            return
        plan = [(weight, weight.lay(new[final])) for final in new for weight in self._groups[final].weights]
        solved = criteria.solve(self.model, plan, self._criterion)
        masks.attach_all([(choice.weight, choice.keep, choice.pattern) for choice in solved.choices])
        for final, pattern in new.items():
            self._groups[final].now = pattern
            _log.info("step %d: %d weights are %s now", self.steps, len(self._groups[final].weights), pattern.name)
