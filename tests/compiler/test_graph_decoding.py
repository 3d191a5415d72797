"""One token behind a cache through compile(..., graph=True)."""

import pytest
import torch

from tests.compiler.whole import pruned, whole
from tests.graph.small import Cached

pytestmark = pytest.mark.usefixtures("no_measuring")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("given_back", [False, True])
def test_decoding_reads_the_cache_in_place(dtype: str, given_back: bool) -> None:
    model = pruned(Cached(given_back))
    inputs = (torch.randn(2, 1, 32), *torch.randn(2, 2, 4, 6, 8))
    fast = whole(model, inputs, dtype=dtype)
    assert ("cat" in {entry.operator for entry in fast.plan.account.after}) is given_back
    for got, want in zip(fast(*inputs), model(*inputs), strict=True):
        assert (got - want).norm() <= (1e-5 if dtype == "float32" else 1e-2) * want.norm()
