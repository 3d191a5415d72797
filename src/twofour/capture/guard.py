"""Which calls a captured graph holds for, and which argument of another call is why not."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path

from twofour.capture.call import alike
from twofour.capture.forward import Graph
from twofour.errors import cut

READ_STRIDES = (
    torch.ops.aten.as_strided.default,
    torch.ops.aten.as_strided_copy.default,
    torch.ops.aten.view_as_complex.default,
    torch.ops.aten.view.dtype,
)
"""Operators whose answer, or whether there is one, depends on how their operand lies in memory."""

_VIEWS = ("view", "unsqueeze", "squeeze", "expand", "slice", "select", "alias", "permute", "transpose", "clone")
_LOOKED_AT = ("sym_size", "eq", "ne", "gt", "ge", "lt", "le")


class Guard:
    """Tells whether a captured graph holds for given leaves: same structure and constants, sizes within its guards.

    Attributes:
        inputs: Structure of what a call gives.
        free: (leaf, axis) of the sizes that may differ from the example's.
        ids: Leaves of int64 that may be int32 as well: they are made int64 where a graph is entered.
    """

    def __init__(self, graph: Graph) -> None:
        self.inputs, self.constants = graph.inputs, graph.constants
        nodes = [node.meta.get("val") for node in graph.module.graph.nodes if node.op == "placeholder"]
        tensors = [(index, value) for index, value in enumerate(nodes) if isinstance(value, Tensor)]
        self.kinds = [(index, value.dtype, value.ndim) for index, value in tensors]
        places = [node for node in graph.module.graph.nodes if node.op == "placeholder"]
        self.ids = {at for at, dtype, _ in self.kinds if dtype is torch.int64 and _for_their_values(places[at])}
        axes = [(index, axis, size) for index, value in tensors for axis, size in enumerate(value.shape)]
        self.fixed = [(index, axis, size) for index, axis, size in axes if isinstance(size, int)]
        self.free = {(index, axis) for index, axis, size in axes if not isinstance(size, int)}
        self.laid_out = _strides(graph) if any(node.target in READ_STRIDES for node in graph.module.graph.nodes) else {}
        self.more_than_one: list[tuple[int, int]] = []
        self.text = " and ".join(f"({guard})" for guard in graph.guards) or "True"
        self._test: Callable[[dict[str, Any]], bool] | None = None

    @property
    def dynamic(self) -> bool:
        """Whether any size may differ from the example's."""
        return bool(self.free)

    def limits(self) -> str:
        """Say that other sizes must leave the example's remainders, or that images have its sizes, "" else."""
        pinned, images = self._pinned(), {index for index, _, ndim in self.kinds if ndim == 4}
        if any((one, 0) not in pinned and {(one, 2), (one, 3)} <= pinned for one in images):
            return " (the forward fixes the size of images: compile the model once for each)"
        return " where they leave the example's remainders by strides" if images and " % " in self.text else ""

    def served(self) -> str:
        """Say which sizes may differ, where others over 1 are held to the example's, "" else: "axis 0 of `x`"."""
        pinned = self._pinned()
        names, left = _names(self._held()), sorted(self.free - pinned)
        told = [f"axis {axis} of `{names[index]}`" for index, axis in left]
        more = [f"{len(told) - 6} more"] if len(told) > 6 else []
        return (", ".join((*told[:6], *more)) or "no axis") if pinned else ""

    def _pinned(self) -> set[tuple[int, int]]:
        """Return (leaf, axis) of sizes over 1 that are held to the example's."""
        pinned = {(index, axis) for index, axis, size in self.fixed if size != 1}
        for index, (path, _) in enumerate(tree_flatten_with_path(self._held(), is_leaf=lambda x: x is None)[0]):
            known = re.escape(f"(L[{getattr(path[0], 'key', '')!r}]{keystr(path[1:])}.size()[")
            pinned |= {(index, int(axis)) for axis in re.findall(known + r"(\d+)\] == \d+\)", self.text)}
        return pinned

    def free_axes(self) -> list[int]:
        """Return the axes on which some size may differ."""
        return sorted({axis for _, axis in self.free})

    def ones(self) -> list[str]:
        """Return the axes whose size is 1 in every call: "axis 1 of `x`"."""
        names = _names(self._held())
        return [f"axis {axis} of `{names[index]}`" for index, axis, size in self.fixed if size == 1]

    def refuse_ones(self, axis: int) -> None:
        """Refuse sizes of 1 on an axis from now on."""
        self.more_than_one += [(index, a) for index, a in sorted(self.free) if a == axis]

    def freeze(self, leaves: Sequence[Any]) -> None:
        """Refuse sizes other than those of `leaves` from now on."""
        self.fixed += [(index, axis, leaves[index].size(axis)) for index, axis in sorted(self.free)]
        self.free = set()

    def _holds(self, given: Mapping[str, Any]) -> bool:
        """Tell whether sizes are within the guards; a condition that divides by zero does not hold."""
        test = self._test
        if test is None:
            known = {"torch": torch, "math": math, "min": min, "max": max}
            test = self._test = eval(f"lambda L: {self.text}", known)
        try:
            return test is not None and bool(test({**given}))
        except ZeroDivisionError:
            return False

    def leaves(self, given: Mapping[str, Any]) -> list[Any] | None:
        """Return the leaves of a call, ids of int32 as int64, or None where the graph does not hold for them."""
        leaves, spec = tree_flatten(given)
        if spec != self.inputs.spec:
            leaves, spec = tree_flatten(_alike(given, self._held()))
        if spec != self.inputs.spec or self._fault(leaves) is not None:
            return None
        if not self._holds(given):
            return None
        return [leaf.long() if index in self.ids else leaf for index, leaf in enumerate(leaves)]

    @property
    def names(self) -> list[str]:
        """Arguments that the graph takes."""
        return list(self._held())

    def unlike(self, given: Mapping[str, Any], of: Mapping[str, Any] | None = None) -> tuple[str, str]:
        """Return which argument of a call the graph does not hold for, and what it is against what the graph holds.

        Args:
            given: The call, with what was made for arguments that it leaves out.
            of: Those that it gives itself, which alone are named where sizes do not fit; default: all.
        """
        given = _alike(given, self._held())
        leaves, spec = tree_flatten(given)
        names = _names(given)
        if spec != self.inputs.spec:
            return self._structure_unlike(given, names, leaves)
        if (fault := self._fault(leaves)) is not None:
            return names[fault[0]], _shown(leaves[fault[0]]) + fault[1]
        own = given if of is None else {name: value for name, value in given.items() if name in of}
        shown = ", ".join(_shown(leaf) for leaf in tree_flatten(own)[0] if isinstance(leaf, Tensor))
        return ", ".join(_names(own)), f"{shown}: sizes outside of what the graph holds for"

    def _fault(self, leaves: Sequence[Any]) -> tuple[int, str] | None:
        """Return the first leaf that the graph does not hold for, and what it holds for, its guards left out."""
        for index, value in self.constants.items():
            if not alike(leaves[index], value):
                return index, f", and the graph holds for {_shown(value)}"
        for index, dtype, ndim in self.kinds:
            leaf = leaves[index]
            if (
                not isinstance(leaf, Tensor)
                or leaf.ndim != ndim
                or not leaf.is_cpu
                or not self._is_of(index, leaf, dtype)
            ):
                return index, f", and the graph holds for {dtype} of {ndim} axes on the CPU"
            if leaf.is_nested or not leaf.numel() or leaf.layout is not torch.strided:
                return index, ": empty, or not strided"
        for index, axis, size in self.fixed:
            if leaves[index].size(axis) != size:
                return index, f", and the graph holds for a size of {size} on axis {axis}"
        for index, strides in self.laid_out.items():
            leaf = leaves[index]
            if not (leaf.is_contiguous() if strides is None else leaf.stride() == strides):
                return index, f" of strides {leaf.stride()}, and the graph reads numbers by their places in memory"
        for index, axis in self.more_than_one:
            if leaves[index].size(axis) == 1:
                return index, f", and the graph holds for sizes over 1 on axis {axis}"
        return None

    def _is_of(self, index: int, leaf: Tensor, dtype: torch.dtype) -> bool:
        return leaf.dtype is dtype or (leaf.dtype is torch.int32 and index in self.ids)

    def _held(self) -> dict[str, Any]:
        """Return what the graph takes, built as it takes it, without values."""
        return self.inputs.value([None] * self.inputs.spec.num_leaves)

    def _structure_unlike(self, given: Mapping[str, Any], names: list[str], leaves: list[Any]) -> tuple[str, str]:
        held = self._held()
        if more := [name for name in given if name not in held]:
            return more[0], f"{_shown(given[more[0]])}, and the graph was captured without it or with its default"
        if fewer := [name for name in held if name not in given]:
            return fewer[0], "left out, or its default, and the example gives another value: pass it here too"
        known = _names(held)
        unlike = [name for name in (*names, *known) if (name in names) != (name in known)]
        return ", ".join(unlike[:2]) or ", ".join(given), "built otherwise than what the graph was captured with"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_test": None}


