"""Learned proportions: gates on channels and residual blocks, pulled to exact zeros while a model trains, then cut.

The gate of a channel is the scale of its batch norm (Liu et al. 2017, "Learning Efficient Convolutional Networks
through Network Slimming", arXiv 1708.06519) or, where there is none, a factor of the columns that read it: hidden units
and heads. The gate of a block multiplies its branch (Huang and Wang 2018, "Data-Driven Sparse Structure Selection",
arXiv 1707.01213). After each optimiser step all gates take the proximal step of an L1 penalty, the soft threshold,
which gives exact zeros. How many channels of a layer go follows from its own gates: those that hold the least energy
(arXiv 2003.04566). So one strength is given and no ratio.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from twofour.errors import TrainingError, integer_from
from twofour.layers import require_unwrapped
from twofour.structure import shrink
from twofour.structure.coupling.group import some
from twofour.structure.shrink.widths import widths_of
from twofour.training.schemes.base import Scheme, require_dense, require_free
from twofour.training.schemes.gated import LEAST, Gated, block_gates, channel_gates, weigh
from twofour.training.schemes.learned import Learned, cut, learned, leave
from twofour.training.schemes.slots import Slot

DELTA = 1e-3
"""Share of a layer's sum of squared gates that may go (arXiv 2003.04566)."""

MUCH = 0.9
"""Share of a group's channels from which it is said that so many go."""

_log = logging.getLogger("twofour.training")

__all__ = ["Gates", "Learned", "attach", "cut", "during", "learned"]


def attach(
    model: nn.Module,
    example: Any,
    *,
    steps: int,
    strength: float = 2.0,
    delta: float = DELTA,
    blocks: bool = True,
    priced: bool = True,
    multiple: int | None = None,
) -> Gates:
    """Put gates on a dense model; build the optimiser afterwards, and call `step()` after each of its steps.

    Keep what is returned: the gates are pulled as long as it is there. What they learned stays with the model in memory
    and is in no file: `cut` before saving.

    Args:
        model: A dense model, fresh or trained.
        example: Input of one forward pass, as `twofour.shrink` takes it.
        steps: Optimiser steps during which gates are pulled. What goes is settled then: it stays closed, and the gates
            that stay are pulled no more, so that training on undoes what the pull took from them.
        strength: How far a gate that the loss does not hold is pulled in all at a constant learning rate, in units of
            the mean gate of its layer at the beginning. The pull follows the learning rate, so a cosine halves it.
        delta: Share of the sum of squared gates of a layer that may go in the end.
        blocks: Whether residual blocks have gates too.
        priced: Whether gates are pulled in proportion to the parameters that go with a channel, 1 on average over the
            groups (Gordon et al. 2018, MorphNet, arXiv 1711.06798, section 3.2); else all alike.
        multiple: As in `twofour.shrink`: widths are rounded up to multiples of it.

    Example:
        >>> gates = twofour.training.gates.attach(model, x, steps=1000)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> for x, y in loader: loss(model(x), y).backward(); optimizer.step(); gates.step()
        >>> small = twofour.training.gates.cut(gates.finish(), x)

    Raises:
        TrainingError: A number is impossible, the model is masked, another scheme is at work, or nothing can have
            gates.
        ShrinkError: The model does not run on the example or cannot be captured.
    """
    require_free(model)
    require_unwrapped(model, TrainingError)
    require_dense(model)
    _require_numbers(strength, delta)
    integer_from(1, "`steps` is impossible", TrainingError, "steps=len(loader) * epochs", steps=steps)
    found = shrink.channels(model, example)
    inner = [group for group in found.groups if group.exact and not group.group.stream]
    gated = channel_gates(model, inner, example)
    if priced:
        weigh(gated, found)
    gated += block_gates(model, found, example) if blocks else []
    if not gated:
        raise TrainingError(
            "nothing can have gates",
            reasons=[str(uncut) for uncut in found.uncut],
            got=f"{len(found.groups)} groups of channels, none of them between two layers",
            wanted="channels between two layers, or residual blocks",
            remedy="twofour.structure.shrink.channels(model, example) says what can be cut",
        )
    return Gates(model, found, gated, steps, strength, delta, multiple)


def during(
    example: Any, strength: float = 2.0, *, share: float = 1.0, **options: Any
) -> Callable[[nn.Module, int], Gates]:
    """Return what attaches gates to a run, for `finetune(..., scheme=)`; `cut(model, example)` comes after it.

    Args:
        example: Input of one forward pass.
        strength: As for `attach`.
        share: Share of the run's steps during which gates are pulled, above 0 and at most 1.
        options: As for `attach`, but for `steps`.

    Raises:
        TrainingError: A number is impossible.
    """
    _require_numbers(strength, options.get("delta", DELTA), share)
    return lambda model, steps: attach(model, example, steps=max(1, int(share * steps)), strength=strength, **options)


