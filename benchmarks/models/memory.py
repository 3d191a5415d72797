"""The models of the case `peak`: the eight of `fusion`, MiniLM with its weights, and a small vision transformer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from models.encoder import minilm
from models.fusion import FUSION, IMAGE, Field
from models.subject import Subject


def vit_small() -> Subject:
    """A vision transformer in the shape of ViT-S/16, 22 million parameters."""
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    config = ViTConfig(hidden_size=384, num_hidden_layers=12, num_attention_heads=6, intermediate_size=1536)
    model = Field(ViTModel(config), "last_hidden_state").eval().requires_grad_(False)
    return Subject("vit-small", "random weights", model, (torch.randn(1, 3, IMAGE, IMAGE),), 1, 197)


MEMORY: dict[str, Callable[[], Subject]] = {"minilm": lambda: minilm(1), "vit-small": vit_small, **FUSION}
