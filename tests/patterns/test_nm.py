import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import OF_FLOATS
from tests.turns import in_turn
from twofour import native
from twofour.errors import PatternError
from twofour.patterns import NM, parse, project_reference
from twofour.patterns.nm import mask_row

PATTERNS = [(2, 4), (1, 2), (4, 8), (1, 4), (8, 16), (3, 5), (31, 64)]


def brute_force(scores: torch.Tensor, n: int, m: int, absolute: bool) -> torch.Tensor:
    keep = torch.zeros(scores.shape, dtype=torch.bool)
    flat, out = scores.double().reshape(-1, m), keep.reshape(-1, m)
    for row, kept in zip(flat.tolist(), out, strict=True):
        ranked = sorted(range(m), key=lambda i: (-(abs(row[i]) if absolute else row[i]), i))
        kept[ranked[:n]] = True
    return keep


@in_turn(("n", "m"), PATTERNS)
@in_turn("absolute", [False, True])
def test_project_equals_brute_force_on_every_isa(isa: str, n: int, m: int, absolute: bool) -> None:
    generator = torch.Generator().manual_seed(n * m)
    for rows, groups in [(1, 1), (3, 7), (5, 13)]:
        # Few distinct values: most groups have ties, zeros of both signs among them.
        scores = torch.randint(-3, 4, (rows, groups * m), generator=generator).float() * 0.5
        scores[torch.rand(scores.shape, generator=generator) < 0.2] = -0.0
        want = brute_force(scores, n, m, absolute)
        assert torch.equal(NM(n, m).project(scores, absolute=absolute), want)
        assert torch.equal(project_reference(scores, n, m, absolute=absolute), want)


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=4, max_size=64),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_project_two_of_four_any_floats(values: list[float], absolute: bool) -> None:
    scores = torch.tensor(values[: len(values) // 4 * 4])
    assert torch.equal(parse("2:4").project(scores, absolute=absolute), brute_force(scores, 2, 4, absolute))


def test_project_keeps_exactly_n_and_prefers_the_lowest_index() -> None:
    pattern = parse("2:4")
    assert pattern.project(torch.zeros(4)).tolist() == [True, True, False, False]
    assert pattern.project(torch.tensor([0.0, -0.0, -0.0, 0.0])).tolist() == [True, True, False, False]
    assert pattern.project(torch.tensor([1.0, 2.0, 2.0, 2.0])).tolist() == [False, True, True, False]
    assert pattern.project(torch.tensor([-5.0, 1.0, 0.5, 0.0])).tolist() == [False, True, True, False]
    assert pattern.project(torch.tensor([-5.0, 1.0, 0.5, 0.0]), absolute=True).tolist() == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int32])
def test_project_other_dtypes(dtype: torch.dtype) -> None:
    scores = torch.tensor([[-128, 127, 3, 3], [0, 0, 0, 1]]).to(dtype)
    want = torch.tensor([[True, True, False, False], [True, False, False, True]])
    assert torch.equal(parse("2:4").project(scores, absolute=True), want)


def test_project_views_and_higher_ranks() -> None:
    scores = torch.randn(6, 8, 12)
    pattern = parse("2:4")
    for view in (scores, scores.transpose(0, 1), scores.movedim(0, -1)[..., :4], scores[::2, 1:, 4:]):
        assert torch.equal(pattern.project(view), brute_force(view.contiguous(), 2, 4, False))


