"""Stepping: real products exactly, in as many cycles as the closed form says, for every dataflow and sparsity."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.turns import in_turn
from twofour.errors import HardwareError
from twofour.hardware.systolic import (
    DATAFLOWS,
    Layer,
    Settings,
    SystolicArray,
    cycles,
    keep,
    step,
    step_layer,
    utilisation,
)
from twofour.hardware.systolic.array import kept_reduction

SIZES = st.integers(1, 20)
ARRAYS = st.builds(SystolicArray, st.integers(1, 7), st.integers(1, 7), st.sampled_from(DATAFLOWS))
RATIOS = st.sampled_from([(2, 4), (1, 4), (4, 8), (3, 4), (1, 1), (1, 2)])


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9, 10, shape)


def sparse(seed: int, k: int, n: int, kept: int, group: int) -> np.ndarray:
    """Whole numbers with at most `kept` in each group of `group`, at places of their own in each column."""
    places = np.random.default_rng(seed).random((-(-k // group) * group, n)).reshape(-1, group, n)
    places[-1, k - (len(places) - 1) * group :] = 2  # beyond the reduction
    return drawn(seed, k, n) * (places.argsort(1).argsort(1) < kept).reshape(-1, n)[:k]


@settings(max_examples=60, deadline=None)
@given(ARRAYS, SIZES, SIZES, SIZES, st.integers(0, 99))
def test_dense_products_and_cycles(array: SystolicArray, m: int, n: int, k: int, seed: int):
    x, w = drawn(seed, m, k), drawn(seed + 1, k, n)
    found = step(array, x, w)
    assert (found.output == x @ w).all()
    assert found.cycles == cycles(array, m, n, k)


@settings(max_examples=60, deadline=None)
@given(ARRAYS, SIZES, SIZES, SIZES, RATIOS, st.integers(0, 99))
def test_sparse_products_and_cycles(array: SystolicArray, m: int, n: int, k: int, ratio: tuple[int, int], seed: int):
    x, w = drawn(seed, m, k), sparse(seed, k, n, *ratio)
    held = keep(w, *ratio)
    assert (held.dense() == w).all() and len(held.values) == kept_reduction(k, *ratio)
    found = step(array, x, held)
    assert (found.output == x @ w).all()
    assert found.cycles == cycles(array, m, n, k, *ratio)


def test_wrong_metadata_give_a_wrong_product():
    x, w = drawn(0, 8, 16), sparse(1, 16, 8, 2, 4)
    held = keep(w, 2, 4)
    moved = type(held)(held.values, held.rows ^ 1, held.reduction, held.group)
    assert held.metadata.max() == 3
    for dataflow in DATAFLOWS:
        assert (step(SystolicArray(4, 4, dataflow), x, moved).output != x @ w).any()


@pytest.mark.parametrize("dataflow", DATAFLOWS)
def test_many_folds_in_float32(dataflow: str):
    x, w = (drawn(seed, 96, 96).astype(np.float32) for seed in (0, 1))
    array = SystolicArray(4, 4, dataflow)
    found = step(array, x, w)
    assert found.output.dtype == np.float32 and (found.output == x @ w).all()
    assert found.cycles == cycles(array, 96, 96, 96)


def test_the_last_cycle_is_needed():
    """One cycle fewer than the closed form and the last unit has not seen its last operands."""
    assert cycles(SystolicArray(4, 3, "os"), 4, 3, 5) == 4 + 3 + 5 - 2
    x, w = np.zeros((4, 5), int), np.zeros((5, 3), int)
    x[3, 4], w[4, 2] = 7, 6  # enters last, at the far corner
    found = step(SystolicArray(4, 3, "os"), x, w)
    assert found.output[3, 2] == 42


def test_cycles_of_arrays_of_shapes():
    m = np.array([16, 33, 512])
    found = cycles(SystolicArray(32, 32, "os"), m, 512, 512)
    assert found.tolist() == [1 * 16 * 574, 2 * 16 * 574, 16 * 16 * 574]
    assert cycles(SystolicArray(32, 32, "ws"), 512, 512, 512, 2, 4) == 8 * 16 * (512 + 94)
    assert utilisation(SystolicArray(2, 2, "os"), 2, 2, 1000) == pytest.approx(1000 / 1002)


def test_a_closed_form_is_one_rounding_of_the_groups():
    """SCALE-Sim keeps N of each group and at most N of a last, short one: 6 of 10 in 2:4, not 5."""
    assert [kept_reduction(k, 2, 4) for k in range(1, 11)] == [1, 2, 2, 2, 3, 4, 4, 4, 5, 6]


@in_turn("dataflow", DATAFLOWS)
@in_turn("representation", [None, "csr"])
def test_layers_step_as_their_products(dataflow: str, representation: str | None):
    chosen = Settings("run", SystolicArray(4, 4, dataflow), (1, 1, 1), (0, 0, 0), None, representation, None, 0)
    layer = Layer("conv", 7, 6, 3, 2, 3, 5, 2, 2, 4)
    found = step_layer(layer, chosen)
    ratio = (2, 4) if representation else (1, 1)
    assert found.exact and found.cycles == cycles(chosen.array, layer.m, layer.n, layer.k, *ratio)


def test_refusals():
    with pytest.raises(HardwareError, match=r"x \(2, 3\) and w \(4, 5\)"):
        step(SystolicArray(2, 2), np.ones((2, 3)), np.ones((4, 5)))
    with pytest.raises(HardwareError, match="none of them empty"):
        step(SystolicArray(2, 2), np.ones((0, 3)), np.ones((3, 5)))
    with pytest.raises(HardwareError, match="a group of 4 with 4 values"):
        keep(np.ones((8, 2)), 2, 4)
    for sizes in ((0, 4), (4, -1), (True, 4)):
        with pytest.raises(HardwareError, match="cannot exist"):
            SystolicArray(*sizes)


@in_turn("size", [0, -1, 4.5, float("nan"), True, "8", None, [4, 0], [[1], [1, 2]], np.array([2.5])])
@in_turn("name", ["m", "n", "k"])
def test_impossible_sizes_have_no_cycles(name: str, size: Any):
    for count in (cycles, utilisation):
        with pytest.raises(HardwareError, match="cannot have this size") as error:
            count(SystolicArray(4, 4), **{"m": 4, "n": 4, "k": 4} | {name: size})
        assert f"{name}=" in str(error.value) and "whole numbers from 1" in str(error.value)


@in_turn("ratio", [(5, 4), (0, 4), (2, None), (None, 4), (2, 1), (-1, 4), (1.5, 4), (True, 4)])
def test_impossible_ratios_have_no_cycles(ratio: Any):
    for count in (cycles, utilisation):
        with pytest.raises(HardwareError, match="cannot be sparse in this way"):
            count(SystolicArray(4, 4), 8, 8, 8, *ratio)


def test_sizes_in_narrow_types_do_not_wrap():
    array, sizes = SystolicArray(4, 4), np.array([100, 200], np.uint8)
    assert cycles(array, sizes, 200, 200).tolist() == [cycles(array, int(size), 200, 200) for size in sizes]
    assert cycles(array, np.uint8(200), np.float32(8), 200.0) == cycles(array, 200, 8, 200)
    assert utilisation(array, sizes, sizes, 200) == pytest.approx(
        [utilisation(array, int(s), int(s), 200) for s in sizes]
    )
    assert cycles(array, 8, 8, 8, 1, 1) == cycles(array, 8, 8, 8)
