"""Checkpoints that compressed-tensors 0.14.0.1 wrote (tests/data/importing/make.py), against the weights it packed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import twofour
from tests.checkpoints.small import shards
from tests.importing.small import DATA, bitmask_parts, sparse
from tests.kernels.bounds import in_fixed_point, int4_bound
from twofour import importing, masks
from twofour.errors import FormatError
from twofour.export import read
from twofour.packing import Packed
from twofour.patterns import parse

BITMASKS = ("sparse_24_bitmask", "sparse_bitmask", "bitmask_float8", "bitmask_int8")


@pytest.fixture(autouse=True)
def shared_cache(times_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))


def tensors(name: str, file: str = "model") -> dict[str, Tensor]:
    return load_file(DATA / name / f"{file}.safetensors")


def stored(tmp_path: Path, state: dict[str, Tensor]) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


@pytest.mark.parametrize("name", BITMASKS)
def test_bitmask_weights_are_those_that_were_packed(name: str) -> None:
    found = importing.decode(DATA / name)
    assert found.format == "sparse-24-bitmask" and found.patterns == {"fc1.weight": "2:4", "fc2.weight": "2:4"}
    assert repr(found).startswith("Imported('sparse-24-bitmask', 2 sparse and ")
    weights = found.weights()
    for key, want in tensors(name, "expected").items():
        assert torch.equal(weights[key].to(want.dtype), want)
    assert weights.keys() >= {"fc1.bias", "head.weight", "head.bias"}
    assert not any(key.endswith(("scale", "bitmask", "shape")) for key in weights)


def test_int8_under_a_bitmask_stays_int8() -> None:
    found = importing.decode(DATA / "bitmask_int8")
    weight = found.sparse["fc1.weight"].weight
    assert isinstance(weight, Packed) and (weight.header.dtype, weight.header.pattern) == ("int8", "2:4")
    weight.validate()
    assert found.contents().settings["dtype"] == "int8"


def test_a_bitmask_knows_which_zeros_are_kept() -> None:
    found = importing.decode(DATA / "sparse_24_bitmask").sparse["fc2.weight"]
    assert found.keep is not None and isinstance(found.weight, Tensor)
    assert int(found.keep.sum()) == found.keep.numel() // 2 > int(found.weight.count_nonzero())


@pytest.mark.parametrize("layer", ["group", "short", "channel", "bytes", "grouped_bytes"])
def test_marlin_weights_are_those_that_were_packed(layer: str) -> None:
    want = tensors("marlin_24", "expected")
    whole, scale = want[f"{layer}.whole"], want[f"{layer}.scale"].float()
    dense = (whole.float().view(len(scale), scale.shape[1], -1) * scale.unsqueeze(-1)).view(whole.shape)
    found = importing.decode(DATA / "marlin_24")
    assert found.format == "marlin-24"
    assert torch.equal(found.weights()[f"{layer}.weight"], dense)
    weight = found.sparse[f"{layer}.weight"].weight
    if layer == "grouped_bytes":
        assert isinstance(weight, Tensor) and "grouped_bytes" in found.notes[0]
        return
    assert isinstance(weight, Packed)
    weight.validate()
    assert weight.header.dtype == ("int8" if layer == "bytes" else "int4")
    assert weight.header.group == {"channel": 32, "bytes": 0}.get(layer, 128)


class Marlin(nn.Module):
    """The layers of the marlin-24 file, side by side."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"group": 512, "short": 256, "channel": 96, "bytes": 64, "grouped_bytes": 512}
        for name, columns in sizes.items():
            setattr(self, name, nn.Linear(columns, 64))
        self.norm = nn.LayerNorm(16, bias=False)
        self.columns = sizes

    def forward(self, x: Tensor) -> Tensor:
        return sum(getattr(self, name)(x[:, :columns]) for name, columns in self.columns.items())  # type: ignore[return-value]


def test_marlin_goes_into_a_model_and_through_compile() -> None:
    model = twofour.read(DATA / "marlin_24", Marlin())
    assert twofour.check(model).ok and len(masks.of(model)) == 5
    want = importing.decode(DATA / "marlin_24").weights()
    assert all(torch.equal(tensor, want[name].float()) for name, tensor in model.state_dict().items())
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
    fast = twofour.compile(model.group.eval(), x, tokens=(3,))
    torch.testing.assert_close(fast(x), model.group(x).detach(), atol=1e-4, rtol=1e-4)


def only_int4() -> dict[str, Tensor]:
    """The int4 layers of the marlin-24 file."""
    state = tensors("marlin_24")
    return {name: tensor for name, tensor in state.items() if name.startswith(("group.", "short.", "channel."))}