@in_turn("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_scores_are_refused_with_their_place(isa: str, bad: float) -> None:
    for place in range(20):
        scores = torch.randn(2, 20)
        scores[1, place] = bad
        with pytest.raises(PatternError, match=rf"the first .* at \(1, {place}\)"):
            parse("2:4").project(scores)
        with pytest.raises(PatternError, match="finite values only"):
            parse("4:20").project(scores)


def test_masks_are_the_same_on_any_number_of_threads() -> None:
    scores = torch.randn(333, 4096)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = parse("2:4").project(scores)
        torch.set_num_threads(3)
        assert torch.equal(parse("2:4").project(scores), one)
    finally:
        torch.set_num_threads(before)


@in_turn(
    ("tensor", "said"),
    [
        (torch.zeros(8, 6), "6 is not a multiple of 4"),
        (torch.zeros(0, 4), "there are no values"),
        (torch.zeros(4, 0), "there are no values"),
        (torch.tensor(1.0), "a scalar has no reduction axis"),
        (torch.zeros(4, 4, device="meta"), "meta device"),
        (torch.zeros(4, 4, dtype=torch.complex64), "complex64"),
        (torch.eye(4).to_sparse(), "torch.sparse_coo"),
    ],
)
def test_tensors_without_groups_are_refused(tensor: torch.Tensor, said: str) -> None:
    for call in (parse("2:4").project, parse("2:4").check):
        with pytest.raises(PatternError, match=said):
            call(tensor)


def test_check_finds_the_first_offending_group() -> None:
    weight = torch.zeros(3, 2, 8)
    weight[1, 1, 4:7] = torch.tensor([1.0, -2.0, 3.0])
    weight[2, 0, :4] = 1.0
    weight[0, 0, :3] = torch.tensor([1.0, -0.0, 1.0])
    found = parse("2:4").check(weight)
    assert (found.groups, found.legal, found.first, found.ok) == (12, 10, (1, 1, 4), False)
    assert found.values == (1.0, -2.0, 3.0, 0.0)
    assert parse("2:4").check(weight * parse("2:4").project(weight, absolute=True)).ok


def test_mask_rows_cover_every_level(isa: str) -> None:
    row = native.rows("nm_mask")[mask_row(2, 4)]
    assert row.isa == OF_FLOATS.get(isa, isa)
    assert row.name.endswith(f"__{row.isa}")


# PAPERS: retained L1 and squared-L2 fraction of i.i.d. weights for each pattern.
RETAINED = {
    "normal": {"2:4": (0.745, 0.868), "4:8": (0.768, 0.897), "8:16": (0.782, 0.912), "1:2": (0.707, 0.818),
               "4:8-pairs": (0.676, 0.787), "1:4": (0.459, 0.618)},
    "laplace": {"2:4": (0.792, 0.920), "4:8": (0.817, 0.944), "8:16": (0.831, 0.955), "1:2": (0.750, 0.875),
                "4:8-pairs": (0.719, 0.856), "1:4": (0.521, 0.720)},
    "uniform": {"2:4": (0.700, 0.800), "4:8": (0.722, 0.833), "8:16": (0.735, 0.853), "1:2": (0.667, 0.750),
                "4:8-pairs": (0.638, 0.707), "1:4": (0.400, 0.500)},
}  # fmt: skip


def draw(distribution: str, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    if distribution == "normal":
        return torch.randn(count, generator=generator, dtype=torch.float64)
    uniform = torch.rand(count, generator=generator, dtype=torch.float64) - 0.5
    return uniform if distribution == "uniform" else -uniform.sign() * torch.log1p(-2 * uniform.abs())


@in_turn(("distribution", "pattern"), list(itertools.product(RETAINED, RETAINED["normal"])))
def test_retained_magnitude_is_the_published_one(distribution: str, pattern: str) -> None:
    weight = draw(distribution, 1 << 21).float()
    kept = weight[parse(pattern).project(weight, absolute=True)].double()
    weight = weight.double()
    l1, l2 = RETAINED[distribution][pattern]
    assert abs(kept.abs().sum() / weight.abs().sum() - l1) < 0.002
    assert abs(kept.square().sum() / weight.square().sum() - l2) < 0.002


@in_turn(("n", "m"), [(4, 512), (2, 65), (0, 4), (5, 4), (1, 0), (1, -4)])
def test_the_native_kernel_refuses_groups_it_cannot_rank(isa: str, n: int, m: int) -> None:
    scores, keep = torch.randn(512), torch.zeros(512, dtype=torch.bool)
    anything = next(row.index for row in native.rows("nm_mask") if row.pattern == "any")
    with pytest.raises(ValueError, match="no such N:M"):
        native.extension().nm_mask(anything, scores, keep, n, m, True, 1)


def test_a_kernel_of_one_pattern_refuses_another(isa: str) -> None:
    scores, keep = torch.randn(512), torch.zeros(512, dtype=torch.bool)
    row = mask_row(2, 4)
    if native.rows("nm_mask")[row].pattern == "2:4":
        with pytest.raises(ValueError, match="another N:M"):
            native.extension().nm_mask(row, scores, keep, 1, 8, True, 1)
