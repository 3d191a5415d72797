"""The handle of `attach`: it follows the optimiser's steps, moves the masks and takes everything off again."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from twofour import masks
from twofour.errors import TrainingError, cut
from twofour.kernels import available
from twofour.kernels.nm_conv import native_conv_rows
from twofour.kernels.nm_sddmm import row_for
from twofour.layers import PrunableWeight, put_over, stored_shape
from twofour.masks import hooks
from twofour.packing import kept
from twofour.training import fused
from twofour.training.both_ways.estimate import SAMPLED, Estimate
from twofour.training.both_ways.first_masks import PATTERN, best_masks, first_masks, require_full, require_masked
from twofour.training.both_ways.kept_linear import KeptLinear, put_places, require_whole
from twofour.training.both_ways.kept_states import require_same_masks
from twofour.training.both_ways.masked_weight import MaskedWeight
from twofour.training.both_ways.memory import Memory, memory
from twofour.training.both_ways.watched import STATES, install
from twofour.training.schemes.sr_ste import pruned_values
from twofour.training.sparse_linear import Choice, LayerPlan, LinearProducts
from twofour.training.sparse_linear.handle import ProductsHandle, require_same
from twofour.training.sparse_linear.implementations import ONEDNN, REORDERED, TORCH

_log = logging.getLogger("twofour.training")

TITLE = "2:4 both ways"


def mask_of(products: LinearProducts) -> MaskedWeight:
    """Return the source of a layer's forward product and data gradient."""
    return cast(MaskedWeight, products.sources["forward"])


def estimate_of(products: LinearProducts) -> Estimate:
    """Return the source of a layer's weight gradient."""
    return cast(Estimate, products.sources["weight"])


