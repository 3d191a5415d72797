"""Shrunk models in files: a large model is cut as the file says, or the file is refused and the model stays."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import twofour
from tests.structure.shrink.networks import IMAGE, MobileNet, made
from twofour import masks
from twofour.errors import FormatError
from twofour.export import cuts
from twofour.structure import shrink


def small_mobilenet() -> nn.Module:
    model, example = made("mobilenet")
    found = shrink.channels(model, example)
    plan = found.plan({"features.1.parts.0.0.weight:0": range(16), "features.0.0.weight:0": range(6)}, ["features.3"])
    return shrink.cut(model, plan)


@pytest.fixture(scope="module")
def small() -> nn.Module:
    return small_mobilenet()


def test_a_large_model_is_cut_and_filled_and_the_file_says_how(small: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    twofour.save(small, path)
    large = MobileNet().eval()
    held = large.features
    loaded = twofour.load(path, large, masked=True)
    assert loaded is large and large.features is held and len(large.features) == 3
    assert torch.equal(loaded(IMAGE), small(IMAGE))
    assert shrink.cuts_of(loaded) == shrink.cuts_of(small)
    twofour.save(loaded, path)
    again = twofour.load(path, loaded, masked=True)  # small already
    assert torch.equal(again(IMAGE), small(IMAGE)) and len(shrink.cuts_of(again)) == 1


def test_a_compiled_copy_leaves_the_large_model_as_it_is(small: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    twofour.save(twofour.compile(small, IMAGE, graph=False), path)
    with torch.device("meta"):
        large = MobileNet()
    fast = twofour.load(path, large, graph=False)
    torch.testing.assert_close(fast(IMAGE), small(IMAGE), rtol=1e-4, atol=1e-4)
    assert len(large.features) == 4 and large.features[0][0].out_channels == 8
    assert shrink.cuts_of(fast) == shrink.cuts_of(small)


def test_masks_of_a_shrunk_model_come_back(tmp_path: Path) -> None:
    model = small_mobilenet()
    path = tmp_path / "sparse.safetensors"
    twofour.prune(model, "1:2", skip=["head", "features.*.parts.1.0", "features.0.0"], eligibility="any")
    twofour.save(model, path)
    loaded = twofour.load(path, MobileNet().eval(), masked=True)
    assert torch.equal(loaded(IMAGE), model(IMAGE)) and masks.of(loaded).keys() == masks.of(model).keys()


def test_a_file_that_does_not_fit_is_refused_by_name_and_the_model_stays(small: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    twofour.save(small, path)
    large: Any = MobileNet().eval()
    large.features[1].parts[0][1] = nn.BatchNorm2d(25)
    before = {name: value.clone() for name, value in large.state_dict().items()}
    for masked in (True, False):
        with pytest.raises(FormatError, match="a cut of the file does not fit the model") as caught:
            twofour.load(path, large, masked=masked)
        assert "features.1.parts.0.1.weight" in str(caught.value) and caught.value.code == "model-cut"
    assert all(torch.equal(value, before[name]) for name, value in large.state_dict().items())


def test_a_model_is_put_back_where_the_tensors_do_not_fit_after_its_cut(small: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    model = small_mobilenet()
    model.head = nn.Linear(12, 7)
    twofour.save(model, path)
    large = MobileNet().eval()
    with pytest.raises(FormatError, match="does not fit the model"):
        twofour.load(path, large, masked=True)
    assert large.features[0][0].out_channels == 8 and len(large.features) == 4 and not shrink.cuts_of(large)


class Repeated(nn.Module):
    """A number and layers that no tensor shows."""

    def __init__(self, times: int = 5) -> None:
        super().__init__()
        self.times, self.layers = times, nn.Sequential(nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.layers(x) + 1
        return x


@pytest.mark.parametrize(
    "plans",
    [
        [shrink.Cut(layers=("layers.3",))],
        [shrink.Cut(attributes=(shrink.AttributeCut("", "times", 5, 2),))],
        [shrink.Cut(layers=("layers.2",)), shrink.Cut(layers=("layers.2",))],
        [shrink.Cut(attributes=(shrink.AttributeCut("", "times", 5, 2),)), shrink.Cut(layers=("layers.3",))],
    ],
)
def test_a_cut_that_no_tensor_shows_is_made_again(plans: list[shrink.Cut], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Repeated().eval(), torch.randn(3, 4)
    small = model
    for plan in plans:
        small = shrink.cut(small, plan)
    assert not torch.equal(small(x), model(x))
    twofour.save(small, tmp_path / "small.safetensors")
    large = Repeated().eval()
    assert torch.equal(twofour.load(tmp_path / "small.safetensors", large, masked=True)(x), small(x))
    again = twofour.load(tmp_path / "small.safetensors", large, masked=True)  # small already
    assert torch.equal(again(x), small(x)) and shrink.cuts_of(again) == tuple(plans)
    torch.testing.assert_close(twofour.load(tmp_path / "small.safetensors", Repeated(), graph=False)(x), small(x))


def test_a_model_that_was_built_small_is_filled_as_it_is(tmp_path: Path) -> None:
    plan = shrink.Cut(attributes=(shrink.AttributeCut("", "times", 5, 2),), layers=("layers.3",))
    small = shrink.cut(Repeated().eval(), plan)
    twofour.save(small, tmp_path / "small.safetensors")
    built = Repeated(2).eval()
    del built.layers[3]
    assert torch.equal(
        twofour.load(tmp_path / "small.safetensors", built, masked=True)(torch.ones(1, 4)), small(torch.ones(1, 4))
    )
    assert not shrink.cuts_of(built)


def test_positions_of_all_cuts_of_a_file_are_bounded(small: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = [{"size": 1 << 21, "kept": f"0-{(1 << 21) - 1}", "places": [["a", 0]]}]
    with pytest.raises(FormatError, match="too large") as caught:
        cuts.parse_cuts("file", 3 * [{"version": 1, "axes": axes}])
    assert caught.value.code == "settings-cuts"
    monkeypatch.setattr(cuts, "MOST_KEPT", 8)
    with pytest.raises(FormatError, match="cannot be stored"):
        cuts.described(small)


def test_the_settings_hold_the_plan(small: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    twofour.save(small, path)
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        (plan,) = json.loads(file.metadata()["twofour"])["settings"]["cuts"]
    assert shrink.Cut.from_dict(plan) == shrink.cuts_of(small)[0]
