"""BitNet checkpoints as transformers packs them: read, run on products of codes, checked; bad ones are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BitNetConfig, BitNetForCausalLM
from transformers.utils.quantization_config import BitNetQuantConfig
from typer.testing import CliRunner

import twofour
from twofour import export, importing, quantization
from twofour.cli.app import app
from twofour.errors import FormatError

with patch.object(torch, "compile", lambda function: function):  # transformers compiles its rounding, for half a minute
    from transformers.integrations.bitnet import pack_weights, replace_with_bitnet_linear, unpack_weights

IDS = torch.tensor([[3, 9, 4, 1, 7]])
HELD = [f"mlp.{name}_proj" for name in ("gate", "up", "down")] + [f"self_attn.{name}_proj" for name in "qkvo"]


@pytest.fixture(autouse=True)
def _cache(times_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))


def config() -> BitNetConfig:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "vocab_size": 40,
        "tie_word_embeddings": True,
    }
    return BitNetConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )


def plain(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return BitNetForCausalLM(config()).eval()


def written(folder: Path, kind: str = "bitlinear") -> nn.Module:
    """Write a checkpoint by transformers' functions; return transformers' own model of it."""
    model = plain()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    for layer in [f"model.layers.0.{name}" for name in HELD]:
        weight = state[f"{layer}.weight"]
        scale = weight.abs().mean()
        whole = (weight / scale).round().clamp(-1, 1)
        state[f"{layer}.weight"] = pack_weights(whole)
        state[f"{layer}.weight_scale"] = (1 / scale if kind == "bitlinear" else scale).view(1)
    save_file(state, folder / "model.safetensors")
    quant = BitNetQuantConfig(linear_class=kind)
    described = {**config().to_dict(), "quantization_config": quant.to_dict(), "architectures": ["BitNetForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(described, default=str))
    theirs = plain()
    replace_with_bitnet_linear(theirs, ["lm_head"], quant)
    theirs = theirs.to_empty(device="cpu") if any(t.is_meta for t in theirs.state_dict().values()) else theirs
    if kind == "autobitlinear":
        state = {n: unpack_weights(t, torch.float32) if t.dtype is torch.uint8 else t for n, t in state.items()}
    found = theirs.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]}, strict=False)
    assert not found.unexpected_keys
    theirs.model.rotary_emb = plain().model.rotary_emb
    return theirs.eval()


@pytest.mark.parametrize("kind", ["bitlinear", "autobitlinear"])
def test_it_answers_as_transformers_does(tmp_path: Path, kind: str) -> None:
    theirs = written(tmp_path, kind)
    model = twofour.read(tmp_path, plain(1))
    assert {held.widths.name for held in quantization.of(model).values()} == {"w1.58s8"}
    assert set(quantization.of(model)) == {f"model.layers.0.{name}" for name in HELD}
    with torch.no_grad():
        want, got = theirs(IDS).logits, model(IDS).logits
        torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-3)
        with quantization.in_whole_numbers(model):
            assert torch.equal(model(IDS).logits, got)
        if kind == "bitlinear":
            fast = twofour.compile(model, {"input_ids": IDS}, tokens=(5,), graph=False)
            torch.testing.assert_close(fast(IDS).logits, got, atol=1e-4, rtol=1e-4)
            said = {layer.name: layer.reason for layer in fast.plan.layers}
            assert all("w1.58s8" in said[name] for name in quantization.of(fast))


def test_a_file_of_ours_has_five_values_a_byte_and_loads_into_floats(tmp_path: Path) -> None:
    written(tmp_path)
    out = tmp_path / "ours.safetensors"
    found = importing.convert(tmp_path, out)
    assert found.format == "bitnet" and "of low bits" in repr(found) and not found.sparse
    packed = export.read(out).packed["model.layers.0.mlp.up_proj.weight"]
    assert packed.header.dtype == "ternary5" and packed.values.shape == (48, 7)
    again, read = twofour.load(out, plain(1), masked=True), twofour.read(tmp_path, plain(2))
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, read(IDS).logits)


def test_the_command_writes_it_and_check_knows_it(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    written(source)
    report = twofour.check(source)
    widths = {finding.name: finding.width for finding in report.layers if finding.width}
    assert report.ok and set(widths.values()) == {"w1.58s8"} and len(widths) == len(HELD)
    for options in (["--packed"], []):
        words = ["import", str(source), "--out", str(tmp_path / "out"), "--force", *options]
        out = CliRunner().invoke(app, words)
        assert out.exit_code == 0 and "7 of low bits" in out.output
        assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def change(edit: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


UP = "model.layers.0.mlp.up_proj"
SCALE = f"{UP}.weight_scale"
DAMAGES: dict[str, list[Callable[[Path], object]]] = {
    "code of 3": [change(lambda t: t[f"{UP}.weight"].fill_(0xFF))],
    "uint8": [change(lambda t: t.update({f"{UP}.weight": torch.zeros(4, dtype=torch.uint8)}))],
    "one real number": [
        change(lambda t, bad=bad: t.update({SCALE: bad})) for bad in (torch.ones(3), torch.ones(1, dtype=torch.int32))
    ],
    "positive finite scale": [
        change(lambda t, bad=bad: t.update({SCALE: torch.tensor([bad])}))
        for bad in (0.0, -1.0, float("nan"), float("inf"), 1e-38)
    ],
    "use_rms_norm": [change(lambda t: t.update({f"{UP}.rms_norm.weight": torch.ones(32)}))],
    "what its scales mean": [lambda folder: describe(folder, 3)],
    "model of the same architecture": [
        change(lambda t: t.update({f"{UP}.weight": torch.zeros(16, 32, dtype=torch.uint8)}))
    ],
}


def describe(folder: Path, kind: object, method: str = "bitnet") -> None:
    said = {"quantization_config": {"quant_method": method, "linear_class": kind}}
    (folder / "config.json").write_text(json.dumps(said))


@pytest.mark.parametrize("said", DAMAGES)
def test_malformed_ones_are_refused_by_name(tmp_path: Path, said: str) -> None:
    for damage in DAMAGES[said]:
        written(tmp_path)
        damage(tmp_path)
        model = plain()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(FormatError) as caught:
            twofour.read(tmp_path, model)
        assert said in str(caught.value), caught.value
        assert not quantization.of(model)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_bytes_beside_a_scale_are_of_bitnet_only_where_config_json_says_so(tmp_path: Path) -> None:
    written(tmp_path)
    for damage in (lambda: describe(tmp_path, "bitlinear", "modelopt"), (tmp_path / "config.json").unlink):
        damage()
        with pytest.raises(FormatError, match="no sparse weight"):
            importing.decode(tmp_path)
        with pytest.raises(FormatError, match="does not say what its scales mean"):
            importing.decode(tmp_path, format="bitnet")


def test_bytes_of_another_size_than_the_model_s_are_refused_by_check(tmp_path: Path) -> None:
    written(tmp_path)
    change(lambda t: t.update({f"{UP}.weight": torch.zeros(4, 32, dtype=torch.uint8)}))(tmp_path)
    with pytest.raises(FormatError, match=r"disagree\n.*is \(16, 32\).*\n.*\(48, 32\)"):
        twofour.check(tmp_path)
