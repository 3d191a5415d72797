"""2:4 and dense in one weight, from masks to files: docs/hybrid.md."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import floor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.turns import in_turn
from twofour.errors import PackingError, PatternError, TwofourError
from twofour.kernels.nm_matmul import native_rows
from twofour.kernels.nm_matmul.hybrid import from_layout, hybrid_rows, to_layout
from twofour.kernels.problem import Problem
from twofour.packing import pack, rewrite
from twofour.patterns import Hybrid, parse

RULES = {"0": "2:4+25%", "2": "2:4", "4": "2:4+12.5%"}


def sparse(pattern: str, *shape: int, seed: int = 0) -> Tensor:
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return weight * parse(pattern).project(weight, absolute=True)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 16)).eval()


def slow(scores: Tensor, pattern: Hybrid) -> Tensor:
    """Group by group, in Python."""
    keep, lost = torch.zeros(scores.shape, dtype=torch.bool), []
    for first in range(0, scores.shape[1], pattern.m):
        columns, left = range(first, first + pattern.m), 0.0
        for row, values in enumerate(scores.tolist()):
            best = sorted(columns, key=lambda column: (-values[column], column))
            keep[row, best[: pattern.n]] = True
            left += sum(values[column] for column in best[pattern.n :])
        lost.append(left)
    for group in sorted(range(len(lost)), key=lambda group: (-lost[group], group))[: pattern.dense_of(len(lost))]:
        keep[:, group * pattern.m : (group + 1) * pattern.m] = True
    return keep


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 12), st.sampled_from([(2, 4), (1, 4), (4, 8)]), st.floats(0.1, 99.9),
    st.integers(0, 99),
)  # fmt: skip
def test_the_groups_that_lose_most_are_dense_in_every_row(rows, groups, ratio, percent, seed):
    pattern = Hybrid(ratio[0], ratio[1], percent)
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 50, (rows, groups * pattern.m), generator=draw).double()
    keep = pattern.project(scores)
    assert torch.equal(keep, slow(scores, pattern)) and parse(pattern.name) == pattern
    weight = keep * (1 + scores)
    packed = pack(weight.float(), pattern)
    packed.validate()
    assert pattern.check(weight).ok and torch.equal(packed.unpack(), weight.float())


def test_check_names_the_first_group_beyond_the_dense_ones() -> None:
    weight = torch.zeros(3, 16)
    weight[:, :4] = weight[1, 9:12] = 1
    assert parse("2:4+50%").check(weight).ok
    found = parse("2:4+25%").check(weight)
    assert (found.groups, found.legal, found.first, found.values) == (4, 3, (1, 8), (0.0, 1.0, 1.0, 1.0))
    kernel = torch.zeros(2, 2, 8)  # (out, positions, in): the groups of both positions are ranked together
    kernel[0, 1, 4:] = 5
    assert parse("2:4+25%").check(kernel).ok
    assert parse("2:4+10%").check(kernel).first == (0, 1, 4)
    assert parse("2:4+24%").project(torch.arange(8.0)).tolist() == 2 * [
        False,
        False,
        True,
        True,
    ]
    assert parse("2:4+25%").project(torch.arange(8.0)).tolist() == [False, False, True, True, *4 * [True]]


def test_what_follows_from_what() -> None:
    for narrow in ("2:4", "1:4", "64:2:8", "2:4+12.5%", "1:4+25%"):
        assert parse(narrow).within(parse("2:4+25%")), narrow
    for other in ("2:4", "2:4+50%", "4:8", "4:8+25%"):
        assert not parse("2:4+25%").within(parse("2:4+12.5%" if other == "2:4+50%" else other)), other


@pytest.mark.parametrize("text", ["2:4+0%", "2:4+100%", "4:4+25%", "2:4+250%"])
def test_impossible_ones_are_refused(text: str) -> None:
    with pytest.raises(PatternError, match="impossible"):
        parse(text)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_encodings(dtype: str) -> None:
    weight = sparse("2:4+25%", 37, 64)
    packed = pack(weight, "2:4+25%", dtype)
    packed.validate()
    near = weight.abs().amax(1, keepdim=True) / 127 if dtype == "int8" else weight.abs() * 2**-8
    assert ((packed.unpack().float() - weight).abs() <= near).all()
    regular = rewrite(pack(sparse("2:4", 8, 32), "2:4", dtype), parse("2:4+25%"))
    assert torch.equal(regular.unpack(), pack(sparse("2:4", 8, 32), "2:4", dtype).unpack())


@pytest.mark.parametrize("dtype", ["int4", "tf32", "s2"])
def test_other_encodings_are_refused_by_name(dtype: str) -> None:
    with pytest.raises(PackingError, match=r"2:4\+25% has no"):
        pack(sparse("2:4+25%", 16, 64), "2:4+25%", dtype)


def test_a_convolution_comes_back() -> None:
    weight = sparse("2:4+30%", 10, 3, 3, 12).permute(0, 3, 1, 2).contiguous()
    packed = pack(weight, "2:4+30%", axis=1)
    assert torch.equal(packed.unpack(), weight) and packed.values.shape == (10, 2 * (27 - 8) + 4 * 8)


def test_bytes_of_a_small_weight() -> None:
    weight = torch.tensor([[0.0, 5, 0, 7, 1, 2, 3, 4], [6, 0, 0, 8, 0, 0, 0, 9]])
    packed = pack(weight, "2:4+50%")
    assert packed.values.tolist() == [[5, 7, 1, 2, 3, 4], [6, 8, 0, 0, 0, 9]]
    assert packed.indices.tolist() == [0b10, 0b1101, 0b1100]  # the second group is dense; (1, 3); (0, 3)


@in_turn(
    ("place", "byte", "code"),
    [
        (0, 0b11, "indices-dense"),
        (0, 0b00, "indices-dense"),
        (0, 0b110, "indices-padding"),
        (1, 0b0111, "indices-order"),
        (2, 0b11100, "indices-padding"),
        (None, 0, "indices-size"),
    ],
)
def test_hostile_bytes_are_refused(place: int | None, byte: int, code: str) -> None:
    packed = pack(sparse("2:4+50%", 2, 8), "2:4+50%")
    indices = packed.indices[:-1] if place is None else packed.indices.clone()
    if place is not None:
        indices[place] = byte
    bad = replace(packed, indices=indices)
    for call in (bad.validate, bad.unpack):
        with pytest.raises(PackingError) as caught:
            call()
        assert caught.value.code == code


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 70), st.integers(1, 40), st.floats(0.1, 99.9), st.integers(0, 99))
def test_layouts_restore_to_the_bit(rows, groups, percent, seed):
    pattern = Hybrid(2, 4, percent)
    weight = sparse(pattern.name, rows, 4 * groups, seed=seed)
    for dtype in ("float32", "bfloat16", "int8"):
        packed = pack(weight, pattern, dtype)
        for layout in {row.layout for row in hybrid_rows() if row.dtype == dtype}:
            found = from_layout(to_layout(packed, layout))
            assert found.header == packed.header
            assert torch.equal(found.values, packed.values) and torch.equal(found.indices, packed.indices)
            assert found.scales is packed.scales is None or torch.equal(*(w.scales for w in (found, packed)))  # pyright: ignore


def test_layouts_that_say_what_cannot_be_are_refused() -> None:
    row = next(row for row in hybrid_rows() if row.name == "hybrid_matmul_f32_rows__scalar")
    held = row.prepare(pack(sparse("2:4+25%", 32, 64), "2:4+25%"))
    x = torch.randn(3, 64)

    def changed(place: int, value: int) -> Tensor:
        tensor = held.tensor.clone()
        tensor[64:].view(torch.int32)[place] = value
        return tensor

    for place, value in ((0, 5), (0, -1), (1, -1), (2, 1 << 30), (1, 15)):
        bad = replace(held, tensor=changed(place, value))
        with pytest.raises(PackingError, match="do not fit"):
            bad.restore()
        if (place, value) not in ((0, 5), (1, 15)):  # these stay inside of x and of the weight
            with pytest.raises(TwofourError):
                row.run(x, bad, None, Problem(32))


@given(groups=st.integers(1, 4000), parts=st.integers(1, 999_999))
@settings(max_examples=200, deadline=None)
def test_the_share_is_rounded_exactly(groups: int, parts: int) -> None:
    for percent in (Fraction(parts, 10_000), Fraction(parts // 10_000 or 1), Fraction(parts // 1000 or 1, 10)):
        exact = floor(percent * groups / 100 + Fraction(1, 2))
        assert parse(f"2:4+{float(percent):.4f}%").dense_of(groups) == exact
    assert parse("2:4+29%").dense_of(50) == 15


def test_each_row_of_regular_weights_has_one_of_two_regions() -> None:
    """But those of int4, of which there are none: else a dial pays for what 2:4 alone gained by a faster row."""
    regular = {row.name.replace("nm_matmul_2x4_", "") for row in native_rows() if row.dtype != "int4"}
    assert regular == {row.name.replace("hybrid_matmul_", "") for row in hybrid_rows()}


def test_a_row_of_hybrids_takes_no_other_weight() -> None:
    row = hybrid_rows()[0]
    packed = pack(sparse("2:4", 16, 32), "2:4")
    assert "takes hybrid weights" in (row.refuses(packed) or "")
    assert "float32" in (row.refuses(pack(sparse("2:4+25%", 16, 32), "2:4+25%", "int8")) or "")
    assert not row.takes(parse("1:4+25%"), packed.header.encoding)


def test_sums_of_whole_numbers_stay_within_their_type() -> None:
    """All of 70,000 inputs are 2:4, or half of them and all of the others: the latter may exceed int32."""
    row = next(row for row in hybrid_rows() if row.name == "hybrid_matmul_int8_rows__scalar")
    for share, fits in ((1, True), (99, False)):
        packed = pack(sparse(f"2:4+{share}%", 1, 70_000), f"2:4+{share}%", "int8")
        assert (row.refuses(packed) is None) is fits, packed.header
