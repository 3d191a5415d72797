"""The hooks that keep a masked weight sparse: torch's global optimiser hooks and a load hook on the module.

Before a step the gradient of pruned entries is set to zero, so that no update, factored statistic or line search sees
it; after a step the parameter and its optimiser state are set to zero there, which removes what weight decay, momentum
and earlier dense training left (both halves are needed: apex asp.py does the same around a patched step). State that is
known to be zero there (optimizer_state.py) is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from twofour.layers import MASKED, is_distributed, is_masked
from twofour.layers.modules import table
from twofour.masks import optimizer_state
from twofour.masks import rule as rules
from twofour.masks.link import Changes, Link, links_of, unpickled
from twofour.masks.loaded import reconcile
from twofour.masks.rule import Rule, fill_pruned
from twofour.masks.stepped import looked_up, stepped


@cache
def install() -> None:
    """Register the optimiser hooks and the one on parameters that are assigned to a module, once per process."""
    # A traced hook would be recompiled for each new masked model until torch.compile gives up on the step.
    untraced = partial(cast(Any, torch.compiler).disable, reason="twofour masks: looks models up while it runs")
    register_optimizer_step_pre_hook(untraced(_before_step))
    register_optimizer_step_post_hook(untraced(_after_step))
    register_module_parameter_registration_hook(cast(Any, _registered))


unpickled.append(install)

_AFTER_LOAD = "_load_state_dict_post_hooks"


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    closure = callable(kwargs.get("closure", args[1] if len(args) > 1 else None))
    for masked in stepped(optimizer):
        parameter, keep = masked.parameter, masked.keep
        mask_gradient(parameter, keep)
        for state in _states(optimizer, parameter):
            optimizer_state.review(optimizer, state, parameter, keep, closure=closure)
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
        for masked in stepped(optimizer):
            mask_gradient(masked.parameter, masked.keep)
        return loss

    return evaluate


@torch.no_grad()
def mask_gradient(parameter: Tensor, keep: Tensor) -> None:
    """Set the pruned entries of a parameter's gradient to zero, if it has one."""
    if parameter.grad is not None:
        fill_pruned(parameter.grad, keep)


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for masked in looked_up(optimizer):
        _fill(optimizer, masked.parameter, masked.keep)


@torch.no_grad()
def _fill(optimizer: Optimizer, parameter: Tensor, keep: Tensor) -> None:
    fill_pruned(parameter, keep)
    for state in _states(optimizer, parameter):
        if not optimizer_state.known(state, keep):
            fill_pruned(state, keep)
        optimizer_state.note(state, parameter, keep)


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
    """Reconcile the masks of a module with weights that `load_state_dict` has just written into it."""
    for link in links_of(module).values():
        parameter = link.parameter()
        link.settle()
        if not parameter.is_meta:
            reconcile(link.rule, parameter)


def _registered(module: nn.Module, attribute: str, parameter: Tensor | None) -> None:
    """Have a masked parameter bring its mask to the module that it is assigned to, and note one that is replaced."""
    if parameter is not None and not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        rule = rules.of_parameter(parameter)
        if rule is not None and parameter.shape == rule.keep.shape and attribute not in links_of(module):
            place(module, attribute, rule.name, rule)
            return
    if is_masked(module):
        Changes.note()


def place(module: nn.Module, attribute: str, name: str, rule: Rule) -> None:
    """Have a rule hold in a place of a module."""
    links = links_of(module)
    if attribute in links:
        links[attribute].obey(rule)
        Changes.note()
    else:
        module.__dict__.setdefault(MASKED, {})[attribute] = Link(module, attribute, name, rule)
    if after_load not in table(module, _AFTER_LOAD).values():
        cast(Any, module).register_load_state_dict_post_hook(after_load)


def leave(module: nn.Module) -> None:
    """Have no rule hold in any place of a module."""
    if is_masked(module):
        for link in links_of(module).values():
            link.dissolve()
        del module.__dict__[MASKED]
        hooks_of = table(module, _AFTER_LOAD)
        for key in [key for key, hook in hooks_of.items() if hook is after_load]:
            del hooks_of[key]
