"""The engine: Strassen's counts, work of each mode against stepping, energy, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.turns import in_turn
from twofour.errors import HardwareError
from twofour.hardware.systolic import SystolicArray, cycles, step
from twofour.hardware.versagnn import MODES, Counts, Energy, Engine, Sparse, Work, counts, step_slots, strassen
from twofour.hardware.versagnn.engine import spread

ONE = Engine(SystolicArray(4, 4), arrays=1)


def graph(seed: int, rows: int, columns: int) -> Sparse:
    return Sparse.of((rows, columns), *np.nonzero(np.random.default_rng(seed).random((rows, columns)) < 0.15))


def test_counts_are_those_of_the_reference():
    """Known of Strassen's algorithm: 64 x 64, levels 1 to 3."""
    assert counts(64, 64, 64, 0) == Counts(262144, 0)
    assert counts(64, 64, 64, 1) == Counts(229376, 18432)
    assert counts(64, 64, 64, 2) == Counts(200704, 50688)
    assert counts(64, 64, 64, 3) == Counts(175616, 107136)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 20), st.integers(0, 3), st.integers(0, 99))
def test_strassen_of_whole_numbers_is_exact_and_its_leaves_are_counted(m, n, k, levels, seed):
    generator, leaves = np.random.default_rng(seed), []

    def multiply(x, w):
        leaves.append(x.shape[0] * x.shape[1] * w.shape[1])
        return x @ w

    x, w = generator.integers(-99, 99, (m, k)), generator.integers(-99, 99, (k, n))
    assert (strassen(x, w, levels, multiply) == x @ w).all()
    assert sum(leaves) == counts(m, n, k, levels).multiplications and len(leaves) == 7**levels


def test_strassen_on_the_array_in_float32():
    """Relative errors of 3e-7 to 7e-7 at 64 x 64 are known; the bound leaves room for other numbers."""
    generator = np.random.default_rng(0)
    x, w = (generator.standard_normal((64, 64)).astype(np.float32) for _ in range(2))
    exact = x.astype(np.float64) @ w
    for levels in range(4):
        found = strassen(x, w, levels, lambda a, b: step(SystolicArray(16, 16), a, b).output)
        assert np.abs(found - exact).max() / np.abs(exact).max() < 2e-6


def test_one_array_takes_the_cycles_of_the_closed_form():
    assert ONE.transform(9, 10, 11).cycles == cycles(ONE.array, 9, 10, 11)
    leaf = cycles(ONE.array, 8, 8, 8)
    assert ONE.transform(16, 16, 16, 1).cycles == 7 * leaf
    assert Engine(ONE.array).transform(16, 16, 16, 1).cycles == leaf  # a product for each of seven arrays


@pytest.mark.parametrize("mode", ["columns", "condensed", "sorted"])
def test_slots_take_the_cycles_that_stepping_counts(mode: str):
    matrix, right = graph(1, 23, 40), np.ones((40, 6))
    found = step_slots(ONE.array, ONE.condense(matrix, mode), right)
    assert ONE.aggregate(matrix, 6, mode).cycles == found.cycles.sum()
    assert Engine(ONE.array, 3).aggregate(matrix, 6, mode).cycles == spread(found.cycles, 3)


def test_each_mode_does_less_than_the_one_before():
    matrix = graph(2, 64, 64)
    works = [ONE.aggregate(matrix, 8, mode) for mode in MODES]
    assert [work.cycles for work in works] == sorted((work.cycles for work in works), reverse=True)
    energies = [Energy().of(work) for work in works[:4]]
    assert energies == sorted(energies, reverse=True)
    assert len({work.useful for work in works}) == 1 and works[-1].products == works[-1].useful
    assert all(0 < ONE.utilisation(work) <= 1 for work in works)


def test_few_ports_cost_slots():
    matrix = graph(3, 64, 200)
    free, two = (Engine(ONE.array, 1, ports).aggregate(matrix, 8) for ports in (None, 2))
    assert two.cycles > free.cycles


def test_energy_adds_up():
    work = Work(cycles=10, products=100, useful=50, additions=10, beside=20, main=2)
    assert Energy().of(work) == pytest.approx(100 * 4.6 + 10 * 0.9 + 20 * 5 + 2 * 650)
    assert Energy().of(work + work) == pytest.approx(2 * Energy().of(work))


def test_the_longest_strip_goes_first():
    assert spread(np.array([1, 1, 1, 3]), 2) == 3 and spread(np.array([4]), 7) == 4


def test_refusals():
    with pytest.raises(HardwareError, match="dataflow ws"):
        Engine(SystolicArray(4, 4, "ws"))
    with pytest.raises(HardwareError, match="the mode 'dense' is unknown"):
        ONE.aggregate(graph(0, 4, 4), 4, "dense")
    with pytest.raises(HardwareError, match="levels=-1"):
        counts(4, 4, 4, -1)


@in_turn("levels", [20, 10**9, 1.5, True, None, float("nan")])
def test_levels_that_only_add_zeros_are_refused(levels):
    for call in (counts, Engine().transform):
        with pytest.raises(HardwareError, match="cannot halve 2708 x 7 x 16 so often") as error:
            call(2708, 7, 16, levels)
        assert "a whole number from 0 to 3" in str(error.value)
    with pytest.raises(HardwareError, match="from 0 to 5"):
        strassen(np.ones((40, 33)), np.ones((33, 32)), 20, np.matmul)


def test_a_right_operand_that_does_not_fit_is_named():
    packed = ONE.condense(graph(0, 8, 8))
    with pytest.raises(HardwareError, match=r"a left operand \(8, 8\), a right one \(7, 2\)"):
        step_slots(ONE.array, packed, np.ones((7, 2)))
    with pytest.raises(HardwareError, match="strips of 4 rows"):
        step_slots(SystolicArray(8, 4), packed, np.ones((8, 2)))
