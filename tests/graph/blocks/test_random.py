"""Random graphs: blocks compute what their operators did, whatever is broadcast, reduced, viewed or read twice.

`make test` runs the first 50, `make test-long` the others.
"""

from __future__ import annotations

import pytest

from tests.graph.blocks.graphs import assert_same, fused, grown


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[pytest.mark.long] if first >= 50 else []) for first in range(0, 1000, 50)]
)
def test_a_random_graph_computes_the_same(first: int) -> None:
    for seed in range(first, first + 50):
        module, inputs = grown(seed)
        _, before, after = fused(module)
        try:
            assert_same(before, after, inputs, 1e-4)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