class Gates(Scheme):
    """Gates at work; the parameters are the model's own, and a factor for each gate that is no batch norm's."""

    def __init__(
        self,
        model: nn.Module,
        found: shrink.Channels,
        gated: Sequence[Gated],
        steps: int,
        strength: float,
        delta: float,
        multiple: int | None,
    ) -> None:
        super().__init__(model)
        self.layers = tuple(one.name for one in gated)
        self.end, self.strength, self.delta, self.multiple = steps, float(strength), delta, multiple
        self.steps, self._peaks, self._missing = 0, dict[int, float](), True
        self._closed: dict[str, Tensor] = {}
        self._found, self._gated = found, list(gated)
        self._owners: dict[int, list[Gated]] = {}  # several: parts of a concatenation under one batch norm
        for one in self._gated:
            for key in dict.fromkeys(id(parameter) for parameter, _ in one.held):
                self._owners.setdefault(key, []).append(one)
        self.units = {one.name: float((one.energy() / len(one.held)).sqrt().mean()) for one in self._gated}
        self._slots = self._parametrise()
        modules = [slot.module for slot in self._slots.values()]
        self._begin("gates", modules or [model])
        me = weakref.ref(self)
        self._hook = register_optimizer_step_post_hook(lambda optimizer, *_: _after_step(me(), optimizer))

    def _parametrise(self) -> dict[tuple[int, str], Slot]:
        slots: dict[tuple[int, str], Slot] = {}
        try:
            for (module, attribute), scale in (pair for one in self._gated for pair in one.scales):
                slot = slots.get((id(module), attribute)) or Slot(module, attribute)
                slot.parametrise(scale)
                slots[id(module), attribute] = slot
        except BaseException:
            for slot in slots.values():
                slot.restore(parametrised=False)
            raise
        return slots

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that hold gates, for an optimiser that gives them a learning rate of their own."""
        return list({id(p): p for one in self._gated for p, _ in one.held}.values())

    def step(self) -> None:
        """Count one optimiser step.

        Raises:
            TrainingError: The optimiser does not hold all gates, or the scheme is over.
        """
        self._require_attached()
        if self._missing:
            raise TrainingError(
                "the optimiser does not hold every gate, so none was pulled",
                got="an optimiser that was made before the gates, or over other parameters, or not stepped yet",
                wanted="an optimiser over model.parameters() or with gates.parameters() in it",
                remedy="attach the gates first, then make the optimiser; call gates.step() after optimizer.step()",
            )
        self.steps += 1
        if self.steps == self.end:
            self._settle()

    def _settle(self) -> None:
        """Close what goes, for good: the loss would open it again where nothing pulls."""
        kept, layers = self.keeps()
        for one in self._gated:
            gone = torch.tensor([one.name in layers], dtype=torch.bool, device="cpu") if one.block else ~kept[one.name]
            if bool(gone.any()):
                self._closed[one.name] = gone
                one.close(gone)

    def pull(self, optimizer: Optimizer) -> None:
        """Take the proximal step of the gates that an optimiser has just stepped; once settled, hold what is closed."""
        held = [(number, group, p) for number, group in enumerate(optimizer.param_groups) for p in group["params"]]
        mine = [(number, group, p) for number, group, p in held if id(p) in self._owners]
        if not mine:
            return
        self._missing = len({id(p) for _, _, p in mine}) < len(self._owners)
        for number, group, parameter in mine:
            rate = float(group["lr"])
            known = (rate, self._peaks.get(number, 0.0), group.get("initial_lr", 0.0), group.get("max_lr", 0.0))
            self._peaks[number] = peak = max(map(float, known))
            for one in self._owners[id(parameter)] if self.steps < self.end and peak > 0 and not self._missing else ():
                one.pull(parameter, self.strength * one.weight * self.units[one.name] * rate / peak / self.end)
            for one in self._owners[id(parameter)]:
                if one.name in self._closed:
                    one.close(self._closed[one.name])

    def keeps(self) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """Return which channels of each group would stay now, (size,) booleans, and which blocks would go."""
        of_groups = {one.name: one for one in self._gated if not one.block}
        kept = {name: self._kept(one) for name, one in of_groups.items()}
        for bound in self._found.bound:  # one number counts them: all are as wide as the widest
            widths = [int(kept[group.name].sum()) if group.name in kept else group.size for group in bound]
            for group in bound:
                if group.name in kept:
                    kept[group.name] = self._kept(of_groups[group.name], max(widths))
        return kept, tuple(one.name for one in self._gated if one.block and not bool(one.energy().any()))

    def _kept(self, one: Gated, least: int = 0) -> Tensor:
        """Drop the most channels whose squares sum up to `delta` of the layer's at most; round the width up.

        At least so many stay as `least` says, all where there are fewer.
        """
        energy = one.energy()
        order = energy.argsort(stable=True)
        may_go = int((energy[order].cumsum(0) <= self.delta * energy.sum()).sum())
        widths = widths_of(one.size, self.multiple, LEAST)
        width = min((width for width in widths if width >= one.size - may_go), default=one.size)
        width = min(max(width, least), one.size)
        keep = torch.zeros(one.size, dtype=torch.bool, device="cpu")
        keep[order[one.size - width :]] = True
        return keep

    def finish(self) -> nn.Module:
        """Close the gates of what goes and fold all gates into the weights; `cut` makes the small model then.

        Raises:
            TrainingError: A gate is not finite; the scheme stays attached.
        """
        self._require_attached()
        self._require_on_top()
        if bad := [one.name for one in self._gated if not bool(one.energy().isfinite().all())]:
            remedy = "lower the learning rate or clip gradients, and train from the last state that was finite"
            error = TrainingError("a gate is not finite", got="NaN or infinity", wanted="numbers", remedy=remedy)
            raise error.for_layer(bad[0])
        kept, layers = self.keeps()
        widths = {name: (len(keep), int(keep.sum())) for name, keep in kept.items()}
        found = Learned(self._found.plan(kept, layers), widths, layers)  # first: it may refuse
        self._warn_of_much(widths)
        for one in self._gated:
            if one.name in kept:
                one.close(~kept[one.name])
        self._let_go(parametrised=True)
        leave(self.model, found)
        return self.model

    def _warn_of_much(self, widths: Mapping[str, tuple[int, int]]) -> None:
        """Say which groups end at the least that may stay, or lose more than `MUCH`: so much may cost accuracy."""
        least = {name: widths_of(before, self.multiple, LEAST)[-1] for name, (before, _) in widths.items()}
        few = {
            name: (before, after)
            for name, (before, after) in widths.items()
            if after < before and (after == least[name] or after < (1 - MUCH) * before)
        }
        if few:
            told = [f"{name} {before} -> {after}" for name, (before, after) in few.items()]
            _log.warning(
                "%d of %d groups of channels end at the least that may stay, or lose more than %.0f %%: %s; "
                "strength=%g may be too much, half of it cuts less",
                *(len(few), len(widths), 100 * MUCH, some(told), self.strength),
            )

    def remove(self) -> nn.Module:
        """Take the gates off; batch norms keep the scales that they have. See `Scheme.remove`."""
        self._let_go(parametrised=False)
        return self.model

    def _let_go(self, *, parametrised: bool) -> None:
        self._end()
        self._hook.remove()
        for slot in self._slots.values():
            slot.restore(parametrised=parametrised)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold beside the states of model and optimiser, which hold the gates."""
        known = {"peaks": dict(self._peaks), "units": dict(self.units), "closed": dict(self._closed)}
        return {"plan": self._plan(), "steps": self.steps, **known}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            TrainingError: The state is of other gates, or the scheme is over.
        """
        self._require_attached()
        if not {"plan", "steps", "peaks", "units", "closed"} <= set(state) or state["plan"] != self._plan():
            raise TrainingError(
                "the state is of other gates",
                got=str(state.get("plan", f"keys {', '.join(map(str, state))}"))[:400],
                wanted=str(self._plan())[:400],
                remedy="attach with the strength, steps and model of the run that is resumed",
            )
        self.steps, self.units = int(state["steps"]), dict(state["units"])
        self._peaks = {int(number): float(peak) for number, peak in state["peaks"].items()}
        self._closed = {str(name): gone.cpu() for name, gone in state["closed"].items()}

    def _plan(self) -> dict[str, Any]:
        numbers = {"steps": self.end, "strength": self.strength, "delta": self.delta, "multiple": self.multiple}
        return {**numbers, "layers": list(self.layers), "weights": [one.weight for one in self._gated]}


def _after_step(gates: Gates | None, optimizer: Optimizer) -> None:
    if gates is not None and gates.attached:
        gates.pull(optimizer)


def _require_numbers(strength: object, delta: object, share: object = 1.0) -> None:
    good = all(isinstance(n, int | float) and not isinstance(n, bool) for n in (strength, delta, share))
    if not (good and 0 < strength < float("inf") and 0 <= delta < 1 and 0 < share <= 1):  # type: ignore[operator]
        raise TrainingError(
            "the numbers of the gates are impossible",
            got=f"strength={strength!r}, delta={delta!r}, share={share!r}",
            wanted="a positive strength, 0 <= delta < 1, 0 < share <= 1",
            remedy="strength=2.0 cuts much, 1.0 less",
        )
