"""WikiText-2 at word level with a small GPT that is trained here, from three seeds."""

from __future__ import annotations

import collections
import gzip
import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from tasks.base import Batches, Metric, Task
from twofour.demo.data import data_folder

VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS = 8192, 64, 128, 4, 4


class Block(nn.Module):
    """Causal attention and a perceptron of four times the width, each behind a LayerNorm (Radford et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) -> the same."""
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Four blocks; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 (batch, tokens) -> scores (batch, tokens, vocabulary)."""
        x = self.drop(self.token(tokens) + self.position.weight[: tokens.shape[1]])
        return F.linear(self.norm(self.blocks(x)), self.token.weight)


class WikiText(Task):
    """Perplexity per word, words beyond the 8,191 most frequent as one."""

    name = "wikitext"
    title = "WikiText-2, a GPT of 4 layers, width 128 (0.8 M parameters beside the embedding)"
    notes = (
        "The first 200,000 training tokens, the 8,191 most frequent words and `<unk>`, context 64; each training "
        "has {epochs} epochs (AdamW 2e-3, weight decay 0.1, batch 32, one cycle). Perplexity on the test split; "
        "lower is better. It compares models of this table with each other, not with published ones: the "
        "vocabulary is cut."
    )
    pretrained = False
    epochs = 2
    tokens: int | None = 200_000

    @property
    def metric(self) -> Metric:
        """Perplexity."""
        return Metric("perplexity", "", False, self.test.numel(), "words")

    @cached_property
    def words(self) -> dict[str, int]:
        """Index of each word of the vocabulary; 0 stands for all others."""
        counts = collections.Counter(_words("train"))
        counts.pop("<unk>", None)
        frequent = sorted(counts, key=lambda word: (-counts[word], word))[: VOCABULARY - 1]
        return {word: index for index, word in enumerate(frequent, start=1)}

    @cached_property
    def train(self) -> Tensor:
        """int64 (sequences, context + 1)."""
        return self._sequences("train", self.tokens)

    @cached_property
    def test(self) -> Tensor:
        """The same of the whole test split."""
        return self._sequences("test", None)

    def _sequences(self, part: str, limit: int | None) -> Tensor:
        tokens = torch.tensor([self.words.get(word, 0) for word in _words(part)[:limit]])
        count = (len(tokens) - 1) // CONTEXT
        return tokens[: count * CONTEXT + 1].unfold(0, CONTEXT + 1, CONTEXT)

    def network(self, seed: int) -> nn.Module:
        """Random weights."""
        torch.manual_seed(seed)
        return Gpt()

    def loader(self, seed: int) -> Batches:
        """Batches of 32 sequences."""
        return Batches(len(self.train), 32, lambda index: (self.train[index, :-1], self.train[index, 1:]))

    def loss(self, output: Any, target: Any) -> Tensor:
        """Cross entropy per word."""
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """AdamW."""
        return AdamW(parameters, lr=2e-3, weight_decay=0.1, betas=(0.9, 0.95))

    def evaluate(self, model: nn.Module) -> float:
        """Perplexity on the test split."""
        total = sum(
            float(F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
            for part in self.test.split(64)
        )
        return math.exp(total / self.test[:, 1:].numel())

    def calibration(self) -> list[Any]:
        """256 sequences."""
        return list(self.train[:256, :-1].split(16))

    def example(self) -> Tensor:
        """Two sequences."""
        return self.test[:2, :-1]


def _words(part: str) -> list[str]:
    with gzip.open(data_folder() / "wikitext-2" / f"wiki.{part}.tokens.gz", "rt", encoding="utf-8") as file:
        return [word for line in file for word in (*line.split(), "<eos>")]


class GradientsWikiText(WikiText):
    """The same training for pruned gradients of Linear layers."""

    name = "gradients-wikitext"
    title = "Pruned gradients (SDGP): WikiText-2, the GPT of 4 layers, width 128, from scratch"
