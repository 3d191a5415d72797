import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import threads
from tests.turns import in_turn
from twofour.errors import PatternError
from twofour.layers import Reduction
from twofour.patterns import COUNTED_DTYPES, NM, GroupStrides, NonzeroBits, PairedNM, parse, ties, ties_reference

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, float("nan"), float("inf"), float("-inf"))


def sample(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Few distinct values, most of them zero, all that a type can hold among them."""
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        low, high = (0, 4) if dtype in (torch.uint8, torch.bool) else (-3, 4)
        values = torch.randint(low, high, shape, generator=generator)
        return (values * (torch.rand(shape, generator=generator) < 0.5)).to(dtype)
    values = torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL), shape, generator=generator)]
    zero = torch.rand(shape, generator=generator) < 0.4
    return torch.where(zero, torch.tensor(0.0), values).to(dtype)


@in_turn("dtype", COUNTED_DTYPES, ids=str)
def test_zeros_of_both_signs_and_broken_values_are_counted_on_every_isa(isa: str, dtype: torch.dtype) -> None:
    for count in (1, 7, 63, 64, 65, 1000):
        values = sample((count,), dtype, count)
        wide = values.double() if dtype.is_floating_point else values
        bits = NonzeroBits.of(values)
        assert torch.equal(bits.values(), wide != 0)
        assert bits.nonzero == int((wide != 0).sum()) and bits.count == count
        floating = dtype.is_floating_point
        assert bits.negative == (int((torch.signbit(wide) & (wide == 0)).sum()) if floating else 0)
        assert bits.broken == (int((~torch.isfinite(wide)).sum()) if floating else 0)


@in_turn("dtype", EIGHT_BITS, ids=str)
def test_all_256_values_of_the_8_bit_floats(isa: str, dtype: torch.dtype) -> None:
    values = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
    bits, wide = NonzeroBits.of(values), values.double()
    assert torch.equal(bits.values(), wide != 0)
    assert bits.negative == int((torch.signbit(wide) & (wide == 0)).sum())
    assert bits.broken == int((~torch.isfinite(wide)).sum())


def test_the_smallest_numbers_are_not_zero_and_the_largest_are_finite(isa: str) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        info = torch.finfo(dtype)
        values = torch.tensor([info.smallest_normal * info.eps, -info.smallest_normal, info.max, info.min], dtype=dtype)
        bits = NonzeroBits.of(values)
        assert (bits.nonzero, bits.negative, bits.broken) == (4, 0, 0)


patterns_of_groups = st.one_of(
    st.integers(2, 64).flatmap(lambda m: st.integers(1, m - 1).map(lambda n: NM(n, m))),
    st.integers(2, 32).flatmap(lambda m: st.integers(1, m - 1).map(lambda n: PairedNM(2 * n, 2 * m))),
)


@given(
    pattern=st.one_of(st.sampled_from(["2:4", "1:2", "4:8-pairs", "8:16"]).map(parse), patterns_of_groups),
    outer=st.integers(1, 5),
    groups=st.integers(1, 4),
    inner=st.sampled_from([1, 1, 2, 9, 63, 64, 65, 130]),
    sparsity=st.sampled_from([0.0, 0.3, 0.6, 1.0]),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_groups_along_any_axis_equal_the_check_in_plain_torch(pattern, outer, groups, inner, sparsity, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (outer, groups * pattern.m, inner)
    weight = torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) >= sparsity)
    view = weight.movedim(1, -1)
    want = pattern.check(view)
    bits = NonzeroBits.of(weight)
    counts = bits.count_groups(pattern, GroupStrides(*shape))
    assert bits.obeys(pattern, GroupStrides(*shape)) == want.ok
    assert (counts.groups, counts.groups - counts.offending) == (want.groups, want.legal)
    nonzero = view.unflatten(-1, (-1, pattern.m)) != 0
    kept = nonzero.sum(-1) if isinstance(pattern, NM) else nonzero.unflatten(-1, (-1, 2)).any(-1).sum(-1)
    assert counts.spare == int((kept < (pattern.n if isinstance(pattern, NM) else pattern.n // 2)).sum())
    if want.first is None:
        assert counts.first is None
    else:
        row, lane, start = want.first
        assert counts.first == (row * shape[1] + start) * inner + lane


@in_turn("text", ["2:4", "1:4", "3:5"])
def test_ties_equal_the_reference_on_every_isa(isa: str, text: str) -> None:
    pattern = parse(text)
    assert isinstance(pattern, NM)
    for dtype in COUNTED_DTYPES:
        for inner in (1, 9, 70):
            weight = sample((3, 7 * pattern.m, inner), dtype, inner)
            if dtype.is_floating_point:
                weight = weight.double().nan_to_num(2.0, 3.0, -3.0).to(dtype)
            want = ties_reference(weight.double().movedim(1, -1), pattern.n, pattern.m)
            assert ties(weight, pattern, GroupStrides(*weight.shape)) == want


def test_ties_of_the_lowest_whole_number() -> None:
    weight = torch.tensor([[-128, 127, 127, 1]], dtype=torch.int8)  # 128, 127, 127, 1
    assert ties(weight, NM(2, 4), GroupStrides(1, 4, 1)) == 1
    weight = torch.tensor([[200, 128, 128, 0]], dtype=torch.uint8)
    assert ties(weight, NM(2, 4), GroupStrides(1, 4, 1)) == 1
    assert ties(weight.to(torch.int16), NM(1, 4), GroupStrides(1, 4, 1)) == 0


def test_pieces_and_threads_change_nothing() -> None:
    weight = sample((64, 5000), torch.bfloat16)
    whole, pieces = NonzeroBits.of(weight), NonzeroBits(weight.numel(), weight.dtype)
    for piece in weight.flatten().split(77_776):
        pieces.add(piece)
    with threads(2):
        shared = NonzeroBits.of(weight)
    for other in (pieces, shared):
        assert torch.equal(other.values(), whole.values())
        assert (other.nonzero, other.negative, other.broken) == (whole.nonzero, whole.negative, whole.broken)


def test_outside_counts_what_a_mask_forbids() -> None:
    weight, keep = sample((9, 13), torch.float16), torch.rand(9, 13) < 0.5
    assert NonzeroBits.of(weight).outside(NonzeroBits.of(keep)) == int(((weight != 0) & ~keep).sum())


def test_the_parts_of_a_grouped_transposed_convolution() -> None:
    axis, shape = Reduction(0, 2), (16, 6, 3, 3)
    weight = torch.randn(shape) * (torch.rand(shape) < 0.4)
    counts = NonzeroBits.of(weight).count_groups(NM(2, 4), GroupStrides.along(shape, axis.axis, axis.parts))
    want = parse("2:4").check(axis.last(weight))
    assert counts.offending == want.groups - want.legal and counts.first is not None and want.first is not None
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(counts.first), shape))
    assert place == axis.stored(want.first, shape)


def test_a_type_without_zeros_that_can_be_counted_is_refused() -> None:
    with pytest.raises(PatternError, match=r"cannot be counted(.|\n)*complex64(.|\n)*bfloat16"):
        NonzeroBits(4, torch.complex64)
