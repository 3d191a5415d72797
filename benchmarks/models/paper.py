"""Models of DNNFusion's evaluation that can be built here, with the paper's layer counts; random weights.

Language models compute attention as matrix products and softmax, not by torch's fused call, and read 128 tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from models.encoder import SEQUENCE
from models.fusion import IMAGE, MASK, Field, efficientnet_b0
from models.resnet import with_statistics
from models.subject import Subject


@dataclass(frozen=True)
class Published:
    """One model of the paper.

    Attributes:
        before: Layers before fusion (Niu et al., PLDI 2021, section 5).
        after: Layers after it.
        build: Makes the model here.
    """

    before: int
    after: int
    build: Callable[[], Subject]


def vgg16() -> Subject:
    """VGG-16 (configuration D) without batch norms."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    inputs = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
    return _image("vgg16", nn.Sequential(*layers, nn.Flatten(), *head))


def unet() -> Subject:
    """U-Net as Ronneberger et al. drew it, with padding and batch norms, width 64, five levels."""
    torch.manual_seed(0)
    return _image("unet", with_statistics(UNet((64, 128, 256, 512, 1024))))


class UNet(nn.Module):
    """Down by pooling, up by transposed convolutions, each level joined with the one across.

    Args:
        widths: Channels of each level.
    """

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.down = nn.ModuleList(_twice(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in itertools.pairwise(widths))
        self.join = nn.ModuleList(_twice(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 3, h, w) to (batch, 2, h, w)."""
        across = []
        for index, level in enumerate(self.down):
            x = level(nn.functional.max_pool2d(x, 2) if index else x)
            across.append(x)
        for index in reversed(range(len(self.up))):
            x = self.join[index](torch.cat([across[index], self.up[index](x)], 1))
        return self.head(x)


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        layers += [nn.Conv2d(width, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def tinybert() -> Subject:
    """TinyBERT with four layers of width 312."""
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=312, num_hidden_layers=4, intermediate_size=1200, **EAGER)
    return _text("tinybert", BertModel, config)


def distilbert() -> Subject:
    """DistilBERT."""
    from transformers import DistilBertConfig, DistilBertModel

    return _text("distilbert", DistilBertModel, DistilBertConfig(**EAGER))


def albert() -> Subject:
    """ALBERT-base: twelve layers that share their weights."""
    from transformers import AlbertConfig, AlbertModel

    config = AlbertConfig(hidden_size=768, num_attention_heads=12, intermediate_size=3072, **EAGER)
    return _text("albert", AlbertModel, config)


def bert_base() -> Subject:
    """BERT-base."""
    from transformers import BertConfig, BertModel

    return _text("bert-base", BertModel, BertConfig(**EAGER))


def mobilebert() -> Subject:
    """MobileBERT, 24 layers of four feed-forward networks each."""
    from transformers import MobileBertConfig, MobileBertModel

    return _text("mobilebert", MobileBertModel, MobileBertConfig(**EAGER))


def gpt2() -> Subject:
    """GPT-2 small without its head."""
    from transformers import GPT2Config, GPT2Model

    return _text("gpt2", GPT2Model, GPT2Config(**EAGER))


EAGER: dict[str, Any] = {"attn_implementation": "eager"}


def _text(name: str, kind: Callable[[Any], nn.Module], config: Any) -> Subject:
    torch.manual_seed(0)
    config.use_cache = False
    model = _Text(kind(config)).eval().requires_grad_(False)
    return Subject(name, "random weights", model, (torch.randint(1000, (1, SEQUENCE)), MASK), 1, SEQUENCE)


class _Text(Field):
    """A language model as a function of token ids and mask."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, "last_hidden_state", "input_ids")

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return getattr(self.model(x, attention_mask=mask), self.field)


def _image(name: str, model: nn.Module) -> Subject:
    images = (torch.randn(1, 3, IMAGE, IMAGE),)
    return Subject(name, "random weights", model.eval().requires_grad_(False), images, 1, 1)


PAPER = {
    "efficientnet-b0": Published(309, 97, efficientnet_b0),
    "vgg16": Published(51, 17, vgg16),
    "unet": Published(292, 82, unet),
    "tinybert": Published(366, 74, tinybert),
    "distilbert": Published(457, 109, distilbert),
    "albert": Published(936, 225, albert),
    "bert-base": Published(976, 216, bert_base),
    "mobilebert": Published(2387, 510, mobilebert),
    "gpt2": Published(2533, 254, gpt2),
}
"""Layers before and after fusion as the paper's evaluation has them."""
