"""What prune takes where no criterion is named, and what it says of data that it does not use."""

import itertools
import logging
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import twofour
from twofour import calibration
from twofour.calibration import Batch
from twofour.demo.resnet import ResNet20
from twofour.errors import DataError, RecipeError
from twofour.layers import walk
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
        calibrated = twofour.prune(model(), "2:4", data=batches(2), reconstruct=False)
        plain = twofour.prune(model(), "2:4")
    assert {outcome.criterion for outcome in outcomes(calibrated)} == {"admm"}
    assert {outcome.criterion for outcome in outcomes(plain)} == {"magnitude"}
    assert "criterion: admm (the best of one shot with data; criterion= names another)" in caplog.text
    assert "criterion: magnitude (the best of one shot without data" in caplog.text
    assert 'no data: pruned by "magnitude"; with data=' in caplog.text
    named = twofour.prune(model(), "2:4", criterion="admm", data=batches(2))
    assert all(torch.equal(*pair) for pair in zip(named.parameters(), calibrated.parameters(), strict=True))


def test_auto_is_its_name_and_a_recipe_names_what_it_stood_for(caplog: pytest.LogCaptureFixture) -> None:
    for data, kind in ((batches(2), "admm"), (None, "magnitude")):
        found = [twofour.prune(model(), "2:4", data=data, criterion=name) for name in ("auto", None)]
        assert {outcome.criterion for each in found for outcome in outcomes(each)} == {kind}
    by_recipe = twofour.prune(model(), Recipe.parse("2:4", criterion="wanda"), criterion="auto", data=batches(2))
    assert outcomes(by_recipe)[0].criterion == "wanda"
    with pytest.raises(RecipeError, match="which prune replaces by what the data allow"):
        Recipe.parse("2:4", criterion="auto")
    caplog.clear()
    twofour.prune(model(), "2:4", criterion="magnitude")
    assert not caplog.text, "whoever names it knows"


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
    """One row a sample and 32 inputs at most: 8 x 32 samples; a criterion that ranks by no inputs takes 128."""
    twofour.prune(model(), "2:4", data=batches(9, 50), reconstruct=False)
    assert (
        "calibrated on 256 samples spread over the data; not used: 44 samples of batch 2 and 3 of 9 batches"
        in caplog.text
    )
    caplog.clear()
    twofour.prune(model(), "2:4", data=batches(5, 50), criterion="magnitude")
    assert (
        "calibrated on 128 samples spread over the data; not used: 22 samples of batch 3 and 2 of 5 batches"
        in caplog.text
    )
    caplog.clear()
    twofour.prune(model(), "2:4", data=batches(5, 50), samples=50)
    assert not caplog.text, "whoever gives a number knows"
    twofour.prune(model(), "2:4", data=batches(2))
    twofour.prune(model(), "2:4", data=iter(batches(3)))
    assert not caplog.text


def test_as_many_samples_as_give_each_weight_rows(caplog: pytest.LogCaptureFixture) -> None:
    """Rows of every token count, padding does not; a layer with many rows a sample wants no more than 128 samples."""
    wide = nn.Sequential(nn.Embedding(10, 64), nn.Linear(64, 16))
    weights = walk(wide).weights

    def wanted(model: nn.Module, inputs: object) -> int:
        return calibration.Enough(model, walk(model).weights, 128)(Batch(inputs))

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = wide

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.inner(input_ids)

    assert len(weights) == 1 and wanted(wide, torch.zeros(20, 2, dtype=torch.long)) == 8 * 64 // 2
    mask = torch.tensor([[1, 0]]).repeat(20, 1)
    assert wanted(Masked(), {"input_ids": torch.zeros(20, 2, dtype=torch.long), "attention_mask": mask}) == 8 * 64
    assert wanted(nn.Conv2d(16, 16, 3, padding=1), torch.randn(4, 16, 8, 8)) == 128
    with caplog.at_level(logging.INFO, "twofour.pruning"):
        data = [torch.zeros(50, 2, dtype=torch.long) for _ in range(8)]
        twofour.prune(wide, "2:4", data=data, reconstruct=False)
    assert "calibrated on 256 samples" in caplog.text


