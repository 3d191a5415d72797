"""Calls of a model: in evaluation mode for a while, and with the errors inside it explained."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from twofour.errors import TwofourError

FORMS = "a tensor, a tuple of positional arguments or a dict of keyword arguments"
"""What an example may be."""
PAIRS = "inputs (a tensor, a tuple of arguments or a dict of keyword arguments) or pairs (input, target)"
"""What data may yield."""


Refusal = TypeVar("Refusal", bound=TwofourError)


def fresh(example: Any) -> Any:
    """Return a copy of an example for one forward pass, which may change it in place; what cannot be copied is shared.

    A mapping becomes a dict.
    """
    return tree_map(_copied, dict(example) if isinstance(example, Mapping) else example)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.clone()
    with suppress(Exception):  # a cache of keys and values is copied, a generator cannot be
        return leaf if isinstance(leaf, nn.Module) else copy.deepcopy(leaf)
    return leaf


@contextmanager
def keeping_modes(model: nn.Module) -> Iterator[None]:
    """Whatever mode the model is put in inside: afterwards every module is in the mode that it was in."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside; afterwards every module is in the mode that it was in."""
    with keeping_modes(model):
        model.eval()
        yield


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Let a decoder of Hugging Face return no keys and values: as outputs they would be part of what is traced."""
    config: Any = getattr(model, "config", None)
    cached = getattr(config, "use_cache", False)
    try:
        if cached:
            config.use_cache = False
        yield
    finally:
        if cached:
            config.use_cache = True


@contextmanager
def explaining(kind: type[TwofourError], given: str, *, wanted: str, remedy: str) -> Iterator[None]:
    """Say of an error inside a model that the model does not run on what it was given; ours pass as they are.

    Args:
        kind: The error to raise in its place.
        given: What the model was run on: "the example", "the calibration data".
        wanted: What the model could have been given.
        remedy: What to try.

    Raises:
        TwofourError: Of the kind asked for.
    """
    try:
        yield
    except (TwofourError, MemoryError):
        raise
    except Exception as error:
        raise unfit(kind, given, error, wanted=wanted, remedy=remedy) from error


def unfit(
    kind: type[Refusal],
    given: str,
    error: Exception,
    *,
    wanted: str,
    remedy: str,
    shown: str = "",
    layer: str | None = None,
) -> Refusal:
    """Build the error for a model that does not run.

    Args:
        kind: Which error.
        given: What the model was run on.
        error: What it raised.
        wanted: What it could have been given.
        remedy: What to try.
        shown: What it was given, in words.
        layer: The layer that raised, where it is known.
    """
    found = f"{type(error).__name__}: {error}"
    return kind(
        f"the model does not run on {given}",
        got=f"{shown}; {found}" if shown else found,
        wanted=wanted,
        remedy=remedy,
        layer=layer,
    )
