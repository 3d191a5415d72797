"""Attach, list and remove masks. A mask is no part of the state dict, which keeps the dense model's keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from twofour.errors import MaskError, PatternError
from twofour.layers import PrunableWeight, Reduction, full_tensor, is_distributed, local, placed, require_module
from twofour.layers.modules import named_modules
from twofour.masks import hooks
from twofour.masks import rule as rules
from twofour.masks.link import Changes, links_of
from twofour.masks.rule import Rule, fill_pruned
from twofour.patterns import Pattern, parse


@dataclass(frozen=True, eq=False)
class Mask:
    """A mask as it is attached to a model.

    Attributes:
        name: Full parameter name, "encoder.fc1.weight".
        layer: Name of the module that owns it.
        module: That module.
        attribute: Name of the parameter in the module.
        pattern: The pattern it obeys.
        keep: Bool tensor of the weight's shape, True where a value is kept; the mask in force, not a copy. A DTensor
            with the weight's placements where the weight is sharded over processes (FSDP2).
        axis: The axis that the pattern lies along.
    """

    name: str
    layer: str
    module: nn.Module
    attribute: str
    pattern: Pattern
    keep: Tensor
    axis: Reduction

    @property
    def density(self) -> float:
        """Fraction of values that are kept; of a sharded mask every process must ask together."""
        return full_tensor(self.keep.sum()).item() / max(self.keep.numel(), 1)

    @property
    def parameter(self) -> Tensor:
        """The parameter that the module has now.

        Raises:
            MaskError: The mask is detached, or the module has no such parameter any more, or one of another shape.
        """
        link = links_of(self.module).get(self.attribute)
        if link is None:
            raise MaskError(
                "the mask is attached no more",
                got=f"`{self.name}`, detached since",
                wanted="a mask that holds",
                remedy="ask again: twofour.masks.of(model)",
            )
        return link.parameter()


def attach(prunable: PrunableWeight, keep: Tensor, pattern: Pattern | str) -> Mask:
    """Put a mask on a weight: its pruned values become 0 now and after every step of any `torch.optim` optimiser.

    Before a step the gradient is masked, after it the parameter and the optimiser state; `masks.enforce` does the same
    by hand. Gradient norms taken between backward and step still see the dense gradient: call `enforce` first.
    Attaching again replaces the mask.

    Args:
        prunable: The weight, as `layers.walk` finds it.
        keep: Bool tensor of the weight's shape on its device, True where a value is kept; whole, or a DTensor. Of a
            sharded weight's mask each process keeps its part only.
        pattern: The pattern that `keep` obeys along the reduction axis.

    Raises:
        MaskError: `keep` does not fit the weight or breaks the pattern.
    """
    return attach_all([(prunable, keep, pattern)])[0]


def attach_all(plan: Sequence[tuple[PrunableWeight, Tensor, Pattern | str]]) -> list[Mask]:
    """Attach several masks; nothing changes unless all of them fit.

    Raises:
        MaskError: As `attach`.
    """
    for prunable, keep, _ in plan:
        _require_pair(prunable, keep)
    parsed = [(prunable, keep, parse(pattern)) for prunable, keep, pattern in plan]
    for prunable, keep, pattern in parsed:
        try:
            _require_fit(prunable, keep, pattern)
        except MaskError as error:
            raise error.for_layer(prunable.name) from error.__cause__
    hooks.install()
    return [_attach(*entry) for entry in parsed]


def _require_pair(prunable: object, keep: object) -> None:
    if not isinstance(prunable, PrunableWeight) or not isinstance(keep, Tensor):
        raise MaskError(
            "there is no weight to put a mask on, or no mask",
            got=f"{type(prunable).__name__} and {type(keep).__name__}",
            wanted="a PrunableWeight and a bool tensor of its shape",
            remedy="twofour.layers.walk(model).weights lists a model's weights; twofour.prune masks all of them",
        )


def _attach(prunable: PrunableWeight, keep: Tensor, pattern: Pattern) -> Mask:
    module, attribute, parameter = prunable.module, prunable.attribute, prunable.parameter
    keep, link = placed(keep, parameter), links_of(module).get(attribute)
    old = link.keep if link is not None else None
    if old is not None and _alike(old, keep):
        # In place, so that a Mask handed out earlier shows the mask in force.
        local(old).copy_(local(keep))
        keep = old
    else:
        keep = keep.clone(memory_format=torch.contiguous_format)
    rule = Rule(prunable.name, pattern, prunable.axis, keep)
    rules.put(parameter, rule)
    for shares, name, full in ((module, attribute, prunable.name), *prunable.shared):
        hooks.place(shares, name, full, rule)
    with torch.no_grad():
        fill_pruned(parameter, keep)
    return Mask(prunable.name, prunable.layer, module, attribute, pattern, keep, prunable.axis)


def _alike(old: Tensor, keep: Tensor) -> bool:
    if old.shape != keep.shape or old.device != keep.device or is_distributed(old) != is_distributed(keep):
        return False
    return not is_distributed(keep) or cast(Any, old).placements == cast(Any, keep).placements


def _require_fit(prunable: PrunableWeight, keep: Tensor, pattern: Pattern) -> None:
    weight = prunable.parameter
    if keep.dtype != torch.bool or keep.shape != weight.shape:
        raise MaskError(
            "the mask does not fit the weight",
            got=f"mask {tuple(keep.shape)} of {keep.dtype}, weight {tuple(weight.shape)}",
            wanted="a torch.bool mask of the weight's shape",
            remedy="keep = pattern.project(weight.reduction_last(scores)), put back by weight.from_reduction_last",
        )
    if keep.device != weight.device and not is_distributed(weight):
        raise MaskError(
            "the mask and the weight are on different devices",
            got=f"mask on {keep.device}, weight on {weight.device}",
            wanted="both on one device",
            remedy="move the mask with keep.to(weight.device)",
        )
    try:
        conformity = pattern.check(prunable.reduction_last(full_tensor(keep)).to(torch.uint8))
    except PatternError as error:
        raise MaskError(error.what, got=error.got, wanted=error.wanted, remedy=error.remedy) from error
    if not conformity.ok:
        raise MaskError(
            f"the mask is not {pattern.name} along the reduction axis",
            got=f"the group at {conformity.first} of (out, [spatial], in) keeps {conformity.values}; "
            f"{conformity.groups - conformity.legal} of {conformity.groups} groups break the pattern",
            wanted=f"pattern.project of scores laid out by reduction_last ({pattern.name})",
            remedy="choose the mask by pattern.project, or attach it under the pattern that it obeys",
        )


def of(model: nn.Module) -> dict[str, Mask]:
    """Return the masks attached in `model`, by full parameter name; a tied weight is listed once.

    Raises:
        LayerError: `model` is no module.
    """
    require_module(model)
    found: dict[str, Mask] = {}
    seen: set[int] = set()
    for layer, module in named_modules(model):
        for attribute, link in links_of(module).items():
            parameter = link.settle()
            if parameter is not None and id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name, rule = f"{layer}.{attribute}" if layer else attribute, link.rule
            found[name] = Mask(name, layer, module, attribute, rule.pattern, link.keep, rule.axis)
    return found


def detach(model: nn.Module) -> None:
    """Remove all masks from `model`; the weights stay as they are, zeros included, and are free to move.

    Raises:
        LayerError: `model` is no module.
    """
    require_module(model)
    let_go: dict[int, Rule] = {}
    for module in model.modules():
        for link in links_of(module).values():
            link.settle()
            let_go[id(link.rule)] = link.rule
        hooks.leave(module)
    for parameter in model.parameters():
        rules.forget(parameter)
    for rule in let_go.values():
        rule.released = not rule.links
    Changes.note()


@torch.no_grad()
def enforce(model: nn.Module) -> None:
    """Set pruned weights and their gradients to zero now: for home-made optimisers and before clipping gradients.

    Raises:
        MaskError: A masked module has lost its parameter.
        LayerError: `model` is no module.
    """
    require_module(model)
    for module in model.modules():
        for link in links_of(module).values():
            parameter = link.parameter()
            link.settle()
            fill_pruned(parameter, link.keep)
            if parameter.grad is not None:
                fill_pruned(parameter.grad, link.keep)
