"""The handle of `attach`: it follows the optimiser's steps, moves the masks and takes everything off again."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from twofour import masks
from twofour.errors import PatternError, TrainingError, cut
from twofour.kernels import available
from twofour.layers import CARRIED, Attachment, PrunableWeight, take_off
from twofour.patterns import Transposable
from twofour.training.both_ways.linear import Ways
from twofour.training.choice import Choice, Plan

_log = logging.getLogger("twofour.training")

PATTERN = Transposable()


class BothWays(Attachment):
    """Sparse weights in the forward pass and in the data gradient, while it is attached.

    Attributes:
        model: The model.
        plan: How each layer runs.
        steps: Steps of the optimiser so far.
        flips: Share of the mask's places that changed when the masks were last chosen; None before.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Sequence[PrunableWeight],
        plan: Plan,
        *,
        every: int | None,
        begin: int,
        decay: float,
        masked: bool,
    ) -> None:
        super().__init__(model)
        self.plan, self.steps, self.layers = plan, 0, tuple(weight.name for weight in weights)
        self.flips: float | None = None
        self._weights, self._every, self._first, self._decay = list(weights), every, begin, decay
        self._masked = masked
        self._hooks = [
            register_optimizer_step_pre_hook(partial(_before_step, weakref.ref(self))),
            register_optimizer_step_post_hook(partial(_after_step, weakref.ref(self))),
        ]
        self._begin(Ways.title, [weight.module for weight in self._weights])
        if begin == 0:
            self._start()

    def __str__(self) -> str:
        mask = "fixed mask" if self._every is None else f"mask chosen every {self._every} steps"
        return f"2:4 both ways, {mask}, {self.steps} steps{'' if self.attached else ', over'}\n{self.plan}"

    def masks(self) -> dict[str, Tensor]:
        """Return the masks in force, by parameter name: bool (out, in)."""
        return {weight.name: keep for weight, ways in self._layers() if (keep := ways.keep) is not None and ways.active}

    @property
    def nbytes(self) -> int:
        """Bytes held beside the dense model now: packed weights and masks; estimates of gradients come and go."""
        return sum(
            ways.layouts.nbytes + (0 if ways.keep is None or not ways.active else ways.keep.nbytes)
            for _, ways in self._layers()
        )

    def finish(self) -> nn.Module:
        """Make the model plain and masked, as `twofour.prune` would have; returns it. The handle is over.

        Raises:
            PatternError: A weight holds NaN or infinity; the handle stays attached.
        """
        self._require_attached()
        if self._first < 0:  # the control has no masks
            return self.remove()
        if not all(ways.active for _, ways in self._layers()):
            self._start()
        self._take_off()
        if self._every is not None:
            masks.attach_all(
                [(weight, ways.keep.clone(), PATTERN) for weight, ways in self._removed if ways.keep is not None]
            )
        return self.model

    def remove(self) -> nn.Module:
        """Take everything off; the weights stay as the optimiser left them. Masks that the model came with stay."""
        self._require_attached()
        fixed = self._every is None and not self._masked and any(ways.active for _, ways in self._layers())
        self._take_off()
        if fixed and any(ways.keep is not None for _, ways in self._removed):
            masks.detach(self.model)
        return self.model

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs beside model and optimiser.

        Steps, masks, where the random numbers are, and the kernels: another one would sum in another order.
        """
        return {
            "steps": self.steps,
            "masks": {name: keep.clone() for name, keep in self.masks().items()},
            "calls": {weight.name: ways.calls for weight, ways in self._layers()},
            "choices": {
                weight.name: {product: asdict(choice) for product, choice in ways.plan.choices.items()}
                for weight, ways in self._layers()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; load the model's own state first.

        The kernels become those of the interrupted run, where this machine has them all; else a log line says so.

        Raises:
            TrainingError: The state is of other layers, or none of ours.
        """
        self._require_attached()
        self._require_ours(state)
        self.steps = int(state["steps"])
        chosen = {name: keep.to(torch.bool) for name, keep in state["masks"].items()}
        for weight, ways in self._layers():
            ways.calls = int(state["calls"][weight.name])
        self._follow(state.get("choices", {}))
        if chosen:
            self._put(chosen)

    def _require_ours(self, state: Mapping[str, Any]) -> None:
        names = {weight.name: weight for weight in self._weights}
        calls, kept = (state.get(part) if isinstance(state, Mapping) else None for part in ("calls", "masks"))
        if (
            not (isinstance(calls, Mapping) and isinstance(kept, Mapping) and type(state.get("steps")) is int)
            or set(calls) != set(names)
            or any(name not in names or keep.shape != names[name].parameter.shape for name, keep in kept.items())
        ):
            raise TrainingError(
                "the state is of another model",
                got=cut(f"layers {', '.join(sorted(calls))}" if isinstance(calls, Mapping) else repr(state), 200),
                wanted=cut(", ".join(sorted(names)), 200),
                remedy="attach with the arguments of the interrupted run, then load what its state_dict() returned",
            )

    def _follow(self, choices: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
        """Take over the kernels of an interrupted run."""
        given = {name: {product: Choice(**choice) for product, choice in of.items()} for name, of in choices.items()}
        wanted = {choice.kernel for of in given.values() for choice in of.values() if choice.sparse}
        here = {kernel.name for kernel in (*available("nm_matmul"), *available("nm_matmul", "cuda"))}
        if not wanted <= here:
            _log.warning(
                "the interrupted run's kernels are not here (%s): its bits will not come back", ", ".join(wanted - here)
            )
            return
        for weight, ways in self._layers():
            if weight.name in given:
                ways.follow(replace(ways.plan, choices=given[weight.name]))
        self.plan = replace(self.plan, layers=tuple(ways.plan for _, ways in self._layers()))

    def _layers(self) -> list[tuple[PrunableWeight, Ways]]:
        if not self.attached:
            return self._removed
        return [(weight, weight.module.__dict__[CARRIED]) for weight in self._weights]

    def _take_off(self) -> None:
        self._removed = self._layers()
        self._end()
        for hook in self._hooks:
            hook.remove()
        for weight in self._weights:
            take_off(weight.module)

    def _start(self) -> None:
        """Put the first masks in force: those the model has, or the largest magnitudes."""
        have = {name: mask.keep for name, mask in masks.of(self.model).items()}
        self._put(
            {weight.name: have[weight.name] if weight.name in have else _best(weight) for weight in self._weights}
        )

    @torch.no_grad()
    def _put(self, chosen: Mapping[str, Tensor]) -> None:
        """Put masks in force: on the parameters when they are fixed, in the layers alone when they move."""
        layers = [(weight, ways) for weight, ways in self._layers() if ways.plan.choices and weight.name in chosen]
        if self._every is None:
            masks.attach_all([(weight, chosen[weight.name], PATTERN) for weight, _ in layers])
        found = masks.of(self.model)
        moved, places = 0, 0
        for weight, ways in layers:
            keep = found[weight.name].keep if self._every is None else chosen[weight.name]
            if ways.active and ways.keep is not None:
                moved, places = moved + int((ways.keep != keep).sum()), places + keep.numel()
            ways.put(keep)
        self.flips = moved / places if places else None

    def _refresh(self) -> None:
        self._put({weight.name: _best(weight) for weight in self._weights})


def _best(weight: PrunableWeight) -> Tensor:
    try:
        return PATTERN.project(weight.parameter.detach(), absolute=True)
    except PatternError as error:
        raise error.for_layer(weight.name) from None


def _stepped(handle: BothWays, optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


@torch.no_grad()
def _before_step(
    reference: weakref.ref[BothWays], optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Add the masked weight decay to the gradients, once a step: decay * (1 - mask) * w (Zhou et al. 2021, eq. 9)."""
    handle = reference()
    if handle is None or handle._every is None or handle._decay == 0:
        return
    stepped = _stepped(handle, optimizer)
    for weight, ways in handle._layers():
        parameter = weight.parameter
        if ways.active and ways.keep is not None and id(parameter) in stepped and parameter.grad is not None:
            parameter.grad.add_(parameter * ~ways.keep, alpha=handle._decay)


@torch.no_grad()
def _after_step(
    reference: weakref.ref[BothWays], optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    handle = reference()
    if handle is None or not handle.attached:
        return
    stepped = _stepped(handle, optimizer)
    layers = handle._layers()
    for weight, ways in layers:
        if id(weight.parameter) in stepped:
            ways.forget_values()
    if id(layers[0][0].parameter) not in stepped:  # of several optimisers, the one with the first layer counts
        return
    handle.steps += 1
    if handle.steps == handle._first:
        handle._start()
    elif (
        handle._every is not None
        and handle.steps > handle._first
        and (handle.steps - handle._first) % handle._every == 0
    ):
        handle._refresh()
