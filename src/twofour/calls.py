"""Calls of a model: the example they are made on, modes for a while, layers observed, errors inside explained."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

from twofour.errors import TwofourError

FORMS = "a tensor, a tuple of positional arguments or a dict of keyword arguments"
"""What an example may be."""
PAIRS = "inputs (a tensor, a tuple of arguments or a dict of keyword arguments) or pairs (input, target)"
"""What data may yield."""


Refusal = TypeVar("Refusal", bound=TwofourError)
Key = TypeVar("Key")


@dataclass(frozen=True)
class Example:
    """The arguments of one forward pass: what a caller passes as `example`, or as the inputs of one batch.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, given: Any) -> Example:
        """Read what a caller passed.

        A tuple or a list is spread over positional arguments (a DataLoader turns tuples into lists), a mapping over
        keyword arguments; everything else is the only argument, a packed sequence too, which is a tuple by its class.
        """
        match given:
            case Example():
                return given
            case Mapping():
                return cls((), dict(given))
            case tuple() | list() if not isinstance(given, PackedSequence):
                return cls(tuple(given), {})
            case _:
                return cls((given,), {})

    @property
    def leaves(self) -> list[Any]:
        """Its values in their order, those of nested structures included."""
        return tree_leaves((self.args, self.kwargs))

    def map(self, change: Callable[[Any], Any]) -> Self:
        """Return the example with `change` made to each leaf."""
        return type(self)(*tree_map(change, (self.args, self.kwargs)))

    def copy(self) -> Self:
        """Return a copy for a forward pass, which may change what it is given."""
        return self.map(_copied)

    def run(self, model: nn.Module) -> Any:
        """Return what the model answers to a copy of the example."""
        return call(model, self.copy())


def call(model: nn.Module, inputs: Any) -> Any:
    """Return what the model answers to inputs of any form that `Example.of` reads; they are not copied."""
    example = Example.of(inputs)
    return model(*example.args, **example.kwargs)


def takes(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether the model's forward can be called so, as far as its signature tells."""
    try:
        inspect.signature(model.forward).bind(*args, **(kwargs or {}))
    except TypeError:
        return False
    except ValueError:  # a forward without a signature
        return True
    return True


def output_leaves(output: Any) -> list[Any]:
    """Return the values of an output in their order, those of dataclasses and of nested structures included."""
    leaves = tree_leaves(output, is_leaf=is_dataclass)
    return [
        leaf
        for entry in leaves
        for leaf in (output_leaves([getattr(entry, f.name) for f in fields(entry)]) if is_dataclass(entry) else [entry])
    ]


def fresh(value: Any) -> Any:
    """Return a copy of what a forward pass is given and may change in place; what cannot be copied is shared."""
    return tree_map(_copied, value)


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
def keeping_buffers(model: nn.Module) -> Iterator[None]:
    """Whatever forward passes write into a model's buffers inside: afterwards each holds what it held."""
    held = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_meta
    ]
    try:
        yield
    finally:
        for module, name, buffer, values in held:
            module._buffers[name] = buffer
            write_back(buffer, values)


def write_back(buffer: Tensor, values: Tensor) -> None:
    """Give a buffer its values back where it has lost them; under inference mode its version does not tell."""
    if not bool(((buffer == values) | ((buffer != buffer) & (values != values))).all()):
        with torch.inference_mode(buffer.is_inference()), torch.no_grad():
            buffer.copy_(values)


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Let decoders of Hugging Face return no keys and values: as outputs they would be part of what is traced."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    cached = list({id(config): config for config in configs if getattr(config, "use_cache", False)}.values())
    try:
        for config in cached:
            config.use_cache = False
        yield
    finally:
        for config in cached:
            config.use_cache = True


class _FastPaths:
    """How many ask for torch's fast paths to be off, and how they were before the first of them: one for the process.

    Threads and generators leave in another order than they came in, so that each putting back what it met would leave
    them off for good.
    """

    def __init__(self) -> None:
        self.lock, self.inside, self.before = threading.Lock(), 0, True

    def off(self) -> None:
        with self.lock:
            if not self.inside:
                self.before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self.inside += 1

    def back(self) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                torch.backends.mha.set_fastpath_enabled(self.before)


_fast_paths = _FastPaths()


def fast_paths_are_off() -> bool:
    """Tell whether anybody in the process is inside `without_fast_paths`; torch's own switch does not matter."""
    return _fast_paths.inside > 0


@contextmanager
def without_fast_paths() -> Iterator[None]:
    """Keep nn.MultiheadAttention from its fused operator, which passes its layers by and hides what it computes."""
    _fast_paths.off()
    try:
        yield
    finally:
        _fast_paths.back()


@contextmanager
def observing(
    layers: Iterable[tuple[Key, nn.Module]],
    before: Callable[[Key, nn.Module, tuple[Any, ...], dict[str, Any]], None] | None = None,
    after: Callable[[Key, nn.Module, tuple[Any, ...], dict[str, Any], Any], None] | None = None,
) -> Iterator[None]:
    """Observe each call of some layers inside.

    Args:
        layers: Each layer with the key that it is reported under, such as its name.
        before: Called ahead of each call with (key, layer, args, kwargs).
        after: Called after each call with (key, layer, args, kwargs, output).
    """
    with ExitStack() as stack:
        for key, layer in layers:
            if before is not None:
                stack.callback(layer.register_forward_pre_hook(partial(before, key), with_kwargs=True).remove)
            if after is not None:
                stack.callback(layer.register_forward_hook(partial(after, key), with_kwargs=True).remove)
        yield


def first_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the first argument of a layer's call, None where there is none."""
    return next(iter((*args, *kwargs.values())), None)


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
    said = " ".join(str(error).split()) if isinstance(error, TwofourError) else str(error)
    found = f"{type(error).__name__}: {said}"
    return kind(
        f"the model does not run on {given}",
        got=f"{shown}; {found}" if shown else found,
        wanted=wanted,
        remedy=remedy,
        layer=layer,
    )
