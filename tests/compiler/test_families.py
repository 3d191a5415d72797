"""Seven families of Hugging Face, tiny and random, through the whole pipeline: folder in, the same tokens out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import twofour
from tests.checkpoints.small import random
from twofour.checkpoints import Checkpoint
from twofour.cli import app
from twofour.compiler import CompiledLinear

transformers = pytest.importorskip("transformers", reason="needs the extra [text]")

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = {"vocab_size": 64, "max_position_embeddings": 32}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Family:
    """A model and how it is called.

    Attributes:
        config: Its config class.
        model: Its class.
        auto: The Auto class a user would load it with.
        sizes: Arguments of the config.
        inputs: Shapes of floating inputs and of tokens, by argument.
        generates: The argument that `generate` starts from, or "".
        sparse: How many weights can be made sparse.
    """

    config: str
    model: str
    auto: str
    sizes: dict[str, Any]
    inputs: dict[str, tuple[int, ...]]
    generates: str
    sparse: int

    def example(self) -> dict[str, Tensor]:
        torch.manual_seed(1)
        return {
            name: torch.randint(3, 60, shape) if name.endswith("ids") else torch.randn(shape)
            for name, shape in self.inputs.items()
        }


IDS = {"input_ids": (2, 8)}
FAMILIES = {
    "bert": Family(
        "BertConfig", "BertForMaskedLM", "AutoModelForMaskedLM", {**SIZES, **TEXT}, IDS, "", 7
    ),
    "vit": Family(
        "ViTConfig",
        "ViTForImageClassification",
        "AutoModelForImageClassification",
        {**SIZES, "image_size": 16, "patch_size": 4, "num_labels": 8},
        {"pixel_values": (2, 3, 16, 16)},
        "",
        7,
    ),
    "gpt2": Family(
        "GPT2Config",
        "GPT2LMHeadModel",
        "AutoModelForCausalLM",
        {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2, **TOKENS},
        IDS,
        "input_ids",
        4,
    ),
    "llama": Family(
        "LlamaConfig",
        "LlamaForCausalLM",
        "AutoModelForCausalLM",
        {**SIZES, **TEXT, **TOKENS, "num_key_value_heads": 1},
        IDS,
        "input_ids",
        8,
    ),
    "qwen": Family(
        "Qwen3Config",
        "Qwen3ForCausalLM",
        "AutoModelForCausalLM",
        {**SIZES, **TEXT, **TOKENS, "num_key_value_heads": 1, "head_dim": 16},
        IDS,
        "input_ids",
        8,
    ),
    "whisper": Family(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        "AutoModelForSpeechSeq2Seq",
        {
            **{f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in
               (("layers", 1), ("attention_heads", 2), ("ffn_dim", 64))},
            **{"vocab_size": 64, "num_mel_bins": 16, "d_model": 32, "decoder_start_token_id": 1},
            **{"max_source_positions": 20, "max_target_positions": 16, "suppress_tokens": None},
            **{"begin_suppress_tokens": None, **TOKENS},
        },
        {"input_features": (2, 16, 40), "decoder_input_ids": (2, 4)},
        "input_features",
        18,
    ),
    "t5": Family(
        "T5Config",
        "T5ForConditionalGeneration",
        "AutoModelForSeq2SeqLM",
        {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2,
         "decoder_start_token_id": 0},
        {**IDS, "decoder_input_ids": (2, 4)},
        "input_ids",
        16,
    ),
}  # fmt: skip


LONG = {"gpt2", "qwen", "t5"}
"""Families that `make test-long` runs: another one has the same layers, or the same two halves."""


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=[pytest.mark.long] * (n in LONG), id=n) for n in FAMILIES]
)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def hub(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a dense model, in several files."""
    family = FAMILIES[name]
    folder = tmp_path_factory.mktemp(name) / "hub"
    yield random(folder, family.config, family.model, "25KB", **family.sizes)


@pytest.fixture(scope="module")
def pruned(hub: Path) -> Path:
    """What `twofour prune` made of it."""
    out = hub.parent / "pruned"
    result = CliRunner().invoke(app, ["prune", str(hub), "--out", str(out)])
    assert result.exit_code == 0, result.output
    return out


def load(name: str, folder: Path) -> nn.Module:
    return getattr(transformers, FAMILIES[name].auto).from_pretrained(folder).eval()


@torch.inference_mode()
def logits(name: str, model: nn.Module) -> Tensor:
    return model(**FAMILIES[name].example()).logits


@torch.inference_mode()
def generated(name: str, model: Any) -> Tensor | None:
    family = FAMILIES[name]
    if not family.generates:
        return None
    start = family.example()[family.generates]
    return model.generate(start, max_new_tokens=4, min_new_tokens=4, do_sample=False)


def test_the_folder_is_what_python_makes_of_the_model(name: str, hub: Path, pruned: Path) -> None:
    assert len(Checkpoint.open(hub).files) > 1
    model = twofour.prune(load(name, hub), "2:4")
    written = load(name, pruned)
    assert len(twofour.masks.of(model)) == FAMILIES[name].sparse
    assert all(torch.equal(value, written.state_dict()[key]) for key, value in model.state_dict().items())
    assert torch.equal(logits(name, model), logits(name, written))


def test_check(name: str, pruned: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(pruned)])
    assert result.exit_code == 0, result.output
    assert f"{FAMILIES[name].sparse} of {FAMILIES[name].sparse} promised weights kept" in result.stdout
    assert twofour.check(load(name, pruned)).ok


def test_compile_save_load_generate(name: str, pruned: Path, tmp_path: Path, no_measuring: None) -> None:
    model = load(name, pruned)
    want, tokens = logits(name, model), generated(name, model)
    fast = twofour.compile(model, FAMILIES[name].example(), memory="small", tokens=[8])
    twofour.save(fast, tmp_path / "fast.safetensors")
    back = twofour.load(tmp_path / "fast.safetensors", load(name, pruned), memory="small", tokens=[8])
    for compiled in (fast, back):
        layers = [module for module in compiled.modules() if isinstance(module, CompiledLinear)]
        assert sum(layer.dispatch.sparse for layer in layers) >= FAMILIES[name].sparse - 2  # Whisper's two convolutions
        assert torch.allclose(logits(name, compiled), want, atol=1e-5 * want.abs().max().item() + 1e-6)
        again = generated(name, compiled)
        assert tokens is None or (again is not None and torch.equal(again, tokens) and tokens.shape[-1] >= 4)
