"""Names to criteria, and what magnitude ranks by."""

import itertools

import pytest
import torch

from twofour import criteria
from twofour.errors import RecipeError
from twofour.patterns import NM


def test_magnitude_keeps_the_best_of_the_six_choices() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 32, generator=generator)
    criterion = criteria.parse("magnitude")
    keep = NM(2, 4).project(criterion.score(weight), absolute=criterion.absolute)
    for row, column in itertools.product(range(64), range(0, 32, 4)):
        group, kept = weight[row, column : column + 4].abs(), keep[row, column : column + 4]
        best = max(sum(group[list(pair)]) for pair in itertools.combinations(range(4), 2))
        assert torch.isclose(group[kept].sum(), best, rtol=1e-6)


def test_scores_do_not_track_gradients() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    assert not criteria.parse("magnitude").score(weight).requires_grad


def test_a_criterion_passes_through() -> None:
    assert criteria.parse(criteria.Magnitude()) == criteria.parse("magnitude")
    assert str(criteria.parse("magnitude")) == "magnitude"


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"\n  got +'magnitud'\n.*\n  try +did you mean \"magnitude\"\?"):
        criteria.parse("magnitud")
    with pytest.raises(RecipeError, match=r"not a criterion\n  got +3"):
        criteria.parse(3)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"not a criterion\n  got +{'name': \[\]}"):
        criteria.parse({"name": []})  # type: ignore[arg-type]