class BothWays(ProductsHandle):
    """Sparse weights in the forward pass and in the data gradient, while it is attached.

    Attributes:
        model: The model.
        plan: How each layer runs.
        layers: Names of the weights.
        state: "dense", or "packed" where parameters hold kept values alone once the masks are in force.
        steps: Steps of the optimiser so far.
        flips: Share of the mask's places that changed when the masks were last chosen; None before.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Sequence[PrunableWeight],
        skipped: Mapping[str, str],
        *,
        every: int | None,
        begin: int,
        first: Mapping[str, Tensor],
        decay: float,
        masked: bool,
        state: str,
        activations: Mapping[str, nn.Module],
        arguments: Mapping[str, Any],
        measured: bool,
    ) -> None:
        super().__init__(model, TITLE, {weight.name: weight.module for weight in weights}, skipped, activations)
        self.steps = 0
        self._owed: dict[str, int] = {}  # layers that lost a mask as a state was loaded -> the weight's version then
        self.flips: float | None = None
        self._weights, self._every, self._first, self._decay = list(weights), every, begin, decay
        self._masked, self.state, self._arguments = masked, state, arguments
        self._measured = measured  # alone, and whether layers have masks followed from it
        self._follow_optimizers()
        self._begin(TITLE, [weight.module for weight in self._weights])
        if first:
            self._put(first)

    def _follow_optimizers(self) -> None:
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        install()  # not by `_start` inside a step: torch iterates over its hooks then
        hooks.install()
        self._hooks = [
            register_optimizer_step_pre_hook(_weakly(self._before_step)),
            register_optimizer_step_post_hook(_weakly(self._after_step)),
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_optimizers", "_hooks")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Come out of a copy or a pickle: the copy of its model is what it handles."""
        vars(self).update(state)
        self._follow_optimizers()
        if self.attached:
            self._begin(self.title, self._held)

    def __str__(self) -> str:
        mask = "fixed mask" if self._every is None else f"mask chosen every {self._every} steps"
        mask += ", kept values alone" if self.state == "packed" else ""
        return f"2:4 both ways, {mask}, {self.steps} steps{'' if self.attached else ', over'}\n{self.plan}"

    def masks(self) -> dict[str, Tensor]:
        """Return the masks in force, by parameter name: bool, of the dense parameters' shapes."""
        return {
            weight.name: keep if mask_of(products).places is not None else keep.view(weight.parameter.shape)
            for weight, products in self._pairs()
            if (keep := mask_of(products).mask()) is not None
        }

    @property
    def memory(self) -> Memory:
        """Bytes of weights and layouts, and of the state of optimisers that have stepped them, now."""
        masked = [mask_of(products) for products in self._products().values()]
        parameters = [weight.parameter for weight in self._weights]
        layouts = sum(one.layout_nbytes for one in masked)
        return memory(parameters, self.nbytes - layouts, layouts, self._optimizers)

    @property
    def nbytes(self) -> int:
        """Bytes held beside the dense model now: packed weights and masks; estimates of gradients come and go."""
        return sum(mask_of(products).nbytes for products in self._products().values())

    def finish(self) -> nn.Module:
        """Make the model plain and masked, as `twofour.prune` would have; returns it. The handle is over.

        Raises:
            PatternError: A weight holds NaN or infinity; the handle stays attached.
        """
        self._require_attached()
        if self._first < 0:  # the control has no masks
            return self.remove()
        if len(self.masks()) < len(weights := self._masked_weights()):
            self._start()
        chosen = self.masks()
        self._take_off()
        if self._every is not None or self.state == "packed":
            masks.attach_all([(weight, chosen[weight.name].clone(), PATTERN) for weight in weights])
        return self.model

    def remove(self) -> nn.Module:
        """Take everything off; the weights stay as the optimiser left them. Masks that the model came with stay."""
        self._require_attached()
        chosen = self.masks()
        self._take_off()
        if self.state == "packed" and self._masked:
            masks.attach_all([(weight, chosen[weight.name], PATTERN) for weight in self._weights if chosen])
        elif self._every is None and not self._masked and chosen:
            masks.detach(self.model)
        return self.model

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs beside model and optimiser.

        Steps, masks, where the random numbers are, and the kernels: another one would sum in another order; so would
        another implementation of a function.
        """
        return {
            "steps": self.steps,
            "masks": {name: keep.clone() for name, keep in self.masks().items()},
            "calls": {name: estimate_of(products).calls for name, products in self._products().items()},
            "choices": {
                name: {product: asdict(choice) for product, choice in products.plan.choices.items()}
                for name, products in self._products().items()
            },
            "types": {name: products.plan.dtype for name, products in self._products().items()},
            "unmasked": [name for name, products in self._products().items() if products.plan.unmasked],
            "functions": fused.state_of(self.model),
            "arguments": dict(self._arguments),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; load the model's own state after it, then the optimiser's.

        The kernels become those of the interrupted run, where this machine has them all; else a log line says so.
        Layers that it left without a mask, since none of their products gained, have none here either.

        Raises:
            TrainingError: The state is of other layers or arguments, or none of ours.
        """
        self._require_attached()
        self._require_ours(state)
        chosen = {name: keep.to(torch.bool) for name, keep in state["masks"].items()}
        if self.state == "packed":
            require_full(chosen)
            require_masked(state.get("unmasked", ()))
        self.steps = int(state["steps"])
        for name, products in self._products().items():
            estimate_of(products).calls = int(state["calls"][name])
        # Earlier versions, which do not name any, masked all layers once masks were in force.
        earlier = [] if chosen or self.steps < self._first else None
        self._mask_as(state.get("unmasked", earlier))
        self._follow(state.get("choices", {}), state.get("types", {}))
        fused.load_state(self.model, state.get("functions", {}))
        if chosen:
            self._put(chosen)

    def _require_ours(self, state: Mapping[str, Any]) -> None:
        names = {weight.name: weight for weight in self._weights}
        calls, kept = (state.get(part) if isinstance(state, Mapping) else None for part in ("calls", "masks"))
        if (
            not (isinstance(calls, Mapping) and isinstance(kept, Mapping) and type(state.get("steps")) is int)
            or not all(isinstance(state.get(part, {}), Mapping) for part in ("choices", "types", "functions"))
            or not isinstance(state.get("unmasked", []), list)
            or set(calls) != set(names)
            or any(
                name not in names or getattr(keep, "shape", None) != stored_shape(names[name].parameter)
                for name, keep in kept.items()
            )
        ):
            raise TrainingError(
                "the state is of another model",
                got=cut(f"layers {', '.join(sorted(calls))}" if isinstance(calls, Mapping) else repr(state), 200),
                wanted=cut(", ".join(sorted(names)), 200),
                remedy="attach with the arguments of the interrupted run, then load what its state_dict() returned",
            )
        require_same(self._arguments, state.get("arguments", {}))

    def _mask_as(self, unmasked: Sequence[str] | None) -> None:
        """Have the layers without a mask that an interrupted run had; None: it does not say."""
        if unmasked is None:
            return
        self._measured = False
        for weight, products in self._pairs():
            had, without = not products.plan.unmasked, weight.name in unmasked
            products.leave_unmasked(without)
            if without and had and (masked := mask_of(products)).keep is not None:
                masked.lift()
                if self._every is None:
                    masks.detach(weight.module)
                    self._owed[weight.name] = weight.parameter._version

    def _require_loaded(self, stepped: set[int] | None = None) -> None:
        """Refuse to go on with weights that were loaded under a mask that the interrupted run did not have.

        Args:
            stepped: Ids of the parameters that are asked for; None: all.
        """
        for weight in self._weights if self._owed else ():
            if stepped is not None and id(weight.parameter) not in stepped:
                continue
            if self._owed.pop(weight.name, None) == (version := weight.parameter._version):
                self._owed[weight.name] = version
                raise TrainingError(
                    "a layer has lost the values that it had without a mask",
                    got="the model's state, loaded before the handle's",
                    wanted="handle.load_state_dict, then model.load_state_dict: it had a mask here and none there",
                    remedy="load the model's state again now, then the optimiser's",
                    layer=weight.name,
                )

    def _follow(self, choices: Mapping[str, Mapping[str, Mapping[str, Any]]], types: Mapping[str, str]) -> None:
        """Take over the kernels of an interrupted run."""
        given = {name: {product: Choice(**choice) for product, choice in of.items()} for name, of in choices.items()}
        wanted = {choice.kernel for of in given.values() for choice in of.values() if choice.sparse}
        rows = *available("nm_matmul"), *available("nm_matmul", "cuda"), *native_conv_rows()
        here = {kernel.name for kernel in rows if kernel.unavailable() is None}
        if not wanted <= here:
            _log.warning(
                "the interrupted run's kernels are not here (%s): its bits will not come back", ", ".join(wanted - here)
            )
            return
        for name, products in self._products().items():
            if name in given:
                plan = replace(products.plan, dtype=types.get(name, products.plan.dtype))
                products.follow(replace(plan, choices=self._known(given[name], plan)))

    def _known(self, given: Mapping[str, Choice], plan: LayerPlan) -> dict[str, Choice]:
        """Return choices without an exact weight gradient that is for another state or machine: then the plan's own."""
        weight = given["weight"]
        sampled = [row_for(dtype).name for dtype in SAMPLED] if self.state == "packed" else []
        names = (TORCH, ONEDNN, REORDERED, *sampled)
        if weight.sparse or weight.kernel in names:
            return dict(given)
        _log.warning("`%s`: %s is not here: the interrupted run's bits will not come back", plan.name, weight.kernel)
        return {**given, "weight": plan.choices["weight"]}

    def _take_off(self) -> None:
        self._require_loaded()
        for weight in self._weights:  # all of it or nothing
            if mask_of(self._products()[weight.name]).places is not None:
                require_whole(weight.module, weight.name)
        if self._every is None:  # an update without an optimiser's step may have filled pruned places
            masks.enforce(self.model)
        super()._take_off()
        STATES.release(weight.parameter for weight in self._weights)
        for weight, products in zip(self._weights, self._removed.values(), strict=True):
            if mask_of(products).places is not None:
                put_places(weight.parameter, mask_of(products), None)
        for hook in self._hooks:
            hook.remove()

    def _pairs(self) -> list[tuple[PrunableWeight, LinearProducts]]:
        return list(zip(self._weights, self._products().values(), strict=True))

    def _masked_weights(self) -> list[PrunableWeight]:
        """Return the weights that have masks, or will: a layer whose products gain too little has none."""
        return [weight for weight, products in self._pairs() if not products.plan.unmasked]

    def _start(self) -> None:
        """Put the first masks in force."""
        self._put(first_masks(self.model, self._masked_weights()))

    @torch.no_grad()
    def _put(self, chosen: Mapping[str, Tensor]) -> None:
        """Put masks in force: on the parameters when they are fixed, in the layers alone when they move."""
        if self.state == "packed":
            self._put_places(chosen)
            return
        if self._every is None:
            masks.attach_all(
                [(weight, chosen[weight.name], PATTERN) for weight in self._weights if weight.name in chosen]
            )
            found = masks.of(self.model)
            chosen = {name: found[name].keep for name in chosen}
        moved, places, products = 0, 0, self._products()
        for name, keep in chosen.items():
            masked = mask_of(products[name])
            if (before := masked.keep) is not None:
                moved, places = moved + int((before != keep.view(before.shape)).sum()), places + keep.numel()
            masked.put(keep)
        self.flips = moved / places if places else None

    def _put_places(self, chosen: Mapping[str, Tensor]) -> None:
        """Have parameters hold what the masks keep alone; one that is there already is moved."""
        require_full(chosen)
        products = self._products()
        for weight in self._weights:
            if (keep := chosen.get(weight.name)) is None:
                continue
            masked, places = mask_of(products[weight.name]), kept.places_of(keep)
            if masked.places is not None and torch.equal(masked.places.indices, places.indices):
                masked.forget_values()
                continue
            masks.detach(weight.module)
            put_places(weight.parameter, masked, places)
            put_over(weight.module, KeptLinear, products[weight.name])

    def _before_step(self, optimizer: Optimizer, stepped: set[int]) -> None:
        """Add the masked weight decay of SR-STE to the gradients, once a step."""
        self._require_loaded(stepped)
        if self._measured and any(id(weight.parameter) in stepped for weight in self._weights):
            require_same_masks()
        if not self.attached or self._every is None or self._decay == 0:
            return
        keep = self.masks()
        for weight in self._weights:
            parameter = weight.parameter
            if weight.name in keep and id(parameter) in stepped and parameter.grad is not None:
                parameter.grad.add_(pruned_values(parameter, keep[weight.name]), alpha=self._decay)

    def _after_step(self, optimizer: Optimizer, stepped: set[int]) -> None:
        """Have weights that moved packed again, and masks chosen where the schedule says so."""
        if not self.attached:
            return
        for weight, products in self._pairs():
            if id(weight.parameter) in stepped:
                self._optimizers.add(optimizer)
                mask_of(products).forget_values()
        if id(self._weights[0].parameter) not in stepped:  # of several optimisers, the one with the first layer counts
            return
        self.steps += 1
        if self.steps == self._first:
            self._start()
        elif self._every is not None and 0 <= self._first < self.steps and not (self.steps - self._first) % self._every:
            self._put(best_masks(self._masked_weights(), {}))


def _weakly(method: Callable[[Optimizer, set[int]], None]) -> Callable[[Optimizer, Any, Any], None]:
    """Return an optimiser's hook: a handle's method gets it and the ids of what it steps, while there is a handle."""
    reference = weakref.WeakMethod(method)

    @torch.no_grad()
    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (call := reference()) is not None:
            call(optimizer, {id(parameter) for group in optimizer.param_groups for parameter in group["params"]})

    return hook
