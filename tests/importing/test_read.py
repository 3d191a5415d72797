"""read, convert and decode: what holds for every format."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import twofour
from tests.importing.small import INPUT, Net, net_state, sparse
from twofour import export, importing, masks
from twofour.errors import FormatError


@pytest.fixture(autouse=True)
def shared_cache(times_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    save_file(net_state(), tmp_path / "plain.safetensors")
    return tmp_path / "plain.safetensors"


def test_a_model_that_was_read_trains_sparse(plain: Path) -> None:
    model = twofour.read(plain, Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(INPUT).sum().backward()
    optimizer.step()
    assert twofour.check(model).ok and len(masks.of(model)) == 3


def test_a_converted_file_loads_compiled_and_masked(plain: Path, tmp_path: Path) -> None:
    importing.convert(plain, tmp_path / "ours.safetensors")
    assert set(export.read(tmp_path / "ours.safetensors").packed) == {"conv.weight", "fc1.weight", "fc2.weight"}
    want = twofour.read(plain, Net()).eval()
    back = twofour.load(tmp_path / "ours.safetensors", Net(), masked=True)
    assert all(torch.equal(tensor, want.state_dict()[name]) for name, tensor in back.state_dict().items())
    fast = twofour.load(tmp_path / "ours.safetensors", Net(), tokens=(2,))
    torch.testing.assert_close(fast(INPUT), want(INPUT).detach(), atol=1e-4, rtol=1e-4)


def test_a_plain_conversion_is_what_any_tool_reads(plain: Path, tmp_path: Path) -> None:
    importing.convert(plain, tmp_path / "ours.safetensors", packed=False)
    found, state = load_file(tmp_path / "ours.safetensors"), net_state()
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)
    assert twofour.check(twofour.load(tmp_path / "ours.safetensors", Net(), masked=True)).ok


def test_a_file_of_ours_is_left_to_load(plain: Path, tmp_path: Path) -> None:
    importing.convert(plain, tmp_path / "ours.safetensors")
    with pytest.raises(FormatError, match=r"twofour\.load"):
        importing.decode(tmp_path / "ours.safetensors")


def test_a_format_that_does_not_fit_is_refused(plain: Path) -> None:
    with pytest.raises(FormatError, match="not of the format marlin-24"):
        importing.decode(plain, format="marlin-24")
    with pytest.raises(FormatError, match=r"not known(.|\n)*marlin-24"):
        importing.decode(plain, format="marlin")
    assert importing.decode(plain, format="zeros").sparse


def test_a_checkpoint_of_another_model_leaves_this_one_as_it_was(plain: Path) -> None:
    model = nn.ModuleDict({"fc1": nn.Linear(16, 16)})
    before = model["fc1"].weight.clone()
    with pytest.raises(FormatError, match="does not fit"):
        twofour.read(plain, model)
    assert torch.equal(model["fc1"].weight, before) and not masks.of(model)


def test_weights_on_the_meta_device_are_filled(plain: Path) -> None:
    with torch.device("meta"):
        model = Net()
    twofour.read(plain, model)
    assert twofour.check(model).ok and not model.fc1.weight.is_meta


def test_tied_weights_are_named_once_in_a_file(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.fc = nn.Embedding(32, 64), nn.Linear(64, 64)
            self.head = nn.Linear(64, 32, bias=False)
            self.head.weight = self.embed.weight

    state = {"embed.weight": torch.randn(32, 64), "fc.weight": sparse(64, 64), "fc.bias": torch.zeros(64)}
    save_file(state, tmp_path / "m.safetensors")
    model = twofour.read(tmp_path / "m.safetensors", Tied())
    assert model.head.weight is model.embed.weight and torch.equal(model.head.weight, state["embed.weight"])


@pytest.mark.parametrize("name", ["none.safetensors", "none.pt"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(FormatError, match=name):
        importing.decode(tmp_path / name)


def test_a_state_dict_is_looked_for_and_its_absence_said(tmp_path: Path) -> None:
    content: dict[str, dict[str, Tensor]] = {"optimizer": {"a": torch.zeros(1)}}
    torch.save(content, tmp_path / "m.pt")
    with pytest.raises(FormatError, match=r"no state dict(.|\n)*optimizer"):
        importing.decode(tmp_path / "m.pt")


def test_values_that_overflow_the_models_dtype_are_refused(tmp_path: Path) -> None:
    save_file({"fc.weight": sparse(32, 64) * 1e5, "fc.bias": torch.zeros(32)}, tmp_path / "m.safetensors")
    model = nn.ModuleDict({"fc": nn.Linear(64, 32)})
    with pytest.raises(FormatError, match=r"`fc.weight`(.|\n)*overflows"):
        twofour.read(tmp_path / "m.safetensors", model.half())
    assert twofour.check(twofour.read(tmp_path / "m.safetensors", model.float())).ok


def test_a_state_dict_is_known_without_its_ending(tmp_path: Path) -> None:
    torch.save(net_state(), tmp_path / "checkpoint")
    assert importing.decode(tmp_path / "checkpoint").sparse
