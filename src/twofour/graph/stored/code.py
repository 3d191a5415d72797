"""What a model's forward is besides its weights: a graph out of a file holds for a model of the same code alone."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SETTINGS = 2
"""How deep objects of a module, a configuration say, are looked into for numbers and texts that its code names."""


def fingerprint(model: nn.Module) -> str:
    """Return a text that differs where two models of equal weights may compute different things.

    It covers the classes of all modules, the bytecode of forwards that are not torch's own and of the functions that
    they name, and the numbers, texts and functions that modules hold, and objects in them, where that code names them.
    What code reaches by other ways, through a table say, it does not see. Linear layers and convolutions are left out:
    machines differ in which of them run compiled.

    Returns:
        64 hexadecimal digits. Another version of Python or of the model's package gives others.
    """
    modules = [(name, one) for name, one in model.named_modules() if not _is_a_layer(one)]
    layers = tuple(f"{name}." for name, one in model.named_modules() if name and _is_a_layer(one))
    modules = [(name, one) for name, one in modules if not name.startswith(layers)]
    functions = dict.fromkeys(
        found for kind in dict.fromkeys(type(one) for _, one in modules) for found in _functions(kind)
    )
    named = {word for function in functions for word in _names(function.__code__)}
    digest = hashlib.sha256()
    for function in functions:
        digest.update(repr((function.__qualname__, _text(function.__code__))).encode())
    for name, module in modules:
        digest.update(repr((name, type(module).__qualname__, sorted(_settings(module, named)))).encode())
    return digest.hexdigest()


def _is_a_layer(module: nn.Module) -> bool:
    """Tell whether a module is one that `compile` may replace, or has replaced."""
    return isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d) or type(module).__module__.startswith("twofour.")


def _functions(kind: type) -> Iterator[FunctionType]:
    """Yield the forward of a class and the functions that it names, methods and globals, and so on; none of torch's."""
    waiting: list[Any] = [inspect.getattr_static(kind, "forward", None)]
    seen: dict[FunctionType, None] = {}
    while waiting:
        one = waiting.pop(0)
        one = getattr(one, "__func__", getattr(one, "fget", one))  # a class method, a property
        while hasattr(one, "__wrapped__"):
            one = one.__wrapped__
        if not isinstance(one, FunctionType) or one in seen or _is_torchs(one.__module__ or ""):
            continue
        seen[one] = None
        for word in _names(one.__code__):
            waiting += [inspect.getattr_static(kind, word, None), one.__globals__.get(word)]
    yield from seen


def _is_torchs(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "builtins", "twofour")


def _names(code: CodeType) -> list[str]:
    inner = [word for one in code.co_consts if isinstance(one, CodeType) for word in _names(one)]
    return [*code.co_names, *inner]


def _text(code: CodeType) -> tuple[Any, ...]:
    """Return what a function does, without the lines and files that it stands in."""
    constants = [_text(one) if isinstance(one, CodeType) else _shown(one) for one in code.co_consts]
    return code.co_code.hex(), code.co_names, code.co_varnames[: code.co_argcount], tuple(constants)


def _shown(value: Any) -> str:
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def _settings(holder: Any, named: set[str], depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield the plain values of an object: of a module of torch's all, of others those that code names."""
    own = isinstance(holder, nn.Module) and _is_torchs(type(holder).__module__)
    for key, value in vars(holder).items():
        if key.startswith("_") or key == "training" or not (own or key in named):
            continue
        if isinstance(value, _PLAIN) or (isinstance(value, tuple | list) and all(isinstance(v, _PLAIN) for v in value)):
            yield key, repr(value)
        elif callable(value) and hasattr(value, "__qualname__"):
            yield key, value.__qualname__
        elif not isinstance(value, nn.Module) and depth < _SETTINGS and hasattr(value, "__dict__"):
            yield from ((f"{key}.{name}", shown) for name, shown in _settings(value, named, depth + 1))
