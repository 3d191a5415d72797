"""Inputs of an example that a call may leave out, since the model makes the same itself: one graph serves both calls.

A tokenizer gives `token_type_ids` and `attention_mask`, and callers leave out what says nothing. Which inputs do, and
what stands for them, is measured on the layers, not known by name: an answer must be the same without the input as with
one of `KINDS`, whatever the other inputs hide or pad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from twofour import calls
from twofour.compiler.whole_model import WholeModel, by_layers
from twofour.measure.distance import distance

KINDS: dict[str, Callable[[Sequence[int], torch.dtype], Tensor]] = {
    "zeros": lambda sizes, dtype: torch.zeros(sizes, dtype=dtype, device="cpu"),
    "ones": lambda sizes, dtype: torch.ones(sizes, dtype=dtype, device="cpu"),
    "positions": lambda sizes, dtype: torch.arange(sizes[-1], dtype=dtype, device="cpu").expand(*sizes).contiguous(),
}
"""What a model makes of a whole-number input that a call leaves out."""

ROWS, TOKENS = 2, 16
"""How much of an example is looked at: what stands for an input follows from its kind, not from its size."""

SAME = 1e-6
"""Relative difference of answers that are the same: with a mask of ones attention may take another kernel."""

USUAL_PADDINGS = (0, 1, 2)
"""Tokens that stand for padding in most vocabularies: tried whatever a model says of itself."""


@dataclass(frozen=True)
class Default:
    """What stands for an input that a call leaves out.

    Attributes:
        kind: One of `KINDS`.
        source: The input whose sizes it has.
        axes: Of each axis whether it is as long as the source's, else of size 1.
        dtype: Of the example's input.
    """

    kind: str
    source: str
    axes: tuple[bool, ...]
    dtype: torch.dtype

    def value(self, given: Mapping[str, Any]) -> Tensor | None:
        """Return the input beside those of a call, None where its sizes are not known."""
        source = given.get(self.source)
        if not isinstance(source, Tensor) or source.is_nested or source.ndim < len(self.axes):
            return None
        sizes = [size if same else 1 for size, same in zip(source.shape, self.axes, strict=False)]
        return KINDS[self.kind](sizes, self.dtype)


def completed(given: Mapping[str, Any], defaults: Mapping[str, Default]) -> dict[str, Any] | None:
    """Return a call with what it leaves out, None where that is nothing, or cannot be made."""
    made = {name: one.value(given) for name, one in defaults.items() if name not in given}
    return {**given, **made} if made and all(value is not None for value in made.values()) else None


def let_out(runner: WholeModel, leaves: Sequence[Any]) -> str:
    """Let calls of a graph leave out inputs that the model makes itself; return what the plan says of that.

    Args:
        runner: The graph, which takes no features that it writes into, and the layers.
        leaves: The example.
    """
    defaults = {} if runner.written else defaults_of(runner, leaves)
    runner.complete = partial(completed, defaults=defaults) if defaults else None
    listed = ", ".join(f"`{name}` ({one.kind} then)" for name, one in defaults.items())
    return f"; calls may leave out {listed}" if listed else ""


def defaults_of(runner: WholeModel, leaves: Sequence[Any]) -> dict[str, Default]:
    """Return what stands for the inputs that calls may leave out of those that a graph was captured with.

    Args:
        runner: The graph, and the layers.
        leaves: The example.
    """
    model, example = runner.model, runner.guard.inputs.value(leaves)
    part = tree_map(_Part(example), example)
    found: dict[str, Default] = {}
    for name in part:
        source = next((other for other in part if other != name and isinstance(part[other], Tensor)), None)
        if source is not None and _counts(part[name]) and _answer(model, _without(part, [name])) is not None:
            kinds = (one for one in _possible(part, name, source) if _alike(model, part, {name: one}))
            one = next(kinds, None)
            found |= {} if one is None else {name: one}
    return found if found and _alike(model, part, found) and _serves(runner, example, found) else {}


class _Part:
    """Cuts tensors of an example to a few rows and tokens."""

    def __init__(self, example: Mapping[str, Any]) -> None:
        first = next((v for v in example.values() if isinstance(v, Tensor) and v.ndim > 1), None)
        self.sizes = (0, 0) if first is None else tuple(first.shape[:2])

    def __call__(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        for axis, most in enumerate((ROWS, TOKENS)[: leaf.ndim]):
            leaf = leaf.narrow(axis, 0, most) if leaf.shape[axis] == self.sizes[axis] > most else leaf
        return leaf


def _counts(value: Any) -> bool:
    """Tell whether an input is of whole numbers or truth values, one for each token."""
    return isinstance(value, Tensor) and value.ndim > 1 and not (value.is_floating_point() or value.is_complex())


def _possible(example: Mapping[str, Any], name: str, source: str) -> Iterator[Default]:
    """Yield what might stand for an input: first what the example gives, where it is one of these."""
    value, sizes = example[name], example[source].shape
    if value.ndim > len(sizes) or any(one not in (1, size) for one, size in zip(value.shape, sizes, strict=False)):
        return
    axes = tuple(one == size for one, size in zip(value.shape, sizes, strict=False))
    made = [Default(kind, source, axes, value.dtype) for kind in KINDS]
    yield from sorted(made, key=lambda one: not torch.equal(KINDS[one.kind](value.shape, value.dtype), value))


def _alike(model: nn.Module, example: Mapping[str, Any], defaults: Mapping[str, Default]) -> bool:
    """Tell whether the layers answer the same without some inputs as with these in their places."""
    for given in _variants(model, _without(example, defaults)):
        want = _answer(model, given)
        if want is None:  # a model may refuse what a variant makes of its inputs
            continue
        whole = completed(given, defaults)
        found = None if whole is None else _answer(model, whole)
        if found is None or found[1] != want[1] or not distance(found[0], want[0]) <= SAME:
            return False
    return True


def _variants(model: nn.Module, example: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the example, then with each input of whole numbers changed as masks and padding would be.

    A model may count positions by a mask, or look for padding among its tokens: then nothing constant stands for those.
    """
    yield example
    known = _paddings(model)
    tokens = next((name for name, value in example.items() if _counts(value)), None)
    for name, value in example.items():
        if not _counts(value) or value.shape[1] < 2:
            continue
        some = max(1, value.shape[1] // 4)
        mask = bool(((value == 0) | (value == 1)).all())
        if mask:
            changed = value.clone()
            changed[-1, :some] = 1 - changed[-1, :some].long()
            yield {**example, name: changed}
        if name == tokens or not mask:  # tokens too may be zeros and ones alone
            alone = [value.new_tensor([one]) for one in sorted({*known, *USUAL_PADDINGS})]
            for padding in (*alone, *(() if known else value.unique().split(some))):
                yield {**example, name: _padded(value, padding, some)}


def _padded(value: Tensor, padding: Tensor, some: int) -> Tensor:
    """Return tokens with these in turn at the beginning of the first row and at the end of the last."""
    changed = value.clone()
    changed[0, :some] = changed[-1, -some:] = padding.repeat(some)[:some].to(value.dtype)
    return changed


def _paddings(model: nn.Module) -> set[int]:
    """Return the tokens that may stand for padding by what a model, its parts and their configurations say."""
    found: set[Any] = set()
    for module in model.modules():
        own = getattr(module, "config", None)
        for config in (own, *getattr(own, "__dict__", {}).values()):  # one of a model of two kinds holds one for each
            found.add(getattr(config, "pad_token_id", None))
        found |= {value for name, value in vars(module).items() if "pad" in name.lower() and type(value) is int}
    return {one for one in found if type(one) is int}


def _serves(runner: WholeModel, example: Mapping[str, Any], defaults: Mapping[str, Default]) -> bool:
    """Tell whether the graph answers the example without these inputs as the layers do, and these with them."""
    given = _without(example, defaults)
    whole, want = completed(given, defaults), _answer(runner.model, given)
    leaves = None if whole is None else runner.guard.leaves(whole)
    if whole is None or leaves is None or want is None:
        return False
    found = _answer(runner.model, whole)  # any token of the example may be padding, in rows that no part has
    if found is None or not distance(found[0], want[0]) <= 10 * SAME:
        return False
    error = distance(runner.program(*leaves), want[0])
    both = lambda: runner.program.python(*leaves), lambda: tree_flatten(by_layers(runner.model, calls.fresh(given)))[0]
    return runner.agreement.judged(error, *both) <= runner.agreement.allowed


def _without(example: Mapping[str, Any], names: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in example.items() if name not in names}


def _answer(model: nn.Module, given: Mapping[str, Any]) -> tuple[list[Any], Any] | None:
    """Return leaves and structure of what the layers answer, None where they do not run on this."""
    try:
        return tree_flatten(by_layers(model, calls.fresh(dict(given))))
    except Exception:  # a model may refuse a call in any way it likes
        return None
