"""Networks whose channels are cut, small and of every kind that is asked for, for the tests of this folder."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twofour.demo.resnet import ResNet20


def unit(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU6())


class Inverted(nn.Module):
    """A block of MobileNetV2."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 3 * inputs
        self.same = stride == 1 and inputs == outputs
        linear = nn.Sequential(nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.parts = nn.Sequential(unit(inputs, wide, 1), unit(wide, wide, 3, stride, wide), linear)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.parts(x) if self.same else self.parts(x)


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(unit(3, 8), Inverted(8, 8, 1), Inverted(8, 12, 2), Inverted(12, 12, 1))
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


class DenseNet(nn.Module):
    """Every layer reads what all before it made, and a grouped convolution at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(8 + 4 * index), nn.ReLU(), nn.Conv2d(8 + 4 * index, 4, 3, padding=1))
            for index in range(3)
        )
        self.wide, self.grouped = nn.Conv2d(20, 24, 1), nn.Conv2d(24, 12, 3, padding=1, groups=4)
        self.norm, self.head = nn.GroupNorm(4, 12), nn.Linear(12 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        x = self.norm(self.grouped(self.wide(x).relu()))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 2), 1))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner, self.bottom = unit(3, 8), unit(8, 16, stride=2), unit(16, 16)
        self.up, self.last = nn.ConvTranspose2d(16, 8, 2, 2), unit(16, 8)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.down(x)
        low = self.bottom(self.inner(high))
        return self.head(self.last(torch.cat([high, self.up(low)], 1)))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(30, 12), nn.LSTM(12, 10, 2, batch_first=True, bidirectional=True)
        self.gru, self.head = nn.GRU(20, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.gru(self.lstm(self.embed(ids))[0])[0])


class Squeeze(nn.Module):
    """Squeeze and excitation, a gated MLP, and numbers of its own in a reshape."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.squeeze, self.excite = unit(3, 12), nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1)
        self.gate, self.up, self.down = nn.Linear(12, 16), nn.Linear(12, 16), nn.Linear(16, 24)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = x * self.excite(self.squeeze(x.mean((2, 3), keepdim=True)).relu()).sigmoid()
        x = x.mean((2, 3))
        x = self.down(F.silu(self.gate(x)) * self.up(x))
        return self.head(x.view(-1, 4, 6).flip(1).reshape(-1, 24))


class Wide(nn.Module):
    """One number for the widths of two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 64
        self.up = nn.ModuleList(nn.Linear(16, 64) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(64, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        parts = [down(up(x).relu().view(-1, self.width)) for up, down in zip(self.up, self.down, strict=True)]
        return parts[0] + parts[1]


IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
IDS = torch.arange(2, 18).view(2, 8)

NETWORKS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "resnet20": (ResNet20, torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))),
    "mobilenet": (MobileNet, IMAGE),
    "densenet": (DenseNet, IMAGE),
    "unet": (UNet, IMAGE),
    "tagger": (Tagger, IDS),
    "squeeze": (Squeeze, IMAGE),
}


def _transformers() -> Any:
    import transformers

    return transformers


def _vit() -> nn.Module:
    t = _transformers()
    return t.ViTForImageClassification(t.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=8, patch_size=4
    ))  # fmt: skip


def _bert() -> nn.Module:
    t = _transformers()
    return t.BertForSequenceClassification(t.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=64,
        max_position_embeddings=32,
    ))  # fmt: skip


def _gpt2() -> nn.Module:
    t = _transformers()
    return t.GPT2LMHeadModel(t.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32, bos_token_id=1, eos_token_id=1
    ))  # fmt: skip


def _llama() -> nn.Module:
    t = _transformers()
    return t.LlamaForCausalLM(t.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=64, max_position_embeddings=64,
    ))  # fmt: skip


def _t5() -> nn.Module:
    t = _transformers()
    return t.T5ForConditionalGeneration(t.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=64, decoder_start_token_id=0
    ))  # fmt: skip


TRANSFORMERS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "vit": (_vit, IMAGE),
    "bert": (_bert, {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}),
    "gpt2": (_gpt2, {"input_ids": IDS}),
    "llama": (_llama, {"input_ids": IDS}),
    "t5": (_t5, {"input_ids": IDS, "decoder_input_ids": IDS}),
}


def made(name: str) -> tuple[nn.Module, Any]:
    """Build a network with statistics and scales that matter, and an example of its inputs."""
    torch.manual_seed(0)
    make, example = {**NETWORKS, **TRANSFORMERS}[name]
    model = make().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
        else:
            nn.init.uniform_(parameter, 0.5, 1.5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.bias)
            nn.init.normal_(module.running_mean)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.5, 1.5)  # type: ignore[arg-type]
    return model, example
