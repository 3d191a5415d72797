"""Correlations of few rows: how far they are trusted is judged on rows held back."""

import pytest
import torch

from tests.criteria.test_activation import random, seen
from tests.criteria.test_sparsegpt import correlated
from twofour import calibration, criteria
from twofour.calibration import Statistics
from twofour.criteria import ADMM, SparseGPT, Wanda
from twofour.criteria.trust import trusted
from twofour.layers import walk
from twofour.patterns import parse

PATTERN = parse("2:4")


def test_the_last_rows_of_each_call_are_held_back_while_there_are_few() -> None:
    x, statistics = random(60, 32), Statistics("hessian")
    for part in x.split(20):
        statistics.add(part[None])
    parts = statistics.parted()
    assert parts is not None
    used, held = parts
    kept = torch.cat([part[:-4] for part in x.split(20)])
    assert (used.rows, held.rows) == (48, 12) and held.sample is not None and used.hessian is not None
    assert torch.equal(held.sample[0], torch.cat([part[-4:] for part in x.split(20)]))
    torch.testing.assert_close(used.hessian[0], kept.T @ kept)
    statistics.add(random(1, 200, 32))
    assert statistics.rows >= calibration.PER_INPUT * 32 and statistics.parted() is None
    assert seen(x[:8], "hessian").parted() is None, "one row does not judge"
    one = Statistics("hessian")
    for row in x[:40]:
        one.add(row[None, None])
    assert one.sample is not None and torch.equal(one.sample[0], x[4:40:5])


@pytest.mark.parametrize("size", [2, 7, 700, 5000])
def test_a_call_of_several_rows_is_never_held_whole(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row in five of all, 512 at most."""
    monkeypatch.setattr("twofour.calibration.statistics.PER_INPUT", 1 << 20)
    statistics = Statistics("hessian")
    for call in range(1, 6):
        before = 0 if statistics.sample is None else statistics.sample.shape[1]
        statistics.add(random(1, size, 16, seed=call))
        held = 0 if statistics.sample is None else statistics.sample.shape[1]
        assert held == min(call * size // 5, 512) and held - before < size


def test_moments_are_shrunk_beside_the_diagonal() -> None:
    statistics = seen(random(30, 8), "hessian")
    whole = statistics.moments(0)
    statistics.shrunk = 0.3
    diagonal = torch.diag(whole.diagonal())
    torch.testing.assert_close(statistics.moments(0), 0.7 * whole + 0.3 * diagonal)
    statistics.shrunk = 1.0
    weight = random(1, 8, 8, seed=3)
    solution = SparseGPT().solve(weight, PATTERN, statistics, "w")
    assert solution.values is not None, "of inputs that do not correlate it is Wanda, and nothing is made up for"
    dampened = Wanda().solve(weight, PATTERN, statistics, "w").keep
    assert (solution.keep == dampened).float().mean() > 0.95
    torch.testing.assert_close(solution.values, weight.masked_fill(~solution.keep, 0))


def test_few_rows_lose_less_on_rows_that_nothing_has_seen() -> None:
    """64 inputs, 48 rows: an update by their correlations fits the rows."""
    lost = {"as they are": 0.0, "trusted": 0.0}
    for seed in range(3):
        x, weight = correlated(1048, 64, seed=10 * seed), random(1, 32, 64, seed=seed)
        fresh = seen(x[48:], "hessian")
        few = seen(x[:48], "hessian")
        lost["as they are"] += fresh.error(weight, ADMM().solve(weight, PATTERN, few, "w").applied(weight))
        said = trusted(weight, PATTERN, few, ADMM(), "w")
        assert few.shrunk > 0 and said.startswith("few rows, 48 for 64 inputs: by their correlations less ")
        lost["trusted"] += fresh.error(weight, ADMM().solve(weight, PATTERN, few, "w").applied(weight))
    assert lost["trusted"] < 0.95 * lost["as they are"]


@pytest.mark.parametrize("zero", [slice(48, 60), slice(0, 48)])
def test_nothing_is_said_to_be_judged_on_zeros(zero: slice) -> None:
    """A fifth of the rows is held back: either side may be zero."""
    x = correlated(60, 64)
    x[zero] = 0
    few = Statistics("hessian")
    few.add(x[None])
    said = trusted(random(1, 16, 64), PATTERN, few, ADMM(), "w")
    assert said.startswith("few rows, 60 for 64 inputs: not judged") and few.shrunk == 0


def test_many_rows_and_criteria_of_papers_are_as_they_were() -> None:
    weight, many, few = random(1, 8, 16), seen(random(200, 16), "hessian"), seen(random(28, 16), "hessian")
    assert trusted(weight, PATTERN, many, ADMM(), "w") == "" and many.shrunk == 0
    assert trusted(weight, PATTERN, few, SparseGPT(), "w") == "" and few.shrunk == 0


def test_what_one_reader_chose_holds_for_all() -> None:
    few = seen(correlated(40, 64), "hessian")
    first = trusted(random(1, 16, 64), PATTERN, few, ADMM(), "q")
    assert first and trusted(random(1, 16, 64, seed=9), PATTERN, few, ADMM(), "k") == first


def test_the_note_of_one_weight_says_both() -> None:
    layer = torch.nn.Linear(64, 16)
    (weight,) = walk(layer).weights
    values = calibration.matrix(weight, layer.weight.detach())
    solution = criteria.solve_one(values, weight, PATTERN, ADMM(), seen(correlated(40, 64), "hessian"))
    assert solution.note.startswith("SparseGPT alone: ") and "; few rows, 40 for 64 inputs: " in solution.note
