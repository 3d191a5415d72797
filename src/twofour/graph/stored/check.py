"""Whether a stored graph is well formed: every word of it is read before torch is asked for anything."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from typing import Any

from torch.utils._pytree import tree_flatten

from twofour.errors import cut
from twofour.graph.base import aten
from twofour.graph.stored import inputs
from twofour.graph.stored.seal import digest
from twofour.graph.stored.values import DTYPES, GETITEM, LARGEST, SIZES, UnfitError, decode, find_target

VERSION = 2
"""Of the stored graph; readers leave others aside."""

MOST_NODES, MOST_LEAVES, MOST_SYMBOLS = 1 << 15, 256, 256

MOST_CONSTANTS = 4096
"""Numbers of one tensor that stands in the graph itself."""

_FIELDS = {
    "inputs": (dict,),
    "leaves": (list,),
    "symbols": (dict,),
    "guards": (list,),
    "dynamic": (bool,),
    "reason": (str,),
    "constants": (list,),
    "nodes": (list,),
    "answer": (list,),
    "code": (str,),
    "digest": (str,),
}

_NUMBERS = {int, float, bool}

_NORMS = {aten.batch_norm.default: "training", aten.instance_norm.default: "use_input_stats"}
"""Operators that write into the model's statistics where an argument is true, though their schemas do not say so."""


def require_graph(found: Any, weights: Collection[str]) -> None:
    """Refuse what `describe` does not write.

    Args:
        found: JSON that nobody vouches for.
        weights: Names of the model's parameters and buffers.

    Raises:
        UnfitError: It is malformed, or names what a file may not name.
    """
    _require_fields(found)
    for fields in found["symbols"].values():
        _require_symbol(fields)
    structure = inputs.read_structure(found["inputs"])
    if not isinstance(structure, dict) or len(tree_flatten(structure)[0]) != len(found["leaves"]):
        raise UnfitError("the inputs are not as many as their structure has")
    axes = [_require_leaf(leaf, found["symbols"]) for leaf in found["leaves"]]
    inputs.read_guards(found["guards"], structure, axes)
    for constant in found["constants"]:
        _require_constant(constant)
    words = _Words(len(found["leaves"]), weights, len(found["constants"]))
    for entry in found["nodes"]:
        words.call(entry)
    decode(found["answer"], words.refer)
    if found["digest"] != digest(found):
        raise UnfitError("it is damaged: its digest is of other words")


def _require_fields(found: Any) -> None:
    if not isinstance(found, dict) or found.get("version") != VERSION or type(found["version"]) is not int:
        raise UnfitError("it is of another version")
    for name, kinds in _FIELDS.items():
        if not isinstance(found.get(name), kinds):
            raise UnfitError(f"its `{name}` are missing or malformed")
    most = {"leaves": MOST_LEAVES, "symbols": MOST_SYMBOLS, "nodes": MOST_NODES, "constants": MOST_NODES}
    for name, count in most.items():
        if len(found[name]) > count:
            raise UnfitError(f"it has more than {count} {name}")


def _require_symbol(fields: Any) -> None:
    """Refuse what is not the size when the graph was captured, and the largest, or null."""
    hint, most = fields if isinstance(fields, list) and len(fields) == 2 else (0, 0)
    known = type(hint) is int and 2 <= hint <= inputs.MOST_NUMBERS
    if not known or not (most is None or (type(most) is int and hint <= most <= LARGEST)):
        raise UnfitError("a symbol is malformed")


def _require_leaf(leaf: Any, symbols: Mapping[str, Any]) -> int:
    """Refuse what is no leaf; returns how many axes it has."""
    if isinstance(leaf, dict) and set(leaf) == {"value"}:
        value = decode(leaf["value"], _nothing)
        if not (value is None or isinstance(value, bool | int | float | str)):
            raise UnfitError("an input is malformed")
        return 0
    inputs.require_leaf(leaf, {name: hint for name, (hint, _) in symbols.items()})
    return len(leaf["shape"])


def _nothing(kind: str, word: Any) -> Any:
    raise UnfitError("an input is malformed")


def _require_constant(found: Any) -> None:
    """Refuse what is no tensor that stands in the graph itself."""
    if not isinstance(found, dict) or set(found) != {"dtype", "shape", "values"} or found["dtype"] not in list(DTYPES):
        raise UnfitError("a constant is malformed")
    shape, values = found["shape"], found["values"]
    sized = isinstance(shape, list) and len(shape) <= 8 and all(type(n) is int and n >= 0 for n in shape)
    numbers = isinstance(values, list) and len(values) <= MOST_CONSTANTS and not set(map(type, values)) - _NUMBERS
    if not sized or not numbers or prod(shape) != len(values):
        raise UnfitError("a constant is malformed")


class _Words:
    """Checks calls one after the other: what they name, and that they refer to earlier ones."""

    def __init__(self, nodes: int, weights: Collection[str], constants: int) -> None:
        self.nodes, self.weights, self.constants = nodes, weights, constants

    def call(self, entry: Any) -> None:
        """Refuse what is neither a layer nor an operator of the table with arguments that it could take."""
        if not isinstance(entry, list) or len(entry) != 3:
            raise UnfitError("a call is malformed")
        name, args, kwargs = entry
        if name == "layer":
            if not isinstance(args, str):
                raise UnfitError("a layer is malformed")
            decode(kwargs, self.refer)
        else:
            self.operator(name, args, kwargs)
        self.nodes += 1

    def operator(self, name: Any, args: Any, kwargs: Any) -> None:
        """Refuse an operator that no file may name, or arguments that it has not."""
        target: Any = find_target(name)
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise UnfitError("a call is malformed")
        of_sizes = name == GETITEM or name in SIZES
        known = [] if of_sizes else [argument.name for argument in target._schema.arguments]
        if not kwargs.keys() <= set(known) or len(args) > (2 if of_sizes else len(known)):
            raise UnfitError(f"`{name}` takes no such arguments")
        for value in (args, *kwargs.values()):
            decode(value, self.refer)
        given = {**dict(zip(known, args, strict=False)), **kwargs}
        if target in _NORMS and given.get("running_mean") is not None and given.get(_NORMS[target]) is not False:
            raise UnfitError(f"`{name}` changes what it is given")

    def refer(self, kind: str, word: Any) -> None:
        """Refuse what is no earlier node, no weight of the model and no constant of the graph."""
        count = {"node": self.nodes, "constant": self.constants}.get(kind, 0)
        if type(word) is int and 0 <= word < count:
            return
        if kind != "weight" or not isinstance(word, str) or word not in self.weights:
            raise UnfitError(f"{cut(repr(kind), 40)} {cut(repr(word), 80)} is not in the graph or the model")
