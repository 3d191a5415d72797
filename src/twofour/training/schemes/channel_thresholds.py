"""Learned thresholds: how wide each layer is to be is found by back-propagation, within a budget of parameters.

A channel is open while its gate is above the threshold of its layer. The forward pass has hard masks, the gradient to
a threshold passes through a sigmoid whose temperature falls (a straight-through estimator): it feels what the loss
would lose with the channels near it. Layers exchange channels until a parameter is worth the same in each. As Azarian
et al. 2020, "Learned Threshold Pruning" (arXiv 2003.00075), do with weights. Nothing that stays is pulled, unlike by a
penalty on the gates themselves, and gates are counted from their layer's mean in units of their standard deviation: a
scale which the next normalisation takes out again says nothing, and a layer closes channel by channel also where all
gates are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from twofour.errors import TrainingError, integer_from
from twofour.layers import require_unwrapped
from twofour.structure import shrink
from twofour.structure.shrink.widths import widths_of
from twofour.training.schemes.base import Scheme, require_dense, require_free
from twofour.training.schemes.gated import LEAST, Gated, Target, channel_gates
from twofour.training.schemes.learned import Learned, cut, learned, leave
from twofour.training.schemes.slots import Slot
from twofour.training.schemes.thresholded import Shut, Threshold, temperature

__all__ = ["ChannelThresholds", "attach", "cut", "during", "learned"]

RATE = 6.0
"""How far a threshold moves in all where its gradient keeps its sign, in standard deviations of its gates."""

CATCH_UP = 4.0
"""How much faster than that the threshold of the dearest channels may move towards the budget."""

RAMP = 0.6
"""Share of the steps over which the budget falls from all parameters to what is asked for."""

SMOOTH = 0.95
"""Of the averages of gradients over steps."""

TINY = 1e-30
"""Added where a divisor may be zero."""


def attach(
    model: nn.Module, example: Any, *, steps: int, budget: float = 0.5, multiple: int | None = None
) -> ChannelThresholds:
    """Put thresholds on the channels of a dense model; call `step()` after each step of the optimiser.

    Keep what is returned. Build the optimiser afterwards: channels without a batch norm get a gate to be trained.

    Args:
        model: A dense model, fresh or trained.
        example: Input of one forward pass, as `twofour.shrink` takes it.
        steps: Optimiser steps during which thresholds are trained. What goes is settled then: it stays closed.
        budget: Share of the parameters that may stay, above 0 and below 1.
        multiple: As in `twofour.shrink`: widths are rounded up to multiples of it.

    Example:
        >>> thresholds = twofour.training.channel_thresholds.attach(model, x, steps=1000, budget=0.5)
        >>> for x, y in loader: loss(model(x), y).backward(); optimizer.step(); thresholds.step()
        >>> small = twofour.training.channel_thresholds.cut(thresholds.finish(), x)

    Raises:
        TrainingError: A number is impossible, the model is masked, another scheme is at work, nothing can have
            thresholds, or the budget cannot be met.
        ShrinkError: The model does not run on the example or cannot be captured.
    """
    require_free(model)
    require_unwrapped(model, TrainingError)
    require_dense(model)
    _require_budget(budget)
    integer_from(1, "`steps` is impossible", TrainingError, "steps=len(loader) * epochs", steps=steps)
    found = shrink.channels(model, example)
    inner = [group for group in found.groups if group.exact and not group.group.stream]
    gated = channel_gates(model, inner, example)
    if not gated:
        raise TrainingError(
            "nothing can have thresholds",
            reasons=[str(uncut) for uncut in found.uncut],
            got=f"{len(found.groups)} groups of channels, none of them between two layers",
            wanted="channels between two layers",
            remedy="twofour.structure.shrink.channels(model, example) says what can be cut",
        )
    return ChannelThresholds(model, found, gated, steps, float(budget), multiple)


def during(
    example: Any, budget: float = 0.5, *, share: float = 0.75, **options: Any
) -> Callable[[nn.Module, int], ChannelThresholds]:
    """Return what attaches thresholds to a run, for `finetune(..., scheme=)`; `cut(model, example)` comes after it.

    Args:
        example: Input of one forward pass.
        budget: As for `attach`.
        share: Share of the run's steps during which thresholds are trained, above 0 and at most 1; the others train
            what stays.
        options: As for `attach`, but for `steps`.

    Raises:
        TrainingError: A number is impossible.
    """
    _require_budget(budget, share)
    return lambda model, steps: attach(model, example, steps=max(1, int(share * steps)), budget=budget, **options)


class ChannelThresholds(Scheme):
    """Thresholds at work; they are no parameters of the model and move by a rule of their own."""

    def __init__(
        self,
        model: nn.Module,
        found: shrink.Channels,
        gated: Sequence[Gated],
        steps: int,
        budget: float,
        multiple: int | None,
    ) -> None:
        super().__init__(model)
        self.layers = tuple(one.name for one in gated)
        self.end, self.budget, self.multiple, self.steps = steps, budget, multiple, 0
        self._found, self._thresholds = found, [Threshold(one) for one in gated]
        self._total = sum(map(prod, found.shapes.values()))
        self._mean, self._square = [0.0] * len(gated), 0.0
        self._require_reachable()
        self._slots = self._parametrise()
        self._begin("channel thresholds", [slot.module for slot in self._slots.values()])

    def _parametrise(self) -> dict[tuple[int, str], Slot]:
        slots: dict[tuple[int, str], Slot] = {}
        try:
            for (module, attribute), part in self._parts():
                slot = slots.get((id(module), attribute)) or Slot(module, attribute)
                slot.parametrise(part)
                slots[id(module), attribute] = slot
        except BaseException:
            for slot in slots.values():
                slot.restore(parametrised=False)
            raise
        return slots

    def _parts(self) -> list[tuple[Target, nn.Module]]:
        """Return what is parametrised by what: norms by masks, readers by gates and masks."""
        owners = {id(p): (m, n) for m in self.model.modules() for n, p in m.named_parameters(recurse=False)}
        parts: list[tuple[Target, nn.Module]] = []
        for threshold in self._thresholds:
            for target, scaled in threshold.gated.scales:
                parts += [(target, scaled), (target, Shut(threshold, scaled.axis, scaled.index))]
            if not threshold.gated.scales:
                parts += [(owners[id(p)], Shut(threshold, 0, index)) for p, index in threshold.gated.held]
        return parts

    def share(self) -> Tensor:
        """Return the share of the parameters that stays now, with its gradient: exact wherever groups cross."""
        gone: dict[tuple[str, int], Tensor] = {}
        for threshold in self._thresholds:
            shut = 1 - threshold.mask()
            for place in self._found.by_name[threshold.gated.name].group.places:
                if place.name in self._found.shapes:
                    index = place.index.to(shut.device)
                    part = shut[index[index >= 0]].sum() / len(index)
                    key = place.name, place.axis
                    gone[key] = gone[key] + part if key in gone else part
        total = self._thresholds[0].value.new_zeros(())
        for name, shape in self._found.shapes.items():
            left = total.new_full((), prod(shape))
            for axis in range(len(shape)):
                if (name, axis) in gone:
                    left = left * (1 - gone[name, axis])
            total = total + left
        return total / self._total

    def target(self, steps: int) -> float:
        """Return the share that may stay after so many steps."""
        return 1 - (1 - self.budget) * min(1.0, steps / max(1.0, RAMP * self.end))

    def step(self) -> None:
        """Count one optimiser step, and move the thresholds.

        Raises:
            TrainingError: The scheme is over.
        """
        self._require_attached()
        if self.steps < self.end:
            self._move()
        self.steps += 1
        if self.steps == self.end:
            self._settle()

    def _move(self) -> None:
        """Let layers exchange channels at the price of a parameter that the loss itself pays, and follow the budget.

        Of the loss's gradient g, averaged, and the share's c, the price p makes g + p c orthogonal to c, so that a step
        along it leaves the share as it is: layers that lose less for a parameter than others do become narrower, those
        become wider. Towards the budget all move in proportion to their costs.
        """
        share = self.share()
        costs = [float(cost) for cost in torch.autograd.grad(share, [one.value for one in self._thresholds])]
        grads = [0.0 if one.value.grad is None else float(one.value.grad) for one in self._thresholds]
        self._mean = [SMOOTH * mean + (1 - SMOOTH) * grad for mean, grad in zip(self._mean, grads, strict=True)]
        square = sum(cost * cost for cost in costs)
        price = max(0.0, -sum(m * c for m, c in zip(self._mean, costs, strict=True)) / max(square, TINY))
        ways = [mean + price * cost for mean, cost in zip(self._mean, costs, strict=True)]
        self._square = SMOOTH * self._square + (1 - SMOOTH) * sum(way * way for way in ways) / len(ways)
        most, scale = RATE / self.end, self._square**0.5 + TINY
        apart, dearest = float(share.detach()) - self.target(self.steps + 1), max(TINY, *map(abs, costs))
        together = max(-CATCH_UP * most, min(CATCH_UP * most, apart * dearest / max(square, TINY)))
        with torch.no_grad():
            for one, way, cost in zip(self._thresholds, ways, costs, strict=True):
                one.value += together * abs(cost) / dearest - most * max(-1.0, min(1.0, way / scale))
                one.value.grad = None
                one.temperature = temperature((self.steps + 1) / self.end)

    @torch.no_grad()
    def _settle(self) -> None:
        """Close what goes, for good: as much as the budget asks for, no more."""
        for name, keep in self.keeps().items():
            one = next(one for one in self._thresholds if one.gated.name == name)
            one.kept = keep.to(one.value.device, one.gated.held[0][0].dtype)

    @torch.no_grad()
    def keeps(self) -> dict[str, Tensor]:
        """Return which channels of each group would stay, (size,) booleans, within the budget.

        All thresholds are moved alike until what is above them is what the budget has room for.
        """
        if self._thresholds[0].kept is not None:
            return {one.gated.name: one.kept.cpu() > 0 for one in self._thresholds if one.kept is not None}
        over = {one.gated.name: (one.deviations() - one.value).cpu() for one in self._thresholds}
        places = torch.cat(list(over.values())).sort().values
        low, high = 0, len(places) - 1  # the highest leaves the least of each
        while low < high:
            middle = (low + high) // 2
            fits = self._size(self._above(over, float(places[middle]))) <= self.budget * self._total
            low, high = (low, middle) if fits else (middle + 1, high)
        return self._above(over, float(places[low]))

    def _above(self, over: Mapping[str, Tensor], shift: float) -> dict[str, Tensor]:
        """Return what is above thresholds that are moved by a number, in widths of kernels, as many of bound groups."""
        widths = {name: self._width(values, int((values > shift).sum())) for name, values in over.items()}
        for bound in self._found.bound:
            widest = max(widths.get(group.name, group.size) for group in bound)
            widths |= {group.name: widest for group in bound if group.name in widths}
        kept = {name: torch.zeros(len(values), dtype=torch.bool, device="cpu") for name, values in over.items()}
        for name, values in over.items():
            kept[name][values.topk(widths[name]).indices] = True
        return kept

    def _width(self, values: Tensor, count: int) -> int:
        widths = widths_of(len(values), self.multiple, LEAST)
        return min((width for width in widths if width >= count), default=len(values))

    def _size(self, kept: Mapping[str, Tensor]) -> int:
        """Return how many parameters stay."""
        plan = self._found.plan(kept)
        stay = {key: len(channels) for key, channels in plan.kept.items()}
        shapes = self._found.shapes.items()
        return sum(prod(stay.get((name, axis), size) for axis, size in enumerate(shape)) for name, shape in shapes)

    def _require_reachable(self) -> None:
        none = {
            one.gated.name: torch.zeros(one.gated.size, dtype=torch.float32, device=one.value.device)
            for one in self._thresholds
        }
        least = self._size(self._above(none, 1.0)) / self._total
        if least > self.budget:
            raise TrainingError(
                "the budget cannot be met",
                got=f"{self.budget:.3f} of the parameters",
                wanted=f"at least {least:.3f}: what cannot go, and a sixteenth of each layer",
                remedy="ask for more, or let twofour.shrink cut residual streams too",
            )

    def finish(self) -> nn.Module:
        """Fold masks and gates into the weights; `cut` makes the small model then.

        Raises:
            TrainingError: A gate is not finite; the scheme stays attached.
        """
        self._require_attached()
        self._require_on_top()
        if bad := [one.gated.name for one in self._thresholds if not bool(one.gated.energy().isfinite().all())]:
            remedy = "lower the learning rate or clip gradients, and train from the last state that was finite"
            error = TrainingError("a gate is not finite", got="NaN or infinity", wanted="numbers", remedy=remedy)
            raise error.for_layer(bad[0])
        kept = self.keeps()
        self._settle()
        found = Learned(self._found.plan(kept), {name: (len(keep), int(keep.sum())) for name, keep in kept.items()}, ())
        self._let_go(parametrised=True)
        leave(self.model, found)
        return self.model

    def remove(self) -> nn.Module:
        """Take the thresholds off; batch norms keep the scales that they have. See `Scheme.remove`."""
        self._let_go(parametrised=False)
        return self.model

    def _let_go(self, *, parametrised: bool) -> None:
        self._end()
        for slot in self._slots.values():
            slot.restore(parametrised=parametrised)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold beside the states of model and optimiser, which hold the gates."""
        kept = [one.kept for one in self._thresholds]
        return {
            "plan": self._plan(),
            "steps": self.steps,
            "values": [float(one.value.detach()) for one in self._thresholds],
            "moments": [*self._mean, self._square],
            "kept": [None if keep is None else keep.cpu() for keep in kept],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            TrainingError: The state is of other thresholds, or the scheme is over.
        """
        self._require_attached()
        if set(state) != set(self.state_dict()) or state["plan"] != self._plan():
            raise TrainingError(
                "the state is of other thresholds",
                got=str(state.get("plan", f"keys {', '.join(map(str, state))}"))[:400],
                wanted=str(self._plan())[:400],
                remedy="attach with the budget, steps and model of the run that is resumed",
            )
        self.steps = int(state["steps"])
        *self._mean, self._square = state["moments"]
        for one, value, kept in zip(self._thresholds, state["values"], state["kept"], strict=True):
            with torch.no_grad():
                one.value.fill_(value)
            one.temperature = temperature(min(1.0, self.steps / self.end))
            one.kept = None if kept is None else kept.to(one.value.device)

    def _plan(self) -> dict[str, Any]:
        return {"steps": self.end, "budget": self.budget, "multiple": self.multiple, "layers": list(self.layers)}


def _require_budget(budget: object, share: object = 1.0) -> None:
    good = all(isinstance(n, int | float) and not isinstance(n, bool) for n in (budget, share))
    if not (good and 0 < budget < 1 and 0 < share <= 1):  # type: ignore[operator]
        raise TrainingError(
            "the numbers of the thresholds are impossible",
            got=f"budget={budget!r}, share={share!r}",
            wanted="0 < budget < 1, 0 < share <= 1",
            remedy="budget=0.5 lets half of the parameters stay",
        )
