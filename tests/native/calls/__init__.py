"""Calls of every row of every native operation, of operands that are right: a new one goes here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.native.calls.of_layers import models
from tests.native.calls.of_products import products, recurrent
from tests.native.calls.of_weights import layouts, patterns, training
from twofour import native

__all__ = ["calls", "layouts", "models", "patterns", "products", "recurrent", "training"]


def calls(scale: int = 1) -> Iterator[tuple[Callable[..., Any], list[Any]]]:
    """Calls of every row that this processor has, of operands so many times as long."""
    for make in (products, recurrent, layouts, models, training, patterns):
        for isa, function, arguments in make(scale):
            if native.supports(isa):
                yield function, arguments
