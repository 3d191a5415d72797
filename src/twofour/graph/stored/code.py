"""What a model's forward is besides its weights: a graph out of a file holds for a model of the same code alone."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from twofour.errors import cut

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SETTINGS = 2
"""How deep objects of a module, a configuration say, are looked into for numbers and texts that its code names."""

_DTYPES = ("dtype", "torch_dtype")
"""What a configuration says of the parameters' dtype, where it was loaded with them, and they say themselves."""

_NO_COMPUTING = (*_DTYPES, "architectures", "name_or_path")
_MOST_LETTERS = 40


def fingerprint(model: nn.Module, *, dtypes: bool = False) -> str:
    """Return a text that differs where two models of equal weights may compute different things.

    It covers the classes of all modules, the bytecode of forwards that are not torch's own and of the functions that
    they name, and the numbers, texts and functions that modules hold, and objects in them, where that code names them.
    What code reaches by other ways, through a table say, it does not see. Linear layers and convolutions are left out:
    machines differ in which of them run compiled. So is a configuration's dtype where it is None or the parameters'.

    Args:
        model: It may be on the meta device.
        dtypes: Keep that dtype, as files did at first.

    Returns:
        64 hexadecimal digits. Another version of Python or of the model's package gives others.
    """
    modules, functions, named = _compared(model)
    digest = hashlib.sha256()
    for function in functions:
        digest.update(repr((function.__qualname__, _text(function.__code__))).encode())
    known = {"None"} | {repr(str(p.dtype).removeprefix("torch.")) for p in model.parameters() if p.is_floating_point()}
    for name, module in modules:
        read = sorted(one for one in _settings(module, named) if dtypes or not _says_dtype(*one, known))
        digest.update(repr((name, type(module).__qualname__, read)).encode())
    return digest.hexdigest()


def settings(model: nn.Module) -> dict[str, str]:
    """Return classes and values of modules, for a message where fingerprints differ; texts of the configuration alone.

    What the model itself has is left out of its parts, as each holds the same configuration; so is what is long.
    """
    modules, _, named = _compared(model)
    config = getattr(model, "config", None)
    whole = {f"config.{key}" for key in vars(config)} if hasattr(config, "__dict__") else set[str]()
    own = dict(_settings(model, named | {"config"} | {key.removeprefix("config.") for key in whole}))
    found = {key: text for key, text in own.items() if key.rpartition(".")[2] not in _NO_COMPUTING}
    for name, module in modules:
        at = f"{name}." if name else ""
        found[name or "the model"] = type(module).__qualname__
        found |= {at + key: text for key, text in _settings(module, named) if name and own.get(key) != text}
    texts = ("'", '"')
    return {
        key: text
        for key, text in found.items()
        if len(text) <= _MOST_LETTERS and (key.startswith("config.") or not text.startswith(texts))
    }


def differences(before: Any, model: nn.Module, most: int = 3) -> str:
    """Return in words where `settings` of a file, which nobody vouches for, and of a model differ, "" where nowhere."""
    here = settings(model)
    told = {} if not isinstance(before, dict) else {key: text for key, text in before.items() if isinstance(text, str)}
    keys = [key for key in here if key in told and told[key] != here[key]]
    keys.sort(key=lambda key: not key.startswith("config."))  # what parts differ by often follows from it
    shown = [f"{key}: {_printable(told[key])} when compiled, {here[key]} here" for key in keys[:most]]
    return ", ".join(shown) + (f", and {len(keys) - most} more" if len(keys) > most else "")


def _printable(text: str) -> str:
    return cut("".join(letter if letter.isprintable() else "?" for letter in text[:80]), _MOST_LETTERS)


def _compared(model: nn.Module) -> tuple[list[tuple[str, nn.Module]], dict[FunctionType, None], set[str]]:
    """Return the modules that are no layers, the functions of their forwards, and the words that these name."""
    modules = [(name, one) for name, one in model.named_modules() if not _is_a_layer(one)]
    layers = tuple(f"{name}." for name, one in model.named_modules() if name and _is_a_layer(one))
    modules = [(name, one) for name, one in modules if not name.startswith(layers)]
    functions = dict.fromkeys(
        found for kind in dict.fromkeys(type(one) for _, one in modules) for found in _functions(kind)
    )
    return modules, functions, {word for function in functions for word in _names(function.__code__)}


def _says_dtype(key: str, text: str, known: set[str]) -> bool:
    """Tell whether a value is the dtype in an object that a module holds, a configuration: none, or one of those."""
    holder, _, last = key.rpartition(".")
    return bool(holder) and last in _DTYPES and text in known


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
