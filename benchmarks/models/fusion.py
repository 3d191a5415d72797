"""The eight models of the case `fusion`: batch 1, random weights, configurations of `transformers`.

Batch norms get the statistics of random images, so that activations neither vanish nor grow with the depth.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from models.encoder import SEQUENCE, bert_base
from models.resnet import resnet50, with_statistics
from models.subject import Subject

IMAGE = 224
NOTE = "random weights"
MASK = torch.ones(1, SEQUENCE, dtype=torch.long)


class Field(nn.Module):
    """A model of `transformers` as a function of tensors: one field of what it answers with.

    Args:
        model: The model.
        field: Name of the field.
        given: What the model calls its first argument, where it is given a mask beside it.
        options: Further arguments of such a call.
    """

    def __init__(self, model: nn.Module, field: str, given: str = "", **options: bool) -> None:
        super().__init__()
        self.model, self.field, self.given, self.options = model, field, given, options

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Call the model and return the field."""
        if mask is None:
            return getattr(self.model(x), self.field)
        return getattr(self.model(**{self.given: x}, attention_mask=mask, **self.options), self.field)


def gpt2() -> Subject:
    """GPT-2 small on 128 tokens, logits of each; the head is the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = Field(GPT2LMHeadModel(GPT2Config()), "logits", "input_ids", use_cache=False)
    return _subject("gpt2", model, (torch.randint(50_000, (1, SEQUENCE)), MASK), SEQUENCE)


def efficientnet_b0() -> Subject:
    """EfficientNet-B0; its pooling window, far larger than its map, is written as the mean that it is."""
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    torch.manual_seed(0)
    config = EfficientNetConfig(
        width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, image_size=IMAGE, num_labels=1000
    )
    model = EfficientNetForImageClassification(config)
    model.efficientnet.pooler = nn.AdaptiveAvgPool2d(1)
    return _subject("efficientnet-b0", with_statistics(Field(model, "logits")), _image())


def swin_tiny() -> Subject:
    """Swin-T."""
    from transformers import SwinConfig, SwinForImageClassification

    torch.manual_seed(0)
    config = SwinConfig(num_labels=1000)
    return _subject("swin-tiny", Field(SwinForImageClassification(config), "logits"), _image())


def convnext_tiny() -> Subject:
    """ConvNeXt-T."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    torch.manual_seed(0)
    config = ConvNextConfig(num_labels=1000, layer_scale_init_value=1.0)
    return _subject("convnext-tiny", Field(ConvNextForImageClassification(config), "logits"), _image())


def whisper_tiny() -> Subject:
    """The encoder of Whisper-tiny on 30 seconds of sound."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    torch.manual_seed(0)
    config = WhisperConfig(d_model=384, encoder_layers=4, encoder_attention_heads=6, encoder_ffn_dim=1536)
    model = Field(WhisperEncoder(config), "last_hidden_state")
    return _subject("whisper-tiny", model, (torch.randn(1, 80, 3000),), config.max_source_positions)


def llama_block() -> Subject:
    """One layer in the shape of Llama-3.2-1B on 128 tokens, and its final norm."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=2048, intermediate_size=8192, num_hidden_layers=1,
        num_attention_heads=32, num_key_value_heads=8,
    )  # fmt: skip
    model = Field(LlamaModel(config), "last_hidden_state", "inputs_embeds", use_cache=False)
    return _subject("llama-block", model, (torch.randn(1, SEQUENCE, 2048), MASK), SEQUENCE)


def _subject(name: str, model: nn.Module, inputs: tuple[Tensor, ...], tokens: int = 1) -> Subject:
    return Subject(name, NOTE, model.eval().requires_grad_(False), inputs, 1, tokens)


def _image() -> tuple[Tensor, ...]:
    return (torch.randn(1, 3, IMAGE, IMAGE),)


FUSION: dict[str, Callable[[], Subject]] = {
    "bert-base": lambda: bert_base(1),
    "gpt2": gpt2,
    "resnet50": lambda: resnet50(1),
    "efficientnet-b0": efficientnet_b0,
    "swin-tiny": swin_tiny,
    "convnext-tiny": convnext_tiny,
    "whisper-tiny": whisper_tiny,
    "llama-block": llama_block,
}
