"""A step with clipped gradients, without the pass that `clip_grad_norm_` takes to multiply them.

torch's fused optimisers divide each gradient by a loss scale where they read it. A clipped step hands them what the
gradients are too long by in its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from twofour.errors import TrainingError
from twofour.masks import hooks
from twofour.masks.stepped import stepped

SCALING = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)
"""torch's own whose fused step divides gradients by `grad_scale`. Not their subclasses, which may do anything."""


def clipped_step(optimizer: Optimizer, max_norm: float, parameters: Tensor | Iterable[Tensor] | None = None) -> Tensor:
    """Clip gradients by their norm and step: `clip_grad_norm_(parameters, max_norm)`, then `optimizer.step()`.

    With torch's fused optimisers nothing reads the gradients but the norm and the step. `grad` holds what was stepped,
    clipped, after both. Where a step pre-hook of somebody else may read them, they are clipped before. Gradients of
    masked weights are set to zero where they are pruned before the norm is taken.

    Args:
        optimizer: Any; without a closure, and no loss scale that a scaler has left to be divided by.
        max_norm: Largest 2-norm of all gradients together.
        parameters: Whose gradients count, one or several; by default those that the optimiser steps.

    Returns:
        The norm before clipping.

    Raises:
        TrainingError: `max_norm` is no positive number.

    Example:
        >>> norm = twofour.training.clipped_step(optimizer, 1.0)
    """
    if not isinstance(max_norm, Real) or not max_norm > 0:
        raise TrainingError(
            "`max_norm` is impossible",
            got=repr(max_norm),
            wanted="a positive number",
            remedy="call optimizer.step() where nothing is to be clipped",
        )
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    max_norm = float(max_norm)
    counted = own if parameters is None else [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for masked in stepped(optimizer):
        hooks.mask_gradient(masked.parameter, masked.keep)
    if not _scales(optimizer, own, counted):
        norm = nn.utils.clip_grad_norm_(counted, max_norm)
        optimizer.step()
        return norm
    norm = nn.utils.get_total_norm([parameter.grad for parameter in own if parameter.grad is not None])
    # What clip_grad_norm_ multiplies by is max_norm / (norm + 1e-6), at most 1.
    excess = float((norm + 1e-6) / max_norm)
    if excess <= 1:
        optimizer.step()
        return norm
    scaled: Any = optimizer
    scaled.grad_scale = torch.tensor(excess, dtype=torch.float32, device=norm.device)
    try:
        optimizer.step()
    finally:
        del scaled.grad_scale
    return norm


def _scales(optimizer: Optimizer, own: list[Tensor], counted: list[Tensor]) -> bool:
    """Whether the step can divide: the same gradients, dense, on one CPU, that nobody reads in between.

    The factor is float32: gradients of float64 would lose half of their digits.
    """
    alike = {id(one) for one in own if one.grad is not None} == {id(one) for one in counted if one.grad is not None}
    gradients = [parameter.grad for parameter in own if parameter.grad is not None]
    return (
        alike
        and type(optimizer) in SCALING
        and all(group.get("fused") for group in optimizer.param_groups)
        and not hasattr(optimizer, "grad_scale")
        and not _is_watched(optimizer)
        and all(type(g) is Tensor and g.is_cpu and g.layout is torch.strided for g in gradients)
        and all(g.dtype is not torch.float64 for g in gradients)
    )


def _is_watched(optimizer: Optimizer) -> bool:
    """Whether a step pre-hook that is not ours runs, which is to see clipped gradients."""
    called = chain(_global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values())
    ours = __name__.partition(".")[0]
    return any(str(getattr(hook, "__module__", None)).partition(".")[0] != ours for hook in called)
