"""What a stored graph takes: how leaves make up the arguments, their types and sizes, conditions, and an example.

Of the example a file has sizes and the range of whole numbers, no values: real ones are drawn at random.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from twofour.errors import cut
from twofour.graph.stored.values import DEEPEST, DTYPES, UnfitError

MOST_NUMBERS = 1 << 26
"""Values in the leaves of an example: 256 MB of float32."""

MOST_TOKENS = 1 << 20
"""Of them, whole numbers: each may stand for a token that a model makes thousands of values of."""

MOST_GUARDS, LONGEST_GUARD = 1024, 1000

_GUARD_NODES = (ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.And, ast.Or, ast.Not, ast.USub)
_GUARD_NODES += (
    ast.Call,
    ast.Name,
    ast.Load,
    ast.Eq,
    ast.NotEq,
    ast.Lt,
    ast.LtE,
    ast.Gt,
    ast.GtE,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.FloorDiv,
    ast.Mod,
)


def describe_structure(value: Any) -> Any:
    """Return how a value is built of leaves, as JSON: null for a leaf.

    Raises:
        UnfitError: It holds more than dicts with text keys, lists and tuples.
    """
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: describe_structure(entry) for key, entry in value.items()}}
    if type(value) in (list, tuple):
        return {type(value).__name__: [describe_structure(entry) for entry in value]}
    if value is None:
        return None
    raise UnfitError(f"an input is a {type(value).__name__}")


def read_structure(found: Any, depth: int = 0) -> Any:
    """Return a value of that structure whose leaves are None.

    Raises:
        UnfitError: It is nothing that `describe_structure` writes.
    """
    if found is None:
        return None
    if depth <= DEEPEST and isinstance(found, dict) and len(found) == 1:
        ((kind, inner),) = found.items()
        if kind == "dict" and isinstance(inner, dict):
            return {key: read_structure(entry, depth + 1) for key, entry in inner.items()}
        if kind in ("list", "tuple") and isinstance(inner, list):
            entries = [read_structure(entry, depth + 1) for entry in inner]
            return entries if kind == "list" else tuple(entries)
    raise UnfitError("the structure of the inputs is malformed")


def describe_values(leaf: Tensor) -> list[int] | None:
    """Return the smallest and the largest of whole numbers, None of real ones."""
    if leaf.is_floating_point() or not leaf.numel():
        return None
    return [int(leaf.min()), int(leaf.max())]


def example(dtype: torch.dtype, sizes: Sequence[int], span: Sequence[int] | None, seed: int) -> Tensor:
    """Return values like those of an example: whole numbers of a range, real ones at random.

    What is 0 or 1 is taken for a mask: ones, then zeros in the last half of the last axis, so that none is empty.
    """
    generator = torch.Generator().manual_seed(seed)
    if span is None:
        return torch.randn(*sizes, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
    low, high = span
    if (low, high) == (0, 1):
        found = torch.ones(*sizes, dtype=dtype, device="cpu")
        if sizes:
            found[..., (sizes[-1] + 1) // 2 :] = 0
        return found
    found = torch.randint(low, high + 1, tuple(sizes), generator=generator, dtype=torch.int64, device="cpu")
    return found.to(dtype)


def require_leaf(leaf: Any, symbols: Mapping[str, int]) -> None:
    """Refuse what is no tensor leaf: a type, sizes or names of symbols, sizes of the example, a range.

    A size of the example is that of the capture, or 1 where `capture` took 2.

    Raises:
        UnfitError: As above.
    """
    fields = {"dtype", "shape", "example", "range"}
    if not isinstance(leaf, dict) or set(leaf) != fields or leaf["dtype"] not in list(DTYPES):
        raise UnfitError("an input is malformed")
    sizes, shape, span = leaf["example"], leaf["shape"], leaf["range"]
    if not _are_sizes(sizes) or not isinstance(shape, list) or len(shape) != len(sizes):
        raise UnfitError("the sizes of an input are malformed")
    for size, held in zip(sizes, shape, strict=True):
        captured = symbols.get(held) if isinstance(held, str) else held
        doubled = isinstance(held, str) and (size, captured) == (1, 2)
        if type(captured) is not int or not (size == captured or doubled):
            raise UnfitError("the sizes of an input are malformed")
    dtype = DTYPES[leaf["dtype"]]
    if dtype.is_floating_point:
        if span is not None:
            raise UnfitError("an input of real numbers has a range")
        return
    limits = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, min(torch.iinfo(dtype).max, (1 << 62)))
    whole = isinstance(span, list) and len(span) == 2 and all(type(n) is int for n in span)
    if not whole or not limits[0] <= span[0] <= span[1] <= limits[1]:
        raise UnfitError("the range of an input is malformed")


def require_affordable(sizes: Sequence[tuple[torch.dtype, Sequence[int]]]) -> None:
    """Refuse an example of more numbers than a file may ask a model to be run on.

    Raises:
        UnfitError: It has more.
    """
    numbers = sum(prod(shape) for _, shape in sizes)
    tokens = sum(prod(shape) for dtype, shape in sizes if not dtype.is_floating_point)
    if numbers > MOST_NUMBERS or tokens > MOST_TOKENS:
        raise UnfitError("the example of the file is too large to be tried unasked")


def _are_sizes(found: Any) -> bool:
    return isinstance(found, list) and len(found) <= 8 and all(type(n) is int and 0 < n <= MOST_NUMBERS for n in found)


def read_guards(found: Any, given: Mapping[str, Any], axes: Sequence[int]) -> tuple[str, ...]:
    """Return conditions on sizes, which are run as Python later.

    Args:
        found: Of a file.
        given: The structure of the inputs.
        axes: How many axes each leaf has.

    Raises:
        UnfitError: One is anything but arithmetic and comparisons of whole numbers and the inputs' sizes.
    """
    if not isinstance(found, list) or len(found) > MOST_GUARDS:
        raise UnfitError("the conditions on sizes are malformed")
    names = [f"L{keystr(path)}" for path, _ in tree_flatten_with_path(given)[0]]
    known = {f"{name}.size()[{axis}]" for name, count in zip(names, axes, strict=True) for axis in range(count)}
    known = {ast.unparse(ast.parse(text, mode="eval")) for text in known}
    for guard in found:
        if not isinstance(guard, str) or not _is_condition(guard, known):
            raise UnfitError(f"the condition {cut(repr(guard), 60)} is none on sizes of the inputs")
    return tuple(found)


def _is_condition(guard: str, known: Collection[str]) -> bool:
    if len(guard) > LONGEST_GUARD:
        return False
    try:
        parts = list(_parts(ast.parse(guard, mode="eval").body, known))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(_is_arithmetic(part) or _is_number(part) for part in parts)


def _is_arithmetic(node: ast.AST) -> bool:
    """Tell whether a part of a condition compares or computes; of functions there are two."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and len(node.args) > 1 and not node.keywords
    if isinstance(node, ast.Name):
        return node.id in ("min", "max")
    return isinstance(node, _GUARD_NODES)


def _parts(node: ast.AST, known: Collection[str]) -> Iterator[ast.AST]:
    """Yield what a condition is made of, sizes of the inputs left out."""
    if isinstance(node, ast.Subscript) and ast.unparse(node) in known:
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _parts(child, known)


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 1 << 62
