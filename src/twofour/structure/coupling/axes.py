"""What an axis of a tensor is made of: atoms, multiplied (by a reshape) or side by side (in a concatenation).

An axis is a sequence of atoms whose sizes multiply to its own, the slowest first. An atom that a reshape takes apart
becomes such a sequence itself, one that is cut into slices becomes a row of segments; both hold wherever the atom is.
Atoms that meet in an operation are made one (union-find).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor


@dataclass(eq=False)
class Atom:
    """Channels that stand together in one order.

    Attributes:
        size: How many.
        fixed: Why the order must stay as it is, "" where it may change.
        same: The atom that this one was found to be.
        factors: What a reshape took it apart into.
        segments: What a slice or a concatenation divides it into, each an axis.
    """

    size: int
    fixed: str = ""
    same: Atom | None = None
    factors: Axis | None = None
    segments: list[Axis] | None = None


Axis = list[Atom]


class DoesNotDivide(Exception):
    """Two sizes that have to line up do not."""


def resolved(atom: Atom) -> Atom:
    """Return the atom that this one is now."""
    while atom.same is not None:
        atom = atom.same
    return atom


def factors(axis: Axis) -> Axis:
    """Return the atoms of an axis, those that were taken apart replaced, those of size 1 left out."""
    found: Axis = []
    for atom in map(resolved, axis):
        if atom.factors is not None:
            found += factors(atom.factors)
        elif atom.segments is not None and len(atom.segments) == 1:
            found += factors(atom.segments[0])
        elif atom.size != 1:
            found.append(atom)
    return found


def segments(atom: Atom) -> list[Axis]:
    """Return the segments of an atom, those of segments included."""
    found: list[Axis] = []
    for axis in atom.segments or []:
        inner = factors(axis)
        if len(inner) == 1 and inner[0].segments is not None:
            found += segments(inner[0])
        else:
            found.append(axis)
    return found


def size(axis: Axis) -> int:
    """Return the size of an axis."""
    return prod(atom.size for atom in axis)


def leaves(axis: Axis) -> Iterator[Atom]:
    """Yield the atoms that nothing divides, also those of segments."""
    for atom in factors(axis):
        if atom.segments is None:
            yield atom
        else:
            for segment in segments(atom):
                yield from leaves(segment)


def fix(axis: Axis, reason: str) -> None:
    """Keep the order of everything in an axis as it is; the first reason stays."""
    for atom in leaves(axis):
        atom.fixed = atom.fixed or reason


def unify(first: Axis, second: Axis) -> None:
    """Make two axes of one size the same.

    Raises:
        DoesNotDivide: Their parts do not line up.
    """
    left, right = factors(first), factors(second)
    if prod(atom.size for atom in left) != prod(atom.size for atom in right):
        raise DoesNotDivide(f"{size(left)} against {size(right)}")
    while left and right:
        a, b = resolved(left[0]), resolved(right[0])
        if a.size == b.size:
            _unify_atoms(a, b)
            left, right = left[1:], right[1:]
        elif a.size < b.size:
            right = factors(_apart(b, a.size)) + right[1:]
        else:
            left = factors(_apart(a, b.size)) + left[1:]
        left, right = factors(left), factors(right)


def _unify_atoms(a: Atom, b: Atom) -> None:
    if a is b:
        return
    if a.segments is not None and b.segments is not None:
        _unify_segments(segments(a), segments(b))
    elif a.segments is not None:
        a, b = b, a
    if b.segments is not None:
        if a.fixed:
            fix([b], a.fixed)
    else:
        b.fixed = b.fixed or a.fixed
    a.same = b


def _unify_segments(left: list[Axis], right: list[Axis]) -> None:
    while left and right:
        a, b = left.pop(0), right.pop(0)
        if size(a) > size(b):
            left.insert(0, part(a, size(b), size(a)))
            a = part(a, 0, size(b))
        elif size(b) > size(a):
            right.insert(0, part(b, size(a), size(b)))
            b = part(b, 0, size(a))
        unify(a, b)


def _apart(atom: Atom, slow: int) -> Axis:
    """Take an atom apart into `slow` times the rest."""
    if atom.size % slow or atom.segments is not None:
        raise DoesNotDivide(f"{atom.size} into {slow}" + (" of a concatenation" if atom.segments else ""))
    atom.factors = [Atom(slow, atom.fixed), Atom(atom.size // slow, atom.fixed)]
    return atom.factors


def regroup(axes: Sequence[Axis], sizes: Sequence[int]) -> list[Axis]:
    """Return the axes of a reshape.

    Raises:
        DoesNotDivide: An axis is neither whole atoms nor a clean part of one.
    """
    left = factors([atom for axis in axes for atom in axis])
    found: list[Axis] = []
    for wanted in sizes:
        axis: Axis = []
        while wanted > 1:
            if not left:
                raise DoesNotDivide(f"{list(map(size, axes))} into {list(sizes)}")
            if wanted % left[0].size:
                left = factors(_apart(left[0], wanted)) + left[1:]
            axis.append(left[0])
            wanted //= left[0].size
            left = left[1:]
        found.append(axis)
    return found


def part(axis: Axis, start: int, stop: int) -> Axis:
    """Return the slice [start, stop) of an axis, which is divided there.

    Raises:
        DoesNotDivide: The slice cuts through the blocks of a reshape.
    """
    if start == 0 and stop == size(axis):
        return axis
    first, *rest = factors(axis)
    inner = size(rest)
    if start % inner or stop % inner:
        raise DoesNotDivide(f"[{start}:{stop}] of blocks of {inner}")
    start, stop = start // inner, stop // inner
    if first.segments is None:
        cuts = sorted({0, start, stop, first.size})
        first.segments = [[Atom(high - low, first.fixed)] for low, high in itertools.pairwise(cuts)]
    else:
        first.segments = _cut(_cut(segments(first), start), stop)
    taken: list[Axis] = []
    offset = 0
    for segment in segments(first):
        if start <= offset < stop:
            taken.append(segment)
        offset += size(segment)
    return [*joined(taken), *rest]


def _cut(parts: list[Axis], at: int) -> list[Axis]:
    found: list[Axis] = []
    offset = 0
    for axis in parts:
        here = size(axis)
        if offset < at < offset + here:
            found += [part(axis, 0, at - offset), part(axis, at - offset, here)]
        else:
            found.append(axis)
        offset += here
    return found


def joined(parts: Sequence[Axis]) -> Axis:
    """Return the axis of a concatenation; what all parts end with is multiplied, not repeated."""
    left = [factors(axis) for axis in parts if size(axis)]
    if len(left) == 1:
        return left[0]
    ending: Axis = []
    while all(left) and all(axis[-1] is left[0][-1] for axis in left):
        ending.insert(0, left[0][-1])
        left = [axis[:-1] for axis in left]
    return [Atom(sum(map(size, left)), segments=left), *ending]


@dataclass
class Coordinates:
    """Where the channels of one leaf are along an axis.

    Attributes:
        index: (size,) which channel of the leaf stands there, -1 where none does.
        stride: (size,) how far the leaf's next channel is.
    """

    index: Tensor
    stride: Tensor


def coordinates(axis: Axis) -> dict[Atom, Coordinates]:
    """Return the coordinates of every leaf of an axis.

    Raises:
        DoesNotDivide: A leaf stands in one axis twice.
    """
    found: dict[Atom, Coordinates] = {}
    parts = factors(axis)
    whole = size(parts)
    inner = whole
    for atom in parts:
        inner //= atom.size
        for leaf, own in _of_atom(atom).items():
            if leaf in found:
                raise DoesNotDivide("an axis that holds the same channels twice")
            spread = own.index.repeat_interleave(inner).repeat(whole // (inner * atom.size))
            stride = (own.stride * inner).repeat_interleave(inner).repeat(whole // (inner * atom.size))
            found[leaf] = Coordinates(spread, stride)
    return found


def _of_atom(atom: Atom) -> dict[Atom, Coordinates]:
    if atom.segments is None:
        index = torch.arange(atom.size, device="cpu")
        return {atom: Coordinates(index, torch.ones_like(index))}
    found: dict[Atom, Coordinates] = {}
    offset = 0
    for segment in segments(atom):
        stop = offset + size(segment)
        for leaf, own in coordinates(segment).items():
            nowhere = torch.full((atom.size,), -1, dtype=torch.long, device="cpu")
            here = found.setdefault(leaf, Coordinates(nowhere, torch.zeros_like(nowhere)))
            here.index[offset:stop], here.stride[offset:stop] = own.index, own.stride
        offset = stop
    return found


@dataclass
class Companions:
    """Which leaves every tensor that holds a leaf has beside it, so that its order may differ with their index."""

    of: dict[Atom, set[Atom]] = field(default_factory=dict)

    def add(self, axes: Sequence[Axis]) -> None:
        """Narrow the companions by one more tensor."""
        for index, axis in enumerate(axes):
            others = {
                atom
                for other, axis_of in enumerate(axes)
                if other != index
                for atom in factors(axis_of)
                if atom.segments is None
            }
            self._add(axis, others)

    def _add(self, axis: Axis, others: set[Atom]) -> None:
        parts = factors(axis)
        for atom in parts:
            beside = others | {other for other in parts if other is not atom and other.segments is None}
            if atom.segments is None:
                self.of[atom] = self.of.get(atom, beside) & beside
            else:
                for segment in segments(atom):
                    self._add(segment, beside)
