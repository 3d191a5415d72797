"""What torch keeps of a module, with the types that its own annotations leave out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import nn


def named_modules(model: nn.Module, *, again: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model by name; one that stands in several places once, unless `again`."""
    untyped = cast(Any, model)
    return untyped.named_modules(remove_duplicate=False) if again else untyped.named_modules()


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the mapping in which torch keeps a module's own parameters."""
    return table(module, "_parameters")


def table(owner: object, name: str) -> dict[Any, Any]:
    """Return one of the mappings in which torch keeps what a module or an optimiser has: parameters, hooks."""
    return getattr(owner, name)
