"""Other libraries' calls, answered by ours: `compat.asp`, `compat.torchao_sparsity` (docs/migration.md)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twofour.compat import asp, torchao_sparsity

__all__ = ["asp", "torchao_sparsity"]


def __getattr__(name: str) -> Any:
    """Import a library's calls when they are first used."""
    if name in __all__:
        return import_module(f"twofour.compat.{name}")
    raise AttributeError(f"module 'twofour.compat' has no attribute {name!r}")
