"""What the schemes share: a parametrised weight while training, a masked one afterwards.

While a scheme is attached the parameter is dense or an adapter's, by definition of the scheme, and stands in the state
dict as `parametrizations.<weight>.original`. `finish` writes the weight that the forward pass has used into the
parameter and attaches its mask, and the state dict has the dense model's keys again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from twofour import masks
from twofour.errors import PatternError, TrainingError
from twofour.layers import Attachment, PrunableWeight, describe_attached, is_distributed, remedy_for, require_module
from twofour.patterns import NM, Pattern
from twofour.recipe import Recipe
from twofour.training.schemes.slots import Slot, parametrise_all

_log = logging.getLogger("twofour.training")


Scheme = Attachment
"""What a scheme of one's own derives from."""


class Projection(nn.Module):
    """A parametrisation: the dense weight in, the sparse one of the forward pass out.

    Args:
        prunable: The weight.
        pattern: What it becomes.
    """

    def __init__(self, prunable: PrunableWeight, pattern: Pattern) -> None:
        super().__init__()
        self.pattern = pattern
        self.reduction_last, self.from_reduction_last = prunable.reduction_last, prunable.from_reduction_last

    def keep(self, weight: Tensor) -> Tensor:
        """Return the mask of the weight's largest values, bool, of its shape."""
        return _untraced_keep(self, weight.detach())


def _keep(projection: Projection, weight: Tensor) -> Tensor:
    scores = projection.reduction_last(weight)
    return projection.from_reduction_last(projection.pattern.project(scores, absolute=True))


_untraced_keep = cast(
    Callable[[Projection, Tensor], Tensor], torch.compiler.disable(_keep, reason="twofour: native, on raw pointers")
)


class Parametrised(Scheme):
    """A scheme whose forward pass uses a projection of a dense parameter."""

    def __init__(
        self, model: nn.Module, title: str, projections: Mapping[str, tuple[PrunableWeight, Projection]]
    ) -> None:
        super().__init__(model)
        self.layers = tuple(projections)
        self._projections = dict(projections)
        self._slots = [Slot(weight.module, weight.attribute) for weight, _ in self._projections.values()]
        parametrise_all(self._slots, [projection for _, projection in self._projections.values()])
        self._begin(title, [weight.module for weight, _ in self._projections.values()])

    def finish(self) -> nn.Module:
        """See `Scheme.finish`.

        Raises:
            PatternError: A weight holds NaN or infinity; the scheme stays attached.
        """
        self._require_attached()
        self._require_on_top()
        plan = []
        for weight, projection in self._projections.values():
            try:
                keep = projection.keep(getattr(weight.module, weight.attribute))
            except PatternError as error:
                raise error.for_layer(weight.name) from None
            plan.append((weight, keep, projection.pattern))
        self._end()
        for slot in self._slots:
            slot.restore(parametrised=True)
        masks.attach_all(plan)
        return self.model

    def remove(self) -> nn.Module:
        """See `Scheme.remove`."""
        self._end()
        for slot in self._slots:
            slot.restore(parametrised=False)
        return self.model


class Masking(Scheme):
    """A scheme over plain parameters that are masked more and more."""

    def remove(self) -> nn.Module:
        """Let the weights go; what was pruned so far is zero and may grow again. See `Scheme.remove`."""
        self._end()
        masks.detach(self.model)
        return self.model


def require_free(model: nn.Module) -> None:
    """Refuse a model that a training scheme is at work in.

    Raises:
        TrainingError: One is, or `model` is no module.
    """
    require_module(model, TrainingError)
    if found := describe_attached(model):
        raise TrainingError(
            "something is attached to the model already",
            got=found,
            wanted="one scheme at a time; pruned gradients (SDGP) after it",
            remedy="call finish() of that scheme first, which keeps what it has trained, or remove()",
        )


def require_dense(model: nn.Module) -> None:
    """Refuse a masked model: channels go first, weights afterwards.

    Raises:
        TrainingError: It is one.
    """
    if held := masks.of(model):
        raise TrainingError(
            "the model is masked already",
            got=f"{len(held)} masks",
            wanted="a dense model: shrink first, prune afterwards",
            remedy="let go with twofour.masks.detach(model)",
        )


def require_nm(pattern: Pattern, what: str, layer: str | None = None) -> NM:
    """Return an N:M pattern as one.

    Raises:
        TrainingError: It is another.
    """
    if isinstance(pattern, NM):
        return pattern
    raise TrainingError(
        f"{what} is defined for N:M",
        got=pattern.name,
        wanted='"2:4", "1:4", ...',
        remedy="twofour.training.sr_ste takes every pattern",
        layer=layer,
    )


def assigned(
    model: nn.Module,
    pattern: str | Pattern | Mapping[str, str | Pattern] | Recipe,
    skip: str | Sequence[str] = (),
    **rule: Any,
) -> list[tuple[PrunableWeight, Pattern]]:
    """Return the weights that a recipe gives a pattern, tied ones left out with a log line.

    Raises:
        TrainingError: Another scheme is attached, the model is masked or sharded already, or no weight is left.
        RecipeError: As `twofour.prune`.
    """
    require_free(model)
    if masks.of(model):
        raise TrainingError(
            "the model is masked already",
            got=f"{len(masks.of(model))} masks",
            wanted="a dense model: the scheme chooses masks while it trains",
            remedy="let go with twofour.masks.detach(model), or train the masked model as it is",
        )
    found = []
    assignment = Recipe.parse(pattern, skip=skip, **rule).assign(model)
    assignment.tell_unreached(_log)
    for weight, chosen in assignment.weights:
        if is_distributed(weight.parameter):
            raise TrainingError(
                "a training scheme does not take sharded weights",
                got="a DTensor, as fully_shard makes them",
                wanted="a model whose processes hold whole weights",
                remedy="twofour.prune before fully_shard and train under its masks, or train with DDP",
                layer=weight.name,
            )
        if weight.aliases:
            _log.info(
                "`%s` stays dense: tied to `%s`, which a parametrisation would cut", weight.name, weight.aliases[0]
            )
        else:
            found.append((weight, chosen))
    if not found:
        raise TrainingError(
            "the scheme has nothing to make sparse",
            reasons=[f"`{left.name}`: {left.reason}" for left in assignment.skipped],
            wanted="at least one Linear or convolution that is not tied",
            remedy=remedy_for(left.reason for left in assignment.skipped),
        )
    return found
