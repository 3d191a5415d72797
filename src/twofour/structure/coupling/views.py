"""Rules of the operators that only move values: reshapes, slices, concatenations, look-ups."""

from __future__ import annotations

from math import prod

from torch import fx

from twofour.structure.coupling.axes import Axis, DoesNotDivide, fix, joined, part, regroup, unify
from twofour.structure.coupling.axes import size as size_of
from twofour.structure.coupling.call import Axes, Call, fresh, rule


@rule("view reshape _unsafe_view view_as reshape_as flatten unflatten squeeze unsqueeze")
def reshape(call: Call) -> Axes:
    """The same values in the same order."""
    return regroup(call.axes("self" if "self" in call.named else "input"), call.shape)


@rule("permute transpose t numpy_T mT movedim swapaxes adjoint")
def transpose(call: Call) -> Axes:
    """Axes in another order."""
    x = call.axes("self")
    name = call.node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    order = list(range(len(x)))
    if name == "permute":
        order = [call.axis(dim, len(x)) for dim in call["dims"]]
    elif name == "movedim":
        raise DoesNotDivide("movedim")
    elif len(x) > 1:
        first, second = ("dim0", "dim1") if name == "transpose" else ("axis0", "axis1")
        a, b = (call[first], call[second]) if name in ("transpose", "swapaxes") else (-2, -1)
        a, b = call.axis(a, len(x)), call.axis(b, len(x))
        order[a], order[b] = order[b], order[a]
    return [x[index] for index in order]


@rule("expand expand_as broadcast_to")
def expand(call: Call) -> Axes:
    """An axis of size 1 repeats."""
    x = call.axes("self")
    x = [*([[]] * (len(call.shape) - len(x))), *x]
    return [axis if size_of(axis) == size else fresh(size) for axis, size in zip(x, call.shape, strict=True)]


@rule("repeat_interleave")
def repeat_interleave(call: Call) -> Axes:
    """Every channel several times, next to each other."""
    x = call.axes("self")
    if not isinstance(call["repeats"], int) or call["dim"] is None:
        raise DoesNotDivide("repeat_interleave by a tensor")
    dim = call.axis(call["dim"], len(x))
    return [[*axis, *fresh(call["repeats"])] if index == dim else axis for index, axis in enumerate(x)]


@rule("repeat tile")
def repeat(call: Call) -> Axes:
    """The axis several times, one after the other."""
    x = call.axes("self")
    x = [*([[]] * (len(call.shape) - len(x))), *x]
    return [[*fresh(size // size_of(axis)), *axis] for axis, size in zip(x, call.shape, strict=True)]


@rule("cat concat concatenate")
def concatenate(call: Call) -> Axes:
    """Side by side along one axis."""
    given = [call.of(node) for node in call["tensors"] if prod(node.meta["val"].shape)]
    dim = call.axis(call["dim"], len(given[0]))
    for other in given[1:]:
        for index, (mine, its) in enumerate(zip(given[0], other, strict=True)):
            if index != dim:
                unify(mine, its)
    return [joined([axes[dim] for axes in given]) if i == dim else axis for i, axis in enumerate(given[0])]


@rule("stack")
def stack(call: Call) -> Axes:
    """Along a new axis."""
    given = [call.of(node) for node in call["tensors"]]
    dim = call.axis(call["dim"], len(given[0]) + 1)
    for other in given[1:]:
        for mine, its in zip(given[0], other, strict=True):
            unify(mine, its)
    return [*given[0][:dim], fresh(len(given), "a stack of tensors"), *given[0][dim:]]


@rule("constant_pad_nd pad")
def pad(call: Call) -> Axes:
    """The same value beside an axis; other ways of padding fix it."""
    x, given = call.axes("self"), list(call["pad"])
    answer = list(x)
    for pair in range(len(given) // 2):
        before, after = given[2 * pair : 2 * pair + 2]
        index = len(x) - 1 - pair
        if not before and not after:
            continue
        if before < 0 or after < 0 or call["mode"] not in (None, "constant"):
            raise DoesNotDivide(f"padding {given}")
        sides = [fresh(count) if count else None for count in (before, after)]
        answer[index] = joined([axis for axis in (sides[0], x[index], sides[1]) if axis is not None])
    return answer


@rule("slice narrow")
def cut(call: Call) -> Axes:
    """A part of an axis."""
    x = call.axes("self")
    dim = call.axis(call["dim"] or 0, len(x))
    whole = size_of(x[dim])
    start, stop = call["start"] or 0, call["end"]
    if call["length"] is not None:
        stop = start + call["length"]
    start = max(start + whole, 0) if start < 0 else min(start, whole)
    stop = whole if stop is None else stop + whole if stop < 0 else min(stop, whole)
    return [_part(axis, start, stop, call["step"] or 1) if i == dim else axis for i, axis in enumerate(x)]


def _part(axis: Axis, start: int, stop: int, step: int = 1) -> Axis:
    if step == 1 and start < stop:
        return part(axis, start, stop)
    fix(axis, "a slice with steps")
    return fresh(len(range(start, stop, step)), "a slice with steps")


@rule("split split_with_sizes chunk tensor_split unsafe_split unsafe_chunk")
def split(call: Call) -> list[Axes]:
    """Parts of an axis."""
    x = call.axes("self")
    dim = call.axis(call["dim"] or 0, len(x))
    answer: list[Axes] = []
    start = 0
    for shape in call.shapes:
        stop = start + shape[dim]
        answer.append([_part(axis, start, stop) if index == dim else axis for index, axis in enumerate(x)])
        start = stop
    return answer


@rule("select")
def select(call: Call) -> Axes:
    """One place of an axis, which stays."""
    x = call.axes("self")
    dim = call.axis(call["dim"], len(x))
    fix(x[dim], "one of its places is selected")
    return [axis for index, axis in enumerate(x) if index != dim]


@rule("unbind")
def unbind(call: Call) -> list[Axes]:
    """Every place of an axis, which stays."""
    x = call.axes("self")
    dim = call.axis(call["dim"], len(x))
    fix(x[dim], "its places are taken apart")
    return [[axis for index, axis in enumerate(x) if index != dim] for _ in call.shapes]


@rule("embedding")
def embedding(call: Call) -> Axes:
    """Rows of a table, which keep their numbers."""
    fix(call.axes("weight")[0], "rows of an embedding")
    return [*call.axes("indices"), call.axes("weight")[1]]


@rule("index")
def index(call: Call) -> Axes:
    """Places of the first axes by number; they stay."""
    x, given = call.axes("self"), list(call["indices"])
    count = len(given)
    if any(not isinstance(node, fx.Node) for node in given):
        raise DoesNotDivide("an index with gaps")
    for axis in x[:count]:
        fix(axis, "its places are indexed")
    tail = x[count:]
    return [*(fresh(size, "places of an index") for size in call.shape[: len(call.shape) - len(tail)]), *tail]
