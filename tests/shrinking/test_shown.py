"""shown: data that show nothing are refused, and what few of them solve is judged by others that are held back."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.structure.shrink.networks import made
from tests.turns import in_turn
from twofour import shrinking
from twofour.calibration import Batch
from twofour.errors import DataError, ShrinkError
from twofour.shrinking.report import Width
from twofour.shrinking.shown import require_shown

SEED = torch.Generator().manual_seed(5)
MANY = torch.randn(512, 16, generator=SEED)


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()


def apart(model: nn.Module, small: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        want = model(x)
        return float((small(x) - want).norm() / want.norm())


@in_turn(
    ("data", "said"),
    [
        (torch.zeros(64, 16), "64 samples, all zero"),
        (MANY[:1].repeat(64, 1), "64 samples, all the same"),
        ([MANY[:1]] * 4, "4 samples, all the same"),
        (torch.zeros(1, 16), "1 samples, all zero"),
        (MANY[:1], "1 samples; all 1 rows that"),
        (MANY[:8] * torch.tensor([float("nan"), *[1.0] * 15]), "8 values that are NaN"),
    ],
)
def test_data_that_show_nothing_are_refused(data: Any, said: str) -> None:
    with pytest.raises(DataError, match=r"the calibration data (show nothing|hold NaN)") as caught:
        twofour.shrink(network(), MANY[:2], 0.5, data=data, progress=False)
    assert said in str(caught.value)


def test_a_batch_whose_axes_do_not_tell_its_samples_is_not_all_the_same() -> None:
    require_shown([Batch((MANY[:16], torch.ones(16, 16)))])
    with pytest.raises(DataError, match="hold NaN"):
        require_shown([Batch((MANY[:16], torch.full((16, 16), float("nan"))))])


def test_few_samples_are_said_and_what_they_solve_is_no_worse_than_unsolved(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    plain = twofour.shrink(model, MANY[:2], 0.5, data=MANY[:3], progress=False)
    said = shrinking.report_of(plain)
    assert said is not None and "3 samples for 64 inputs, of which 3 rows" in said.notes[0]
    assert said.reconstructed == () and "nothing was solved anew" in str(said)
    assert said.notes[0] in caplog.messages
    small = twofour.shrink(model, MANY[:2], 0.5, data=MANY[:20], progress=False)
    report = shrinking.report_of(small)
    assert report is not None and "20 samples for 64 inputs, of which 20 rows" in report.notes[0]
    assert "4 samples held back" in report.notes[0] and "give 128 samples or more" in report.notes[0]
    assert apart(model, small, MANY[256:]) < apart(model, plain, MANY[256:])
    enough = shrinking.report_of(twofour.shrink(model, MANY[:2], 0.5, data=MANY, samples=256, progress=False))
    assert enough is not None and enough.notes == () and enough.reconstructed


def test_weights_that_are_worse_solved_stay_as_they_were() -> None:
    """The samples that solve are of one corner of the inputs, those that are held back of all of them."""
    model = network()
    odd = torch.cat([(3 + 0.01 * MANY[:4]), MANY[4:5]] * 4)
    batches = list(odd.split(1))
    for number in range(4, 20, 5):
        batches[number] = MANY[number : number + 1]
    small: Any = twofour.shrink(model, MANY[:2], 0.5, data=batches, progress=False)
    report = shrinking.report_of(small)
    assert report is not None and report.reconstructed == () and "the latter are taken" in report.notes[0]
    kept = list(report.cut.kept["4.weight", 1])
    torch.testing.assert_close(small[-1].weight, model[-1].weight[:, kept])
    torch.testing.assert_close(small[-1].bias, model[-1].bias)


def test_one_image_changes_no_statistics_of_batch_norms() -> None:
    model, example = made("mobilenet")
    image = torch.randn(1, 3, 8, 8, generator=SEED)
    small = twofour.shrink(model, example, 0.7, data=image, progress=False)
    report = shrinking.report_of(small)
    assert report is not None and report.reconstructed == () and "one sample for" in report.notes[0]
    norms = [module for module in small.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms and all(int(norm.get_buffer("num_batches_tracked")) == 0 for norm in norms)
    assert "batch norms keep the means and variances of the large model: the data" in report.notes[1]


def test_a_loss_of_more_than_all_is_no_number_of_a_hundred_digits() -> None:
    assert str(Width("a:0", 8, 4, 4e300, "second-order")) == "a:0: 8 -> 4, more than 1,000% lost (second-order)"
    assert "12.5% lost" in str(Width("a:0", 8, 4, 0.125, "second-order"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(value: float) -> None:
    model = network()
    with torch.no_grad():
        model[2].weight[3, 4] = value
    with pytest.raises(ShrinkError, match=r"layer `2\.weight`: the weight holds NaN or infinity\n  got     1 such"):
        twofour.shrink(model, MANY[:2], 0.5)
    with pytest.raises(ShrinkError, match="the example holds NaN"):
        twofour.shrink(network(), torch.full((2, 16), float("nan")), 0.5)


def test_a_layer_without_which_nothing_runs_is_named() -> None:
    with pytest.raises(ShrinkError, match=r"does not run[^\n]*, without layer `0`[\s\S]*leave it in `layers` out"):
        twofour.shrink(network(), MANY[:2], 0.5, layers=["0"])
    with pytest.raises(ShrinkError) as caught:
        twofour.shrink(network(), torch.randn(2, 3), 0.5, layers=["0"])
    assert "without layer" not in str(caught.value), "it does not run with it either"
