"""The models of the case `sweep`: thirteen shapes in use, from configurations of `transformers`, random weights.

Text encoders answer with their last hidden states, decoders with the logits of a prompt, all without padding; vision
models with logits of 224 x 224 images. Nothing but time is measured on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from models.fusion import NOTE, Field, efficientnet_b0
from models.resnet import with_statistics
from models.subject import Subject

IMAGE = 224
WORDS = 8192
"""Words of a vocabulary: a table is no part of an encoder's time, and a decoder's head is one product more."""
POSITIONS = 512


def _bert(width: int, layers: int) -> nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=WORDS, hidden_size=width, num_hidden_layers=layers, num_attention_heads=max(2, width // 64),
        intermediate_size=4 * width,
    )  # fmt: skip
    return BertModel(config, add_pooling_layer=False)


def _electra() -> nn.Module:
    from transformers import ElectraConfig, ElectraModel

    return ElectraModel(ElectraConfig(vocab_size=WORDS))


def _distilbert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertModel

    return DistilBertModel(DistilBertConfig(vocab_size=WORDS))


def _mpnet() -> nn.Module:
    from transformers import MPNetConfig, MPNetModel

    return MPNetModel(MPNetConfig(vocab_size=WORDS, max_position_embeddings=POSITIONS + 2), add_pooling_layer=False)


def _modernbert() -> nn.Module:
    from transformers import ModernBertConfig, ModernBertModel

    special = dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id"), 0)
    return ModernBertModel(ModernBertConfig(vocab_size=WORDS, eos_token_id=1, sep_token_id=1, **special))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, bos_token_id=0, eos_token_id=0))


def _smollm() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _vit(width: int, heads: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width, num_labels=1000)
    return ViTForImageClassification(config)


def _mobilenet_v2() -> nn.Module:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    return MobileNetV2ForImageClassification(MobileNetV2Config(tf_padding=False, num_labels=1000))


ENCODERS: dict[str, Callable[[], nn.Module]] = {
    "bert-tiny-4x128": lambda: _bert(128, 4),
    "electra-small-12x256": _electra,
    "bge-small-12x384": lambda: _bert(384, 12),
    "distilbert-6x768": _distilbert,
    "mpnet-12x768": _mpnet,
    "modernbert-22x768": _modernbert,
    "bert-large-24x1024": lambda: _bert(1024, 24),
}
DECODERS: dict[str, Callable[[], nn.Module]] = {"gpt2-12x768": _gpt2, "smollm-30x576": _smollm}
IMAGES: dict[str, Callable[[], nn.Module]] = {
    "deit-small-12x384": lambda: _vit(384, 6),
    "vit-base-12x768": lambda: _vit(768, 12),
    "mobilenet-v2": _mobilenet_v2,
    "efficientnet-b0": lambda: efficientnet_b0().model,
}
SWEEP = (*ENCODERS, *DECODERS, *IMAGES)


def subject(name: str, batch: int, tokens: int) -> Subject:
    """Build a model with one call's inputs.

    Args:
        name: One of `SWEEP`.
        batch: Sequences or images.
        tokens: Tokens of a sequence; not looked at for images.
    """
    torch.manual_seed(0)
    if name in IMAGES:
        image = torch.randn(batch, 3, IMAGE, IMAGE)
        found = IMAGES[name]()
        return _subject(name, with_statistics(found if isinstance(found, Field) else Field(found, "logits")), (image,))
    field = "last_hidden_state" if name in ENCODERS else "logits"
    model = Field(
        (ENCODERS | DECODERS)[name](), field, "input_ids", **({"use_cache": False} if name in DECODERS else {})
    )
    return _subject(
        name, model, (torch.randint(2, WORDS, (batch, tokens)), torch.ones(batch, tokens, dtype=torch.long))
    )


def _subject(name: str, model: nn.Module, inputs: tuple[Any, ...]) -> Subject:
    rows = inputs[0].numel() if inputs[0].dim() == 2 else len(inputs[0])
    return Subject(name, NOTE, model.eval().requires_grad_(False), inputs, len(inputs[0]), rows)
