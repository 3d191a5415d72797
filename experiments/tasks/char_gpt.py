"""The next character of Tiny Shakespeare, by a small GPT that is trained here from three seeds, for few bits."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from tasks.base import Batches, Metric, Task
from tasks.characters import Shakespeare
from tasks.wikitext import Block

CONTEXT, WIDTH, LAYERS, BATCH, STEPS = 64, 128, 3, 16, 300
HELD_OUT = 512  # windows


class CharGpt(nn.Module):
    """Blocks of causal attention and perceptrons between an embedding of characters and places, and a head."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """int64 (batch, characters) -> scores (batch, characters, alphabet)."""
        x = self.token(text) + self.position.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class ShakespeareGpt(Task):
    """Bits per character."""

    name = "shakespeare"
    title = f"Tiny Shakespeare by characters, a GPT of {LAYERS} layers, width {WIDTH} (0.6 M parameters)"
    notes = (
        f"Each training has {STEPS} steps of {BATCH} windows of {CONTEXT} characters from anywhere in the first nine "
        "tenths (AdamW 2e-3, weight decay 0.1, one cycle, gradients clipped at 1), about a third of the text: short, "
        "so that the figures compare models of this table with each other, not with published ones. Lower is better."
    )
    pretrained = False
    epochs = 1
    low_bits = ("w1.58a8",)

    @cached_property
    def corpus(self) -> tuple[Tensor, Tensor, int]:
        """Numbers of the characters of both parts, and how many there are."""
        return _Corpus().parts

    @property
    def metric(self) -> Metric:
        """Bits per character."""
        return Metric("bits per character", "", False, HELD_OUT * CONTEXT, "characters", decimals=3)

    def network(self, seed: int) -> nn.Module:
        """Random weights."""
        torch.manual_seed(seed)
        return CharGpt(self.corpus[2])

    def loader(self, seed: int) -> Batches:
        """Windows that start anywhere."""
        return Batches(STEPS * BATCH, BATCH, self._batch)

    def _batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        text = self.corpus[0]
        begin = torch.randint(len(text) - CONTEXT, index.shape)
        windows = text[begin[:, None] + torch.arange(CONTEXT + 1)]
        return windows[:, :-1], windows[:, 1:]

    def loss(self, output: Any, target: Any) -> Tensor:
        """Cross entropy of each character."""
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """AdamW."""
        return AdamW(parameters, lr=2e-3, weight_decay=0.1, betas=(0.9, 0.95))

    @property
    def _test(self) -> Tensor:
        return self.corpus[1][: HELD_OUT * CONTEXT + 1].unfold(0, CONTEXT + 1, CONTEXT)

    def evaluate(self, model: nn.Module) -> float:
        """Bits per character of the held-out windows."""
        losses = [float(self.loss(model(part[:, :-1]), part[:, 1:])) for part in self._test.split(64)]
        return sum(losses) / len(losses) / math.log(2)

    def calibration(self) -> list[Any]:
        """256 windows."""
        return list(self.corpus[0][: 256 * CONTEXT].view(-1, CONTEXT).split(16))

    def example(self) -> Tensor:
        """Two windows."""
        return self._test[:2, :-1]


class _Corpus(Shakespeare):
    """The text alone."""

    name = title = ""
    cell = nn.GRU
