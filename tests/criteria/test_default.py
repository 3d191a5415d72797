"""What prune takes where no criterion is named, and what it says of data that it does not use."""

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import twofour
from twofour.demo.resnet import ResNet20
from twofour.errors import RecipeError
from twofour.pruning import outcomes
from twofour.recipe import Recipe


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def batches(count: int, size: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 16, generator=generator) for _ in range(count)]


def test_with_data_it_is_admm_and_without_it_is_magnitude(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "twofour.pruning"):
        calibrated = twofour.prune(model(), "2:4", data=batches(2))
        plain = twofour.prune(model(), "2:4")
    assert {outcome.criterion for outcome in outcomes(calibrated)} == {"admm"}
    assert {outcome.criterion for outcome in outcomes(plain)} == {"magnitude"}
    assert "criterion: admm (the best of one shot with data; criterion= names another)" in caplog.text
    assert "criterion: magnitude (the best of one shot without data" in caplog.text
    named = twofour.prune(model(), "2:4", criterion="admm", data=batches(2))
    assert all(torch.equal(*pair) for pair in zip(named.parameters(), calibrated.parameters(), strict=True))


def test_a_criterion_that_is_named_is_taken() -> None:
    named = twofour.prune(model(), "2:4", criterion="magnitude", data=batches(2))
    by_recipe = twofour.prune(model(), Recipe.parse("2:4", criterion="wanda"), data=batches(2))
    assert [outcomes(each)[0].criterion for each in (named, by_recipe)] == ["magnitude", "wanda"]
    with pytest.raises(RecipeError, match="`criterion` is given twice"):
        twofour.prune(model(), Recipe.parse("2:4", criterion="wanda"), criterion="magnitude", data=batches(2))


def test_what_the_data_do_not_show_is_pruned_by_magnitude_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    found = {outcome.name: outcome for outcome in outcomes(twofour.prune(Spare(), "2:4", data=batches(2)))}
    assert (found["used.weight"].criterion, found["spare.weight"].criterion) == ("admm", "magnitude")
    assert found["spare.weight"].error is None and found["spare.weight"].note
    assert 'by "magnitude", since the data do not show what they are multiplied with: `spare.weight`' in caplog.text
    named = twofour.prune(Spare(), "2:4", criterion="admm", data=batches(2))
    assert [outcome.name for outcome in outcomes(named)] == ["used.weight"]


def test_data_that_are_not_used_are_named(caplog: pytest.LogCaptureFixture) -> None:
    twofour.prune(model(), "2:4", data=batches(5, 50))
    assert "calibrated on the first 128 samples; not used: 22 samples of batch 3 and 2 of 5 batches" in caplog.text
    caplog.clear()
    twofour.prune(model(), "2:4", data=batches(5, 50), samples=50)
    assert not caplog.text, "whoever gives a number knows"
    twofour.prune(model(), "2:4", data=batches(2))
    twofour.prune(model(), "2:4", data=iter(batches(3)))
    assert not caplog.text


def test_a_resnet_with_its_real_weights_loses_less_by_default(data_dir: Path) -> None:
    images = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    dense = ResNet20().eval()
    dense.load_state_dict(load_file(data_dir / "pretrained" / "resnet20-12fca82f.safetensors"))
    lost = {}
    for criterion in ("magnitude", None):
        sparse = ResNet20().eval()
        sparse.load_state_dict(dense.state_dict())
        twofour.prune(sparse, "2:4", criterion=criterion, data=images)
        with torch.no_grad():
            lost[criterion] = (sparse(images) - dense(images)).norm() / dense(images).norm()
    assert lost[None] < lost["magnitude"] / 2
