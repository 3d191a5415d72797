"""NaN and infinity in calibration data are said to be there, in which batch and input."""

import pytest
import torch
from torch import nn

import twofour
from tests.turns import in_turn
from twofour import masks
from twofour.calibration import Batch, not_finite, take
from twofour.errors import DataError


def spoilt(value: float, *shape: int) -> torch.Tensor:
    x = torch.randn(shape)
    x[-1, -1] = value
    return x


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32)

    def forward(self, pixels, scale):
        return self.fc(pixels * scale)


@in_turn(("value", "kind"), [(float("nan"), "NaN"), (float("inf"), "infinity"), (float("-inf"), "infinity")])
@in_turn("options", [{}, {"permute": True}, {"criterion": "magnitude"}, {"criterion": "taylor", "samples": 64}])
def test_the_batch_that_holds_it_is_named_and_nothing_changes(value: float, kind: str, options: dict) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    data = [torch.randn(8, 32) for _ in range(8)]
    data[5] = spoilt(value, 8, 32)
    if options.get("criterion") == "taylor":
        data, options = [(x, x) for x in data], {**options, "loss": nn.functional.mse_loss}
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(DataError, match=rf"the calibration data hold {kind}\n  got +batch 6: 1 value that is {kind}\n"):
        twofour.prune(model, data=data, progress=False, **options)
    assert not masks.of(model) and all(map(torch.equal, before, model.parameters()))


def test_which_input_it_is_is_said() -> None:
    good, bad = torch.randn(4, 32), spoilt(float("inf"), 4, 32)
    for inputs, said in (
        ({"pixels": good, "scale": bad}, "batch 3, `scale`: 1 value that is infinity"),
        ((good, bad), "batch 3, input 2 of 2: 1 value that is infinity"),
        ({"pixels": bad, "scale": good}, "batch 3, `pixels`: 1 value"),
    ):
        first = {"pixels": good, "scale": good} if isinstance(inputs, dict) else (good, good)
        with pytest.raises(DataError, match=said):
            twofour.prune(Two(), data=[first, first, inputs], progress=False, reconstruct=False)


def test_what_hides_by_infinity_is_meant_and_numbers_are_those_of_the_data() -> None:
    scores, hidden = torch.randn(2, 4, 4), torch.full((4, 4), float("-inf")).triu(1)
    for inputs in ((scores, hidden), {"x": scores, "attention_mask": hidden + 1}, {"x": scores, "hide": hidden}):
        assert not_finite([Batch(inputs)]) is None
    assert not_finite([Batch((scores, hidden + 1))]) is not None and not_finite([Batch(hidden)]) is not None
    least = torch.full((4, 4), torch.finfo(torch.float32).min).triu(1) + hidden.tril(-1)
    assert not_finite([Batch((scores, hidden + least))]) is None
    taken = take(nn.Linear(4, 4), [torch.randn(8, 4) for _ in range(64)], 32)
    assert [batch.number for batch in taken] == [1, 17, 33, 49]
    assert take(nn.Linear(4, 4), torch.randn(8, 4), 4)[0].number == 1


@pytest.mark.parametrize("name", ["unmasked_pixels", "masked", "x"])
def test_logarithms_and_words_around_mask_are_no_masks(name: str) -> None:
    x, shares = torch.randn(4, 8), spoilt(float("-inf"), 4, 8).log_softmax(1)
    for inputs in ((x, shares), {"pixels": x, name: shares}, {name: shares}):
        error = not_finite([Batch(inputs)])
        assert error is not None and "1 value that is infinity" in str(error)
    for mask in ("mask", "masks", "attention_mask", "mask_of_tokens", "attentionMask", "src_key_padding_mask"):
        assert not_finite([Batch({mask: shares})]) is None


def test_data_that_are_finite_are_not_blamed() -> None:
    with pytest.raises(DataError, match="make a layer's input infinite"):
        twofour.prune(nn.Linear(32, 32), data=[torch.full((8, 32), 1e30)], progress=False)
