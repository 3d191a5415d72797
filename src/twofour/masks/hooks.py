"""The hooks that keep a masked weight sparse: torch's global optimiser hooks and a load hook on the module.

Before a step the gradient of pruned entries is set to zero, so that no update, factored statistic or line search sees
it; after a step the parameter and its optimiser state are set to zero there, which removes what weight decay, momentum
and earlier dense training left (both halves are needed: apex asp.py does the same around a patched step). State that is
known to be zero there (zeros.py) is left alone.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from twofour.errors import MaskError, PatternError
from twofour.layers import is_distributed, local, placed, whole
from twofour.masks import zeros
from twofour.masks.link import Link, fill_pruned, keeps, links_of, living, unpickled

_log = logging.getLogger("twofour.masks")


@cache
def install() -> None:
    """Register the two optimiser hooks, once per process; with no masked parameter they cost one look at a set."""
    # A traced hook would be recompiled for each new masked model until torch.compile gives up on the step.
    untraced = partial(torch.compiler.disable, reason="twofour masks: looks models up while it runs")
    register_optimizer_step_pre_hook(cast(Any, untraced(_before_step)))
    register_optimizer_step_post_hook(cast(Any, untraced(_after_step)))


unpickled.append(install)


def _masked_parameters(optimizer: Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each masked parameter that `optimizer` steps, with its mask."""
    links = living()
    if not links:
        return
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for link in links:
        try:
            parameter = link.parameter()
        except MaskError:
            parameter = None
        if parameter is None:
            # Which optimiser a lost weight belongs to cannot be known, so any step says it; dropped models are excused.
            gc.collect()
            if link.module is None:
                continue
            parameter = link.parameter()
        if id(parameter) in stepped:
            yield parameter, link.keep


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    closure = callable(kwargs.get("closure", args[1] if len(args) > 1 else None))
    for parameter, keep in _masked_parameters(optimizer):
        _mask_gradient(parameter, keep)
        for state in _states(optimizer, parameter):
            zeros.review(optimizer, state, parameter, keep, closure=closure)
    # With a closure the gradients are computed inside the step, by LBFGS many times.
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _masked_closure(optimizer, kwargs["closure"])}
    # args[0] is the optimiser itself: the hooks see the arguments of the unbound method.
    if len(args) > 1 and callable(args[1]):
        return (args[0], _masked_closure(optimizer, args[1]), *args[2:]), kwargs
    return None


def _masked_closure(optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    @wraps(closure)
    def evaluate() -> Any:
        loss = closure()
        for parameter, keep in _masked_parameters(optimizer):
            _mask_gradient(parameter, keep)
        return loss

    return evaluate


@torch.no_grad()
def _mask_gradient(parameter: Tensor, keep: Tensor) -> None:
    if parameter.grad is not None:
        fill_pruned(parameter.grad, keep)


@torch.no_grad()
def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for parameter, keep in _masked_parameters(optimizer):
        fill_pruned(parameter, keep)
        for state in _states(optimizer, parameter):
            if not zeros.known(state, keep):
                fill_pruned(state, keep)
            zeros.note(state, parameter, keep)


def _states(optimizer: Optimizer, parameter: Tensor) -> list[Tensor]:
    return [
        state
        for state in optimizer.state.get(parameter, {}).values()
        if _is_plain_state(state) and state.shape == parameter.shape
    ]


def _is_plain_state(state: Any) -> bool:
    """Whether a zero in the state means zero: in the codes of 8-bit optimisers, integers or subclasses, it does not."""
    return isinstance(state, Tensor) and state.is_floating_point() and (type(state) is Tensor or is_distributed(state))


@torch.no_grad()
def after_load(module: nn.Module, incompatible_keys: object) -> None:
    """Reconcile the masks of a module with weights that `load_state_dict` has just written into it.

    Weights that obey the mask keep it. Weights that obey the pattern with other zeros bring a new mask. Dense weights
    are masked again, with a warning.
    """
    for link in links_of(module).values():
        parameter = link.parameter()
        if parameter.is_meta:
            continue
        weight = whole(parameter)
        if keeps(weight, whole(link.keep)):
            continue
        if link.pattern.check(link.axis.last(weight)).ok:
            _adopt(link, weight)
            continue
        _log.warning("`%s`: the loaded weight is not %s; its mask was applied again", link.name, link.pattern.name)
        fill_pruned(parameter, link.keep)


def _adopt(link: Link, weight: Tensor) -> None:
    try:
        keep = link.pattern.project(link.axis.last(weight), absolute=True)
    except PatternError as error:
        raise error.for_layer(link.name) from None
    local(link.keep).copy_(local(placed(link.axis.restore(keep), link.keep)))
    _log.info("`%s`: the loaded weight is %s with other zeros; its mask follows", link.name, link.pattern.name)
