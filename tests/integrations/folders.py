"""Folders of Hugging Face as users have them, small and without a network: weights, configuration, tokenizer."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import BertConfig, GPT2Config, T5Config, ViTConfig

import twofour

WORDS = [f"w{number}" for number in range(123)]
SENTENCES = ["w1", "w2 w3 w4", "w5 w6", " ".join(WORDS[:30]), "w7 w8 w9 w10 w11 w12 w13", "w14 w15"]
"""Of 3 to 32 tokens."""

BERT = BertConfig(
    vocab_size=128,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    max_position_embeddings=80,
    num_labels=1,
)
GPT2 = GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=2, eos_token_id=3)
T5 = T5Config(vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4)
VIT = ViTConfig(
    hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128, image_size=32, patch_size=8
)


def model_of(kind: str) -> nn.Module:
    """Return a model of a class of transformers with random weights."""
    torch.manual_seed(0)
    config = {"Bert": BERT, "GPT2": GPT2, "T5": T5, "ViT": VIT}[
        next(p for p in ("Bert", "GPT2", "T5", "ViT") if p in kind)
    ]
    return getattr(transformers, kind)(copy.deepcopy(config)).eval()


def folder_of(model: nn.Module, folder: Path) -> Path:
    """Write a model with a tokenizer, as a sentence-transformers folder too; a masked one with its zeros."""
    model.save_pretrained(folder)  # pyright: ignore[reportCallIssue]
    with_tokenizer(folder)
    return folder


def with_tokenizer(folder: Path) -> None:
    """Write the vocabulary of BERT's tokenizer."""
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")


def packed_folder(model: nn.Module, folder: Path) -> Path:
    """Write a masked or compiled model packed, beside its configuration."""
    folder.mkdir()
    twofour.save(model, folder)
    model.config.architectures = [type(model).__name__]  # pyright: ignore
    model.config.save_pretrained(folder)  # pyright: ignore
    with_tokenizer(folder)
    return folder
