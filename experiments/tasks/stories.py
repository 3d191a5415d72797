"""A published 231k-parameter Llama on text of its own: its training stories are not published, so it tells them."""

from __future__ import annotations

import json
import math
import struct
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from tasks.base import Batches, Metric, Task
from twofour.demo.data import data_folder

CHECKPOINT = "pretrained/llama2c_aidreams260K.safetensors"
TOKENIZER = "pretrained/aidreams260K_tok512.bin"
BOS, LENGTH = 1, 128
TRAIN, TEST = 1024, 256


class Logits(nn.Module):
    """A Hugging Face causal model that answers with its logits alone."""

    def __init__(self, causal: nn.Module) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 (batch, tokens) -> scores (batch, tokens, vocabulary)."""
        return self.causal(input_ids=tokens, use_cache=False).logits


class Stories(Task):
    """Perplexity on stories sampled from the dense model at temperature 1; the dense model's own is the floor."""

    name = "stories"
    title = "A 231k-parameter Llama (published weights) on its own stories"
    notes = (
        "Train, test and calibration text are sampled from the dense model (temperature 1, 128 tokens each), so "
        "its own perplexity is the lowest there can be, and the distance to it says how far a model has moved. "
        "Width 172 is no multiple of 16, hence eligibility 'any'. A repetition is {epochs} epochs on 1,024 "
        "stories (AdamW 5e-4, batch 16)."
    )
    pretrained = True
    epochs = 4
    eligibility = "any"

    @property
    def metric(self) -> Metric:
        """Perplexity."""
        return Metric("perplexity", "", False, TEST * (LENGTH - 1), "tokens")

    @cached_property
    def stories(self) -> Tensor:
        """int64 (TRAIN + TEST, LENGTH), each from the start of a story; test stories come first."""
        model = self.network(0).eval()
        generator = torch.Generator().manual_seed(0)
        tokens = torch.full((TRAIN + TEST, 1), BOS)
        cache: Any = None
        with torch.inference_mode():
            for _ in range(LENGTH - 1):
                answer = model.causal(input_ids=tokens[:, -1:], past_key_values=cache, use_cache=True)  # pyright: ignore
                cache = answer.past_key_values
                chances = answer.logits[:, -1].double().softmax(-1)
                tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], 1)
        return tokens.clone()

    def network(self, seed: int) -> nn.Module:
        """The published weights in transformers' Llama, whose rotary pairs are the halves of a head."""
        from transformers import LlamaConfig, LlamaForCausalLM

        with safe_open(data_folder() / CHECKPOINT, "pt") as file:
            sizes = json.loads(file.metadata()["config"])
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        config = LlamaConfig(
            vocab_size=sizes["vocab_size"],
            hidden_size=sizes["dim"],
            intermediate_size=sizes["hidden_dim"],
            num_hidden_layers=sizes["n_layers"],
            num_attention_heads=sizes["n_heads"],
            num_key_value_heads=sizes["n_kv_heads"],
            max_position_embeddings=sizes["max_seq_len"],
            rms_norm_eps=sizes["norm_eps"],
            rope_theta=10000.0,
            tie_word_embeddings=True,
        )
        model = LlamaForCausalLM(config)
        names = {name: _hugging_face(name) for name in state}
        renamed = {names[name]: _halves(name, tensor, sizes["n_heads"]) for name, tensor in state.items()}
        renamed["lm_head.weight"] = renamed["model.embed_tokens.weight"]
        model.load_state_dict(renamed)
        return Logits(model)

    def loader(self, seed: int) -> Batches:
        """Batches of 16 stories."""
        train = self.stories[TEST:]
        return Batches(len(train), 16, lambda index: (train[index, :-1], train[index, 1:]))

    def loss(self, output: Any, target: Any) -> Tensor:
        """Cross entropy per token."""
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """AdamW."""
        return AdamW(parameters, lr=5e-4, weight_decay=0.01)

    def evaluate(self, model: nn.Module) -> float:
        """Perplexity on the test stories."""
        test = self.stories[:TEST]
        return math.exp(float(self.loss(model(test[:, :-1]), test[:, 1:])))

    def calibration(self) -> list[Any]:
        """128 training stories."""
        return list(self.stories[TEST : TEST + 128, :-1].split(16))

    def example(self) -> Tensor:
        """Two stories."""
        return self.stories[:2, :-1]


def save(folder: Path) -> None:
    """Write the model and its tokenizer as a Hugging Face folder."""
    Stories().network(0).causal.save_pretrained(folder)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    tokenizer().save_pretrained(folder)


def tokenizer() -> Any:
    """The checkpoint's tokenizer: byte pairs, merged in the order of the pieces; bytes for what is no piece."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *_pieces()[3:]]
    order = {piece: index for index, piece in enumerate(pieces)}
    merges = [
        (piece[:at], piece[at:])
        for piece in pieces[259:]
        for at in range(1, len(piece))
        if piece[:at] in order and piece[at:] in order
    ]
    plain = Tokenizer(models.BPE(order, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    plain.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    plain.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    plain.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    plain.add_special_tokens([AddedToken(name, special=True) for name in pieces[:3]])
    return PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _pieces() -> list[str]:
    """The pieces of a llama2.c tokenizer: int32 longest, then for each piece float32 score, int32 bytes, the bytes."""
    content = (data_folder() / TOKENIZER).read_bytes()
    pieces, at = [], 4
    while at < len(content):
        _, size = struct.unpack_from("<fi", content, at)
        pieces.append(content[at + 8 : at + 8 + size].decode().replace(" ", "▁"))
        at += 8 + size
    return pieces


def _hugging_face(name: str) -> str:
    parts = {
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "tok_embeddings": "embed_tokens",
    }
    for ours, theirs in parts.items():
        name = name.replace(f"{ours}.weight", f"{theirs}.weight")
    return f"model.{name}"


def _halves(name: str, tensor: Tensor, heads: int) -> Tensor:
    """Queries and keys: from interleaved rotary pairs to the first halves and the second halves of each head."""
    if not name.endswith(("wq.weight", "wk.weight")):
        return tensor
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()
