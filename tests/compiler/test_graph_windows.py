"""compile takes windows of an image as they stand, with sparse weights too, and answers as the model does."""

from __future__ import annotations

import pytest
import torch

import twofour
from tests.compiler.small import quick
from tests.graph.test_attention_windows import LEFT, RULE, TAKEN, images


@pytest.mark.usefixtures("no_measuring")
@pytest.mark.parametrize("name", [*TAKEN, *LEFT])
@pytest.mark.parametrize("sparse", [pytest.param(False, marks=pytest.mark.long), True])
def test_answers_stay(name: str, sparse: bool) -> None:
    torch.manual_seed(0)
    model = {**TAKEN, **LEFT}[name]().eval()
    model = twofour.prune(model, "2:4", eligibility="any") if sparse else model
    fast = quick(model, images(2))
    assert fast.plan.account.rewrites[RULE] == (name in TAKEN), fast.plan
    exact = {**TAKEN, **LEFT}[name]().double().eval()
    exact.load_state_dict({key: held.double() for key, held in model.state_dict().items()})
    for count in (2, 1, 5):
        x = images(count)
        torch.testing.assert_close(fast(x).double(), exact(x.double()), rtol=1e-4, atol=1e-5)
        x[0, 7, 3], x[-1, 20, 0] = torch.nan, torch.inf
        torch.testing.assert_close(fast(x).double(), exact(x.double()), rtol=1e-4, atol=1e-5, equal_nan=True)
