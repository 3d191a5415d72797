"""Operators of ours that torch knows: what compiled graphs and exported programs hold."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch

# torch's annotations leave the types of these open.
_LIBRARY = cast(Any, torch.library.Library("twofour", "FRAGMENT"))
_torch = cast(Any, torch)


def register(schema: str, fake: Callable[..., Any] | None = None, **implementations: Callable[..., Any]) -> None:
    """Make an operator `torch.ops.twofour.<name>`.

    Args:
        schema: As torch writes it, name first: "norm(Tensor x, float eps) -> Tensor".
        fake: Returns the answer's shape and dtype without computing it.
        implementations: Dispatch key -> function. "CompositeExplicitAutograd" rather than "CPU" where an operand may be
            oneDNN-blocked: it dispatches to MkldnnCPU.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    for key, function in implementations.items():
        _LIBRARY.impl(name, function, key)
    if fake is not None:
        _torch.library.register_fake(f"twofour::{name}", fake, lib=_LIBRARY)


def below_autograd() -> AbstractContextManager[None]:
    """Return a context in which operators dispatch to what stands below autograd."""
    return _torch._C._AutoDispatchBelowAutograd()
