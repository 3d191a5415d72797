"""Models of low bits in files: whole numbers of their own width, and the same bits again, whatever the model was."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import twofour
from twofour import export, masks, quantization
from twofour.errors import FormatError, PackingError
from twofour.export.file import write
from twofour.packing.encodings import dequantize

KINDS = [("w1", "a2"), ("w1.58", "a8"), ("ternary5", "b2"), ("w2", "a2"), ("w4", "a8"), ("b3", "s4"), ("w3", None)]


@pytest.fixture(autouse=True)
def _cache(times_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(4, 16, 3, padding=1, groups=2)
        self.fc = nn.Linear(256, 40)
        self.head = nn.Linear(40, 5, bias=False)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.fc(torch.relu(self.conv(x)).flatten(1))))


def of_bits(weights: str, inputs: str | None, *, data: bool = False, sparse: bool = False) -> Net:
    model = Net()
    if sparse:
        twofour.prune(model, {"fc": "2:4", "*": "dense"})
    return twofour.quantize(model, weights, inputs, data=[torch.randn(4, 4, 4, 4)] if data else None, ends=None)


def answer(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with quantization.in_whole_numbers(model):
        return model(x)


def whole(model: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return {name: held.whole_weight(model.get_submodule(name)) for name, held in quantization.of(model).items()}


@pytest.mark.parametrize("into", [Net, None])
@pytest.mark.parametrize(("weights", "inputs"), KINDS)
def test_whole_numbers_and_answers_come_back(tmp_path: Path, weights: str, inputs: str | None, into) -> None:
    data, x = inputs is not None and weights != "w1", torch.randn(2, 4, 4, 4)
    model, path = of_bits(weights, inputs, data=data), tmp_path / "m.safetensors"
    twofour.save(model, path)
    again = twofour.load(path, into(1) if into else copy.deepcopy(model), masked=True)
    want = whole(model)
    for name, (codes, scales) in whole(again).items():
        assert torch.equal(codes, want[name][0]) and torch.equal(scales, want[name][1])
    assert torch.equal(again(x), model(x)) and (inputs is None or torch.equal(again(x), answer(again, x)))


@pytest.mark.parametrize(("weights", "inputs"), [("w1.58", "a2"), ("w3", None)])
def test_compiled_models_do_too_and_the_given_one_stays(tmp_path: Path, weights: str, inputs: str | None) -> None:
    x, path = torch.randn(2, 4, 4, 4), tmp_path / "m.safetensors"
    model = of_bits(weights, inputs, data=inputs is not None)
    twofour.save(twofour.compile(model, x, tokens=(2,), graph=False), path)
    held = export.read(path).packed
    assert set(held) == {"conv.weight", "fc.weight", "head.weight"}
    into = Net(1)
    before = {name: tensor.clone() for name, tensor in into.state_dict().items()}
    again = twofour.load(path, into, tokens=(2,))
    want = whole(model)
    for name, (codes, scales) in whole(again).items():
        assert torch.equal(codes, want[name][0]) and torch.equal(scales, want[name][1].detach())
    if inputs is None:  # kernels round float inputs, where they won
        torch.testing.assert_close(again(x), model(x))
    else:
        assert torch.equal(again(x), model(x))
    assert into.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in into.state_dict().items())
    twofour.save(again, tmp_path / "plain.safetensors", packed=False)
    plain = twofour.load(tmp_path / "plain.safetensors", Net(2), masked=True)
    assert all(torch.equal(codes, want[name][0]) for name, (codes, _) in whole(plain).items())
    twofour.save(again, tmp_path / "second.safetensors")
    second = export.read(tmp_path / "second.safetensors").packed
    assert all(torch.equal(second[name].values, held[name].values) for name in held)


@pytest.mark.parametrize(("inputs", "symmetric"), [(None, True), ("a8", False)])
def test_a_compiled_layer_of_one_output_is_saved_and_compiled_again(tmp_path: Path, inputs, symmetric: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 1)).eval()
    twofour.quantize(model, "w4", inputs, symmetric=symmetric, ends=None)
    fast, x = twofour.compile(model, tokens=(2,)), torch.randn(2, 64)
    twofour.save(fast, tmp_path / "m.safetensors")
    again = twofour.load(tmp_path / "m.safetensors", nn.Sequential(nn.Linear(64, 1)).eval(), tokens=(2,))
    torch.testing.assert_close(again(x), fast(x))


@pytest.mark.parametrize(("weights", "bits"), [("w1", 1), ("w2", 2), ("w3", 3), ("w8", 8), ("w1.58", 1.6)])
def test_a_file_has_the_bytes_of_its_width(tmp_path: Path, weights: str, bits: float) -> None:
    model = twofour.quantize(nn.Sequential(nn.Linear(240, 64, bias=False)).eval(), weights, "a8", ends=None)
    path = tmp_path / "m.safetensors"
    twofour.save(model, path)
    packed = export.read(path).packed["0.weight"]
    assert packed.values.nbytes == 64 * 240 * bits / 8 and packed.nbytes == packed.values.nbytes + 4 * 64
    twofour.save(model, path, packed=False)
    assert torch.equal(export.read(path).plain["0.weight"], model[0].weight)
    if weights == "w1.58":
        fast = twofour.compile(model, torch.randn(1, 240), tokens=(1,), graph=False)
        assert fast.plan.layers[0].bytes_in_file == packed.nbytes


@pytest.mark.parametrize("masked", [False, True])
def test_zeros_and_masks_come_back_with_the_bits(tmp_path: Path, masked: bool) -> None:
    model, x, path = of_bits("w2", "a8", data=True, sparse=True), torch.randn(2, 4, 4, 4), tmp_path / "m.safetensors"
    twofour.save(model, path)
    packed = export.read(path).packed["fc.weight"]
    assert packed.header.pattern == "2:4" and packed.nbytes == 40 * (256 // 2 * 2 // 8 + 256 // 4 // 2 + 4)
    again = twofour.load(path, Net(1), masked=True) if masked else twofour.load(path, Net(1), tokens=(2,))
    assert torch.equal(answer(again, x), answer(model, x))
    kept = masks.of(again)["fc.weight"] if masked or "fc.weight" in masks.of(again) else again.fc
    assert kept.pattern.name == "2:4" and "2:4 kept" in str(twofour.check(again))
    if masked:
        again.train()(x).sum().backward()
        assert again.fc.weight_step.grad is not None and again.fc.weight.grad is not None


def test_a_plain_file_is_what_training_goes_on_from(tmp_path: Path) -> None:
    model, path = of_bits("w1.58", "a2", data=True, sparse=True), tmp_path / "m.safetensors"
    twofour.save(model, path, packed=False)
    for into in (Net(1), of_bits("w1.58", "a2", data=True)):
        again = twofour.load(path, into, masked=True)
        assert again is into and set(again.state_dict()) == set(model.state_dict())
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in again.state_dict().items())


def test_weights_that_others_have_too_and_shells_of_a_model(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.middle, self.head = nn.Embedding(12, 16), nn.Linear(16, 16), nn.Linear(16, 12)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.middle(self.embed(x)))

    model, path, x = Tied().eval(), tmp_path / "m.safetensors", torch.tensor([1, 5])
    twofour.quantize(model, "w2", "a8", ends=None)
    twofour.save(model, path)
    held = export.read(path)
    assert set(held.packed) == {"middle.weight"} and torch.equal(held.plain["embed.weight"], model.embed.weight)
    assert torch.equal(twofour.load(path, Tied(), tokens=(2,))(x), model(x))
    with torch.device("meta"):
        shell = nn.Sequential(nn.Linear(24, 9)).bfloat16()
    low = twofour.quantize(nn.Sequential(nn.Linear(24, 9)).eval().bfloat16(), "b8", "a8")
    twofour.save(low, path)
    again = twofour.load(path, shell, tokens=(2,))
    assert again[0].weight.dtype is torch.bfloat16 and torch.equal(whole(again)["0"][0], whole(low)["0"][0])


def test_scales_without_a_place_are_refused_by_name(tmp_path: Path) -> None:
    model = of_bits("w2", "a2")
    model.fc.weight_step.data[3] = 3e38
    with pytest.raises(PackingError, match="layer `fc`"):
        twofour.save(model, tmp_path / "m.safetensors")
    tiny = twofour.quantize(nn.Sequential(nn.Linear(8, 4)).eval(), "w2", "a2")
    tiny[0].weight_step.data[:] = 1e-12
    twofour.save(tiny, tmp_path / "m.safetensors")
    with pytest.raises(FormatError, match="loses whole numbers") as caught:
        twofour.load(tmp_path / "m.safetensors", nn.Sequential(nn.Linear(8, 4)).half(), tokens=(2,))
    assert caught.value.code == "low-bits-codes"


def test_a_refused_file_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model, path = of_bits("w1.58", "a2", sparse=True), tmp_path / "m.safetensors"
    twofour.save(model, path)
    contents = export.read(path)
    write(path, replace(contents, settings={**contents.settings, "patterns": {"conv.weight": "2:4"}}))
    for into in (Net(1), of_bits("w1.58", "a2")):
        before, held = dict(into.state_dict()), quantization.of(into)
        with pytest.raises(FormatError):
            twofour.load(path, into, masked=True)
        assert into.state_dict().keys() == before.keys() and quantization.of(into) == held
        assert all(torch.equal(tensor, before[name]) for name, tensor in into.state_dict().items())


def test_packed_codes_stand_for_what_the_layer_multiplies_by(tmp_path: Path) -> None:
    model, path = of_bits("w4", "a8"), tmp_path / "m.safetensors"
    twofour.save(model, path)
    for name, (codes, scales) in whole(model).items():
        packed = export.read(path).packed[f"{name}.weight"]
        rows = codes.flatten(1)
        assert torch.equal(packed.unpack().flatten(1), dequantize(rows, scales.detach().view(-1, 1), None))


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_error_that_is_not_ours_leaves_the_layers_as_they_were(tmp_path: Path, monkeypatch, error) -> None:
    def fail(*_: object) -> None:
        raise error

    path, into = tmp_path / "m.safetensors", Net(1)
    twofour.save(of_bits("w1.58", "a2"), path)
    before = into.state_dict()
    monkeypatch.setattr("twofour.export.fill._assign", fail)
    with pytest.raises(error):
        twofour.load(path, into, masked=True)
    assert not quantization.of(into) and type(into.fc) is nn.Linear
    assert into.state_dict().keys() == before.keys()


def test_a_file_and_a_model_that_compute_otherwise_say_how_they_meet(tmp_path: Path) -> None:
    low, floats = tmp_path / "low.safetensors", tmp_path / "floats.safetensors"
    twofour.save(of_bits("w4", "a8"), low)
    twofour.save(Net(1), floats)
    for path, into, words in (
        (low, of_bits("w1.58", "a2"), "leave `twofour.quantize` out"),
        (floats, of_bits("w4", "a8"), "load the file into the model before `twofour.quantize`"),
    ):
        with pytest.raises(FormatError) as caught:
            twofour.load(path, into, tokens=(2,))
        assert words in str(caught.value.remedy) and "low bits" in str(caught.value.wanted)
    assert quantization.of(twofour.load(low, quantization.remove(of_bits("w1.58", "a2")), masked=True))
    assert not quantization.of(twofour.load(floats, Net(2), tokens=(2,)))