def _for_their_values(node: fx.Node) -> bool:
    """Tell whether numbers are looked up, compared or converted alone, so that int32 answers what int64 does.

    Sums and products of int32 wrap around elsewhere, and are int32 in an answer.
    """
    return all(_is_for_values(user, node) for user in node.users)


def _is_for_values(user: fx.Node, of: fx.Node) -> bool:
    name = getattr(user.target, "__name__", "").split(".")[0]  # of aten.embedding.default "embedding.default"
    if user.op != "call_function" or user.target is torch.ops.aten.view.dtype:
        return False
    if name in _VIEWS:
        return _for_their_values(user)
    if name in ("to", "_to_copy"):
        found = user.meta["val"].dtype
        return found.is_floating_point or found is torch.bool
    return name in _LOOKED_AT or (name in ("embedding", "rows") and user.args[1] is of)


def _strides(graph: Graph) -> dict[int, tuple[int, ...] | None]:
    """Return the strides of the leaves a graph was captured with, None of contiguous ones, whatever their sizes."""
    tensors = {index: leaf for index, leaf in enumerate(graph.example) if isinstance(leaf, Tensor)}
    return {index: None if leaf.is_contiguous() else leaf.stride() for index, leaf in tensors.items()}


def _alike(value: Any, held: Any) -> Any:
    """Return a call's mappings as dicts in the order of those of the graph, where they have the same keys."""
    if isinstance(held, dict) and isinstance(value, Mapping) and held.keys() == value.keys():
        return {key: _alike(value[key], held[key]) for key in held}
    return value


def _names(given: Mapping[str, Any]) -> list[str]:
    """Return a name for each leaf: `input['input_ids']`."""
    return [f"{getattr(path[0], 'key', '')}{keystr(path[1:])}" for path, _ in tree_flatten_with_path(given)[0]]


def _shown(leaf: Any) -> str:
    if isinstance(leaf, Tensor) and leaf.is_nested:  # which has no shape to ask for
        return f"a nested tensor of {leaf.dtype}"
    if isinstance(leaf, Tensor):
        where = "" if leaf.is_cpu else f" on {leaf.device.type}"
        return f"{leaf.dtype} {tuple(leaf.shape)}{where}"
    tensors = [part for part in tree_flatten(leaf)[0] if isinstance(part, Tensor)]
    if tensors:  # whose text would be their numbers
        return f"a {type(leaf).__name__} of {len(tensors)} tensors, {_shown(tensors[0])} the first"
    return cut(repr(leaf), 40)