def test_what_is_reconstructed_takes_more_samples_where_they_cost_little(caplog: pytest.LogCaptureFixture) -> None:
    """128 images are looked at by heart 75 times in 600 steps of 16; where a sample is dear they must do."""
    data = torch.randn(1100, 16, generator=torch.Generator().manual_seed(0))
    with caplog.at_level(logging.INFO, "twofour.pruning"):
        twofour.prune(model(), "2:4", data=data)
    assert "calibrated on 1024 samples" in caplog.text and "not used: 76 samples of batch 1" in caplog.text
    net, few = nn.Conv2d(16, 16, 3, padding=1), torch.randn(2, 16, 8, 8)

    def wanted(images: torch.Tensor, **options: bool) -> int:
        return calibration.Enough(net, walk(net).weights, 128, **options)(Batch(images))

    assert wanted(few) == 128 and wanted(few, cheap=True) == 1024
    rows, work = 96 * 96, 96 * 96 * 144 * (16 + 144)
    least = min((1 << 20) // rows, int(1e12 / work))
    assert wanted(torch.randn(2, 16, 96, 96), cheap=True) == max(128, least) == 128
    assert wanted(torch.randn(2, 16, 48, 48), cheap=True) == (1 << 20) // 48**2, "no more rows than that"


def test_batches_of_other_lengths_change_the_number_of_samples() -> None:
    """The first of a loader that sorts by length may be of short texts: what behind it is longer brings more rows."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Embedding(10, 64), nn.Linear(64, 16)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.linear(self.table(input_ids))

    def batch(tokens: int, padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.tensor([[1] * tokens + [0] * padding]).repeat(32, 1)
        return torch.zeros_like(mask), mask

    def taken(data: Iterable[object]) -> int:
        shown = Masked()
        enough = calibration.Enough(shown, walk(shown).weights, 64)
        return sum(found.samples for found in calibration.take(shown, data, enough))

    endless = itertools.repeat
    assert taken(endless(batch(2))) == taken(endless(batch(2, 6))) == 8 * 64 // 2
    assert taken(itertools.chain([batch(2)], endless(batch(4)))) == pytest.approx(8 * 64 / 4, abs=16)
    assert taken(itertools.chain([batch(4)], endless(batch(2)))) == pytest.approx(8 * 64 / 2, abs=32)
    assert taken(endless(batch(100))) == 64, "no fewer than the least"


class Pooled(nn.Module):
    """Tokens through wide layers, and one row of each sentence through a small one, as a pooler has it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.first, self.second = nn.Embedding(50, 64), nn.Linear(64, 256), nn.Linear(256, 128)
        self.pooler = nn.Linear(128, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.pooler(self.second(self.first(self.table(tokens)).relu())[:, 0])


def test_a_small_layer_of_one_row_a_sample_does_not_ask_for_data(caplog: pytest.LogCaptureFixture) -> None:
    """It asks for 1,024 samples for itself; tokens of 128 show eight rows for each of 256 inputs and more."""
    data = torch.randint(50, (150, 16), generator=torch.Generator().manual_seed(1))
    assert calibration.Enough(Pooled(), walk(Pooled()).weights, 128)(Batch(data)) == 128
    with caplog.at_level(logging.INFO, "twofour.pruning"):
        model = twofour.prune(Pooled(), "2:4", data=data, reconstruct=False)
    found = {outcome.name: outcome for outcome in outcomes(model)}
    assert [name for name, outcome in found.items() if outcome.few] == ["pooler.weight"]
    assert (
        "few rows, 128 for 128 inputs: " in found["pooler.weight"].note and "held back" in found["pooler.weight"].note
    )
    assert "few rows" not in found["first.weight"].note + found["second.weight"].note
    (line,) = [record.getMessage() for record in caplog.records if "values under a mask" in record.getMessage()]
    assert line.endswith(
        "; few data for `pooler.weight` of 3 weights: 128 rows for 128 inputs; give 8 times as much data"
    )
    caplog.clear()
    with caplog.at_level(logging.INFO, "twofour.pruning"):
        twofour.prune(Pooled(), "2:4", data=data[:20], criterion="wanda")
    assert "few data for `pooler.weight` and 2 more of 3 weights: 20 rows for 128 inputs" in caplog.text


def test_rows_fewer_than_inputs_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """One row is fitted to the digit: its error was the outcome, as if the weight were as good as dense."""
    with caplog.at_level(logging.INFO):
        pruned = twofour.prune(model(), "2:4", data=batches(1, 1))
    first, second = outcomes(pruned)
    said = "; the error is measured on the rows it was fitted to, 1 for 16 inputs: of others it says little"
    assert first.note.endswith(said) and "1 for 32 inputs" in second.note
    (line,) = [record for record in caplog.records if "few data for" in record.getMessage()]
    assert line.levelno == logging.WARNING
    assert "try     give more samples: 4 more batches, or 5 samples or more in each" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        pruned = twofour.prune(model(), "2:4", data=batches(1), reconstruct=False)
    (line,) = [record for record in caplog.records if "few data for" in record.getMessage()]
    assert line.levelno == logging.INFO and all("fitted to" not in one.note for one in outcomes(pruned))


@pytest.mark.parametrize("samples", [0, -1])
def test_no_samples_are_no_number_of_samples(samples: int) -> None:
    with pytest.raises(DataError, match=f"got +samples={samples}"):
        twofour.prune(model(), "2:4", data=batches(1), samples=samples)


@pytest.mark.long
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


class Routed(nn.Module):
    """An expert that few tokens reach."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.expert = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, chosen = self.first(x), x[:, 0] > 1
        out = h.clone()
        out[chosen] = self.expert(h[chosen])
        return out


def test_a_layer_that_the_first_samples_do_not_reach_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    data = torch.randn(300, 16, generator=torch.Generator().manual_seed(1))
    data[:8, 0] = 0
    model = twofour.prune(Routed(), "2:4", data=data, reconstruct=False)
    assert "the first 8 samples bring no row to `expert.weight`: " in caplog.text
    found = {outcome.name: outcome for outcome in outcomes(model)}
    assert found["expert.weight"].few and not found["first.weight"].few
