import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import threads
from tests.turns import in_turn
from twofour import masks, packing, patterns, prune
from twofour.errors import PatternError
from twofour.patterns import Transposable, parse, project_tiles_reference

PATTERN = parse("2:4-transposable")
ROWS = [row for row in itertools.product((0, 1), repeat=4) if sum(row) == 2]
EVERY = torch.tensor(
    [tile for tile in itertools.product(ROWS, repeat=4) if all(sum(c) == 2 for c in zip(*tile, strict=True))]
)


def tiles(matrix: torch.Tensor) -> torch.Tensor:
    """(tiles, 4, 4) of a matrix whose sides are multiples of 4."""
    return matrix.unflatten(0, (-1, 4)).unflatten(-1, (-1, 4)).movedim(1, 2).reshape(-1, 4, 4)


def best(scores: torch.Tensor) -> torch.Tensor:
    """The largest sum of every tile, over all 90 masks, in float64."""
    return (tiles(scores.double()).unsqueeze(1) * EVERY).sum((-1, -2)).amax(1)


def kept(scores: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return (tiles(scores.double()) * tiles(keep)).sum((-1, -2))


def test_there_are_ninety_masks() -> None:
    assert len(EVERY) == 90


@in_turn("absolute", [False, True])
@in_turn("shape", [(4, 4), (8, 12), (4, 64), (12, 68), (8, 132), (20, 200)])
def test_search_is_exact_on_every_isa(isa: str, shape: tuple[int, int], absolute: bool) -> None:
    generator = torch.Generator().manual_seed(shape[1])
    few = torch.randint(-3, 4, shape, generator=generator).float() * 0.5  # ties, and zeros of both signs
    few[torch.rand(shape, generator=generator) < 0.2] = -0.0
    for scores in (few, torch.randn(shape, generator=generator)):
        keep = PATTERN.project(scores, absolute=absolute)
        ranked = scores.abs() if absolute else scores
        assert torch.allclose(kept(ranked, keep), best(ranked), rtol=1e-6, atol=1e-6)
        assert torch.equal(keep, project_tiles_reference(scores, absolute=absolute))
        assert (tiles(keep).sum(-1) == 2).all() and (tiles(keep).sum(-2) == 2).all()


@given(st.lists(st.integers(-1000, 1000), min_size=16, max_size=16), st.integers(-60, 60), st.booleans())
@settings(max_examples=200, deadline=None)
def test_search_is_exact_for_any_whole_scores(values: list[int], exponent: int, absolute: bool) -> None:
    scores = torch.tensor(values, dtype=torch.float32).view(4, 4) * 2.0**exponent
    keep = PATTERN.project(scores, absolute=absolute)
    ranked = scores.abs() if absolute else scores
    assert torch.equal(kept(ranked, keep), best(ranked))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=16, max_size=16))
@settings(max_examples=200, deadline=None)
def test_any_finite_floats_give_a_legal_mask_as_the_reference_does(values: list[float]) -> None:
    scores = torch.tensor(values).view(4, 4)  # sums may overflow: legal all the same
    for absolute in (False, True):
        keep = PATTERN.project(scores, absolute=absolute)
        assert (keep.sum(0) == 2).all() and (keep.sum(1) == 2).all()
        assert torch.equal(keep, project_tiles_reference(scores, absolute=absolute))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    scores = torch.randint(-100, 100, (8, 20)).to(dtype)
    assert torch.equal(kept(scores, PATTERN.project(scores)), best(scores))


def test_both_axes_of_a_convolution_at_each_tap() -> None:
    weight = torch.randn(8, 3, 3, 12)
    keep = PATTERN.project(weight, absolute=True)
    assert PATTERN.check(weight * keep).ok
    for tap in itertools.product(range(3), range(3)):
        assert torch.equal(keep[:, *tap], PATTERN.project(weight[:, *tap], absolute=True))


def test_threads_change_nothing() -> None:
    scores = torch.randn(128, 1024)
    with threads(1):
        one = PATTERN.project(scores)
    with threads(3):
        assert torch.equal(PATTERN.project(scores), one)


def test_check_names_a_group_of_either_axis() -> None:
    weight = torch.zeros(8, 8)
    weight[5, 4:7] = 1.0
    found = PATTERN.check(weight)
    assert (found.ok, found.groups - found.legal, found.first, found.values) == (False, 1, (5, 4), (1.0, 1.0, 1.0, 0.0))
    found = PATTERN.check(weight.T)
    assert (found.groups - found.legal, found.first, found.values) == (1, (4, 5), (1.0, 1.0, 1.0, 0.0))
    assert PATTERN.check(torch.zeros(8, 8)).ok


def test_a_pruned_weight_and_its_transpose_both_pack() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.ReLU(), torch.nn.Linear(16, 32))
    prune(model, "2:4-transposable")
    found = masks.of(model)["0.weight"]
    assert found.pattern is PATTERN and found.density == 0.5
    weight = found.module.get_parameter("weight").detach()
    for axis in (0, 1):
        packed = packing.pack(weight, "2:4-transposable", axis=axis)
        assert packed.header.pattern == "2:4" and torch.equal(packed.unpack(), weight)
    torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1).step()
    assert PATTERN.check(weight).ok


@in_turn("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_scores_are_refused_with_their_place(isa: str, bad: float) -> None:
    scores = torch.randn(4, 84)
    scores[3, 81] = bad
    with pytest.raises(PatternError, match=r"the first .* at \(3, 81\)"):
        PATTERN.project(scores)


@pytest.mark.parametrize("shape", [(6, 8), (8,), (8, 6)])
def test_shapes_without_tiles_are_refused(shape: tuple[int, ...]) -> None:
    for call in (PATTERN.project, PATTERN.check):
        with pytest.raises(PatternError, match="multiple") as caught:
            call(torch.ones(shape))
        assert "skip=" in str(caught.value)


@pytest.mark.parametrize("text", ["1:4-transposable", "4:8-transposable", "1:2-transposable"])
def test_other_transposable_patterns_are_planned(text: str) -> None:
    with pytest.raises(PatternError, match="planned, not built yet"):
        parse(text)


def test_name_round_trips() -> None:
    assert Transposable() == PATTERN and parse(PATTERN.name) is PATTERN
    assert (PATTERN.group, PATTERN.density, PATTERN.rows) == (4, 0.5, patterns.NM(2, 4))
