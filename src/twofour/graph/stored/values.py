"""Arguments of operators as JSON, and which operators a file may name."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from twofour.errors import cut
from twofour.graph.operators import OPERATORS

SIZES: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
}
"""Arithmetic on sizes."""

GETITEM = "getitem"
"""Takes one of several results."""

_UNSET = ("empty", "empty_like", "new_empty")
"""Operators that answer with whatever the memory held before: another's data, where a file says what is answered."""

_NAMES = OPERATORS.keys() - set(_UNSET)

LARGEST = 1 << 48
"""No whole number of sizes is beyond it; arguments are those of 64 bits."""

DEEPEST, LONGEST_TEXT = 8, 40
"""Lists within lists, and letters of a text argument."""

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.float16)}
DTYPES |= {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.bool, torch.uint8)}
DTYPES |= {str(dtype).removeprefix("torch."): dtype for dtype in (torch.int8, torch.int16, torch.int32, torch.int64)}
"""Types of numbers by their names."""

_WORDS: dict[str, dict[str, Any]] = {
    "dtype": DTYPES,
    "device": {"cpu": torch.device("cpu")},
    "layout": {"strided": torch.strided},
    "memory_format": {name: getattr(torch, name) for name in ("contiguous_format", "preserve_format", "channels_last")},
    "float": {"inf": math.inf, "-inf": -math.inf, "nan": math.nan},
}
"""Kinds of arguments that JSON has no words for."""


class UnfitError(ValueError):
    """A graph that cannot be written, or does not fit the model, this library or this torch; the text says why."""


def target_name(target: Any) -> str:
    """Return what a file calls an operator.

    Raises:
        UnfitError: No file may name it.
    """
    known = {**{function: name for name, function in SIZES.items()}, operator.getitem: GETITEM}
    name = known.get(target) or str(target)
    if find_target(name) is not target:
        raise UnfitError(f"`{cut(name, 80)}` is not in graph/operators.py")
    return name


def find_target(name: Any) -> Callable[..., Any]:
    """Return the operator of a name: one of the table that changes nothing it is given.

    Raises:
        UnfitError: There is none here.
    """
    if name == GETITEM:
        return operator.getitem
    if isinstance(name, str) and name in SIZES:
        return SIZES[name]
    space, _, rest = name.partition(".") if isinstance(name, str) else ("", "", "")
    base, _, overload = rest.partition(".")
    packet = getattr(torch.ops.aten, base, None) if space == "aten" and base in _NAMES else None
    if packet is None or overload not in packet.overloads():
        raise UnfitError(f"the operator {cut(repr(name), 80)} is not known here")
    found: OpOverload = getattr(packet, overload)
    if found._schema.is_mutable:
        raise UnfitError(f"`{name}` changes what it is given")
    return found


def encode(value: Any, refer: Callable[[fx.Node], Any]) -> Any:
    """Return an argument as JSON; `refer` answers for nodes.

    Raises:
        UnfitError: It is nothing that a file can hold.
    """
    if isinstance(value, fx.Node):
        return refer(value)
    if isinstance(value, list):
        return [encode(entry, refer) for entry in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(entry, refer) for entry in value]}
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    for kind, words in _WORDS.items():
        for word, meant in words.items():
            if type(value) is type(meant) and (value == meant or (value != value and meant != meant)):
                return {kind: word}
    raise UnfitError(f"an argument is {cut(repr(value), 60)}")


def decode(found: Any, refer: Callable[[str, Any], Any], depth: int = 0) -> Any:
    """Return what `encode` wrote; `refer` answers for {"node": ...} and its like.

    Raises:
        UnfitError: It is nothing that `encode` writes.
    """
    if depth > DEEPEST:
        raise UnfitError("lists are too deep")
    if isinstance(found, list):
        return [decode(entry, refer, depth + 1) for entry in found]
    if isinstance(found, dict) and len(found) == 1:
        ((kind, word),) = found.items()
        if kind == "tuple" and isinstance(word, list):
            return tuple(decode(entry, refer, depth + 1) for entry in word)
        if kind in _WORDS and isinstance(word, str) and word in _WORDS[kind]:
            return _WORDS[kind][word]
        return refer(kind, word)
    whole = type(found) is int and -(1 << 63) <= found < 1 << 63
    text = isinstance(found, str) and len(found) <= LONGEST_TEXT and found.isprintable()
    if found is None or isinstance(found, bool) or whole or text or (type(found) is float and math.isfinite(found)):
        return found
    raise UnfitError(f"{cut(repr(found), 60)} is no argument")