def test_marlin_int4_becomes_our_int4_with_bfloat16_scales(tmp_path: Path) -> None:
    source = stored(tmp_path, only_int4())
    layers = nn.ModuleDict({"group": nn.Linear(512, 64), "short": nn.Linear(256, 64), "channel": nn.Linear(96, 64)})
    exact = twofour.read(source, layers).state_dict()
    assert "int4" in importing.convert(source, tmp_path / "m.safetensors").notes[0]
    fast = twofour.load(tmp_path / "m.safetensors", layers, tokens=(3,), memory="small")
    assert fast.plan.dtype == "int4"
    for name, layer in fast.items():
        weight = layer.source()
        assert weight.header.dtype == "int4"
        off = (weight.unpack() - exact[f"{name}.weight"]).abs()
        assert bool((off <= 2**-8 * exact[f"{name}.weight"].abs()).all())
        x = torch.randn(3, weight.header.shape[1], generator=torch.Generator().manual_seed(0))
        want = nn.functional.linear(x.double(), weight.unpack().double(), exact[f"{name}.bias"].double())
        kernel, _ = layer.dispatch.at(3)  # chosen by time: which one differs from CPU to CPU, and so does its rounding
        assert (
            (layer(x) - want).abs() <= int4_bound(x, weight.unpack(), in_fixed_point(kernel)) + 1e-6 * want.abs()
        ).all()


def test_widths_that_differ_are_computed_in_float32(tmp_path: Path) -> None:
    importing.convert(DATA / "marlin_24", tmp_path / "m.safetensors")
    assert "dtype" not in read(tmp_path / "m.safetensors").settings


def test_a_sharded_folder_is_read_as_one_file_is(tmp_path: Path) -> None:
    state = tensors("sparse_24_bitmask")
    names = sorted(state)
    shards(tmp_path / "m", {n: state[n] for n in names[:5]}, {n: state[n] for n in names[5:]})
    shutil.copy(DATA / "sparse_24_bitmask" / "config.json", tmp_path / "m")
    one, other = importing.decode(tmp_path / "m").weights(), importing.decode(DATA / "sparse_24_bitmask").weights()
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_rotated_weights_are_refused(tmp_path: Path) -> None:
    shutil.copytree(DATA / "sparse_24_bitmask", tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["quantization_config"]["transform_config"] = {"config_groups": {"u": {}}}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match="rotated"):
        importing.decode(tmp_path / "m")


def test_an_unstructured_bitmask_stays_plain(tmp_path: Path) -> None:
    dense = torch.randn(8, 12)
    keep = torch.rand(8, 12) < 0.9
    counts = keep.sum(1)
    bits = torch.nn.functional.pad(keep, (0, 4)).view(8, 2, 8).to(torch.uint8)
    state = {
        "fc.compressed": dense[keep],
        "fc.bitmask": (bits << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8),
        "fc.shape": torch.tensor([8, 12]),
        "fc.row_offsets": counts.cumsum(0) - counts,
    }
    found = importing.decode(stored(tmp_path, state))
    assert not found.sparse and "not 2:4" in found.notes[0]
    assert torch.equal(found.plain["fc.weight"], dense * keep)


def damaged(name: str, key: str, change: object) -> dict[str, Tensor]:
    state = tensors(name)
    assert callable(change)
    state[key] = change(state[key].clone())
    return state


DAMAGE = [
    ("sparse_24_bitmask", "fc1.bitmask", lambda t: t | 1, "two bits in each group"),
    ("sparse_24_bitmask", "fc1.bitmask", lambda t: t | 128, "behind the last column"),
    ("sparse_24_bitmask", "fc1.bitmask", lambda t: t[:, :4], "bitmask"),
    ("sparse_24_bitmask", "fc1.shape", lambda t: t * -1, "positive"),
    ("sparse_24_bitmask", "fc1.shape", lambda t: t.flatten()[:1], "two whole numbers"),
    ("sparse_24_bitmask", "fc1.shape", lambda t: t << 40, "positive"),
    ("sparse_24_bitmask", "fc1.compressed", lambda t: t * float("nan"), "NaN"),
    ("sparse_24_bitmask", "fc1.compressed", lambda t: t.double(), "float64"),
    ("sparse_24_bitmask", "fc1.compressed", lambda t: t[:-1], "two bits in each group"),
    ("sparse_bitmask", "fc1.row_offsets", lambda t: t + 1, "row offsets"),
    ("bitmask_int8", "fc1.weight_scale", lambda t: t * 0, "positive"),
    ("bitmask_int8", "fc1.weight_scale", lambda t: t[:3], "scale"),
    ("marlin_24", "group.meta", lambda t: t * 0, "legal|ascending"),
    ("marlin_24", "group.meta", lambda t: t[:-1], "weight_packed"),
    ("marlin_24", "group.scale_packed", lambda t: t[:3], "scale_packed"),
    ("marlin_24", "group.scale_packed", lambda t: -t, "positive"),
    ("marlin_24", "channel.scale_packed", lambda t: t[:0], "scale_packed"),
    ("marlin_24", "group.weight_packed", lambda t: t.long(), "int32"),
    ("marlin_24", "group.weight_packed", lambda t: t[:, :-1], "weight_packed"),
]


