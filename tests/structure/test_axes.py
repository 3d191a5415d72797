"""Axes: reshapes, slices and concatenations keep track of where every channel is."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twofour.structure.coupling.axes import (
    Atom,
    Axis,
    DoesNotDivide,
    coordinates,
    fix,
    joined,
    leaves,
    part,
    regroup,
    size,
    unify,
)


def positions(axis: Axis, source: list[Atom]) -> list[int]:
    """Where each position of an axis made of `source` leaves stands in their row-major order."""
    found = coordinates(axis)
    total = torch.zeros(size(axis), dtype=torch.long)
    scale = 1
    for leaf in reversed(source):
        if leaf in found:
            total += found[leaf].index.clamp(min=0) * scale
        scale *= leaf.size
    return total.tolist()


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([(4, 6), (2, 12), (24,), (3, 8), (2, 3, 4), (6, 4), (8, 3), (4, 3, 2)]), st.data())
def test_reshapes_keep_the_order_of_values(first: tuple[int, ...], data: st.DataObject) -> None:
    second = data.draw(st.sampled_from([(4, 6), (2, 12), (24,), (2, 2, 6), (2, 3, 4), (4, 3, 2)]))
    axes = [[Atom(n)] for n in first]
    try:
        again = regroup(axes, second)
    except DoesNotDivide:
        return
    assert [size(axis) for axis in again] == list(second)
    whole = [atom for axis in axes for atom in axis]
    assert positions(whole, list(leaves(whole))) == list(range(24))
    flat = [atom for axis in again for atom in axis]
    assert positions(flat, list(leaves(whole))) == list(range(24))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 11), min_size=1, max_size=4, unique=True), st.integers(1, 3))
def test_slices_side_by_side_are_the_axis(cuts: list[int], block: int) -> None:
    axis: Axis = [Atom(12), Atom(block)]
    edges = [0, *sorted(cuts), 12]
    parts = [part(axis, low * block, high * block) for low, high in pairwise(edges)]
    assert [size(p) // block for p in parts] == [high - low for low, high in pairwise(edges)]
    unify(joined(parts), axis)
    found = coordinates(axis)
    for (low, high), piece in zip(pairwise(edges), parts, strict=True):
        for leaf, own in coordinates(piece).items():
            assert torch.equal(found[leaf].index[low * block : high * block], own.index)


def test_the_same_channels_twice_are_a_product() -> None:
    axis: Axis = [Atom(6)]
    two, same = joined([axis, axis])
    assert (two.size, same) == (2, axis[0])
    assert coordinates([two, same])[same].index.tolist() == [*range(6), *range(6)]


def test_axes_that_meet_are_taken_apart_alike() -> None:
    heads: Axis = [Atom(4), Atom(8)]
    whole: Axis = [Atom(32)]
    unify(whole, heads)
    assert list(leaves(whole)) == list(leaves(heads))
    fix(heads[:1], "heads")
    assert [leaf.fixed for leaf in leaves(whole)] == ["heads", ""]


def test_a_padded_axis_shares_its_middle() -> None:
    inner: Axis = [Atom(8)]
    wide: Axis = [Atom(16)]
    unify(wide, joined([[Atom(4)], inner, [Atom(4)]]))
    found = coordinates(wide)[inner[0]]
    assert found.index.tolist() == [-1] * 4 + list(range(8)) + [-1] * 4


def test_a_reason_is_inherited_and_the_first_one_stays() -> None:
    axis: Axis = [Atom(12, "an input")]
    fix(axis, "later")
    assert [leaf.fixed for axis in regroup([axis], [3, 4]) for leaf in leaves(axis)] == ["an input"] * 2


@pytest.mark.parametrize(
    "attempt",
    [
        lambda: unify([Atom(4), Atom(6)], [Atom(6), Atom(4)]),
        lambda: unify([Atom(4)], [Atom(5)]),
        lambda: part([Atom(4), Atom(3)], 1, 6),
        lambda: regroup([[Atom(4)], [Atom(9)]], [6, 6]),
        lambda: coordinates([twice, twice]),
    ],
)
def test_what_does_not_divide_raises(attempt) -> None:
    with pytest.raises(DoesNotDivide):
        attempt()


twice = Atom(3)