@pytest.mark.parametrize(("name", "key", "change", "message"), DAMAGE)
def test_damage_is_named(tmp_path: Path, name: str, key: str, change: object, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        importing.decode(stored(tmp_path, damaged(name, key, change)))
    assert caught.value.layer == key.rpartition(".")[0]


@pytest.mark.parametrize("name", [*BITMASKS, "marlin_24"])
def test_a_missing_part_is_refused(tmp_path: Path, name: str) -> None:
    whole = tensors(name)
    for key in whole:
        if key.endswith(("compressed", "shape", "row_offsets", "scale_packed", "weight_scale")):
            with pytest.raises(FormatError):
                importing.decode(stored(tmp_path, {k: t for k, t in whole.items() if k != key}))


def test_what_a_file_of_ours_holds_of_a_bitmask_is_checked_and_compiled(tmp_path: Path) -> None:
    importing.convert(DATA / "sparse_24_bitmask", tmp_path / "m.safetensors")
    model = nn.ModuleDict({"fc1": nn.Linear(36, 64), "fc2": nn.Linear(64, 48, bias=False), "head": nn.Linear(48, 10)})
    twofour.load(tmp_path / "m.safetensors", model, masked=True)
    assert twofour.check(model, expect={"fc1.weight": "2:4", "fc2.weight": "2:4"}).ok
    assert parse("2:4").check(model["fc1"].weight.detach()).ok
    x = torch.randn(3, 64)
    fast = twofour.compile(model["fc2"].eval(), x, tokens=(3,))
    torch.testing.assert_close(fast(x), model["fc2"](x).detach(), atol=1e-4, rtol=1e-4)


def of_low_precision(source: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], nn.Module]:
    """A checkpoint in `dtype` with a dense head, and the model that it is of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, 24, bias=False))
    if source == "marlin-24":
        names = {name: name.replace("grouped_bytes", "0") for name in tensors("marlin_24") if "grouped_bytes" in name}
        state = {new: tensors("marlin_24")[old] for old, new in names.items()}
        model[1] = nn.Identity()
    else:
        parts = {f"{at}.{part}": t for at in (0, 1) for part, t in bitmask_parts(weight_of(model[at], dtype)).items()}
        state = {**parts, "0.bias": torch.randn(64).to(dtype)}
    return state | {"2.weight": torch.randn(24, 64).to(dtype)}, model


def weight_of(layer: nn.Module, dtype: torch.dtype) -> Tensor:
    return sparse(*layer.weight.shape, dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("source", ["bitmask", "marlin-24"])
def test_packed_imports_of_low_precision_load_into_models_of_any_type(
    tmp_path: Path, source: str, dtype: torch.dtype
) -> None:
    state, model = of_low_precision(source, dtype)
    path = stored(tmp_path, state)
    importing.convert(path, tmp_path / "m.safetensors")
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1))
    want = twofour.read(path, model)(x).detach()
    for own, allowed in ((torch.float32, 2e-2), (torch.bfloat16, 4e-2)):
        fast = twofour.load(tmp_path / "m.safetensors", model.to(own), tokens=(3,), memory="small")
        assert fast.plan.layers[0].kernel.startswith("nm_matmul_2x4_"), str(fast.plan)
        assert (fast(x.to(own)).float() - want).norm() < allowed * want.norm()
    plan = str(twofour.load(tmp_path / "m.safetensors", model.to(torch.float16), tokens=(3,)).plan)
    assert "its weight is torch.float16" in plan and "convert the model first: model.float()" in plan


@pytest.mark.parametrize(("name", "key"), [("marlin_24", "group.weight_g_idx"), ("bitmask_int8", "head.weight_scale")])
def test_a_quantised_weight_of_another_form_is_refused(tmp_path: Path, name: str, key: str) -> None:
    with pytest.raises(FormatError, match=key):
        importing.decode(stored(tmp_path, {**tensors(name), key: torch.ones(10)}))
