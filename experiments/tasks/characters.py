"""The next character of a text, by one recurrent layer that is trained here from three seeds."""

from __future__ import annotations

import gzip
import math
from collections import Counter
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer

from tasks.base import Batches, Metric
from tasks.recurrent import Recurrent
from twofour.demo.data import data_folder

TRAIN, HELD_OUT = 1_000_000, 100_000  # characters
EPOCH = 200_000  # characters: the schedules count epochs, and a whole text takes too long for one
KNOWN = 96  # the most frequent characters; the others are one
EMBEDDING, CONTEXT, BATCH, STREAMS = 64, 32, 32, 50


class CharacterNet(nn.Module):
    """An embedding, one recurrent layer, a head."""

    def __init__(self, cell: type[nn.RNNBase], characters: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, EMBEDDING)
        self.recurrent = cell(EMBEDDING, width, batch_first=True)  # pyright: ignore[reportCallIssue]
        self.head = nn.Linear(width, characters)

    def forward(self, text: Tensor) -> Tensor:
        """int64 (batch, characters) -> scores (batch, characters, alphabet)."""
        return self.head(self.recurrent(self.embedding(text))[0])


class Characters(Recurrent):
    """A corpus and a cell."""

    cell: type[nn.RNNBase]
    width, larger, epochs = 128, 256, 6
    notes = (
        f"One layer on an embedding of {EMBEDDING}. {{epochs}} epochs, each {EPOCH:,} characters in windows of "
        f"{CONTEXT} from anywhere in the first {TRAIN:,}; batch {BATCH}, Adam 4e-3, one cycle, gradients clipped at 1. "
        f"Held-out text is read in {STREAMS} long streams."
    )

    @property
    def metric(self) -> Metric:
        """Bits per character."""
        return Metric("bits per character", "", False, HELD_OUT, "characters", decimals=3)

    def text(self) -> tuple[str, str]:
        """The training text and the held-out text, whole."""
        raise NotImplementedError

    @cached_property
    def parts(self) -> tuple[Tensor, Tensor, int]:
        """Numbers of the training and of the held-out characters, and how many numbers there are."""
        train, held = (text[:most] for text, most in zip(self.text(), (TRAIN, HELD_OUT), strict=True))
        known = [character for character, _ in Counter(train).most_common(KNOWN)]
        number = {character: place for place, character in enumerate(known)}
        found = [torch.tensor([number.get(character, len(known)) for character in text]) for text in (train, held)]
        return found[0], found[1], len(known) + 1

    def network(self, seed: int, width: int | None = None) -> nn.Module:
        """Random weights."""
        torch.manual_seed(seed)
        return CharacterNet(self.cell, self.parts[2], width or self.width)

    def loader(self, seed: int) -> Batches:
        """Windows that start anywhere."""
        return Batches(EPOCH // CONTEXT, BATCH, self._batch)

    def _batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        text = self.parts[0]
        begin = torch.randint(len(text) - CONTEXT, index.shape)
        windows = text[begin[:, None] + torch.arange(CONTEXT + 1)]
        return windows[:, :-1], windows[:, 1:]

    def loss(self, output: Any, target: Any) -> Tensor:
        """Cross entropy of each character."""
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Adam."""
        return Adam(parameters, lr=4e-3, fused=True)

    def evaluate(self, model: nn.Module) -> float:
        """Bits per character of the held-out text."""
        length = (len(self.parts[1]) - 1) // STREAMS
        text = self.parts[1][: STREAMS * length + 1]
        inputs, targets = text[:-1].view(STREAMS, length), text[1:].view(STREAMS, length)
        return float(self.loss(model(inputs), targets)) / math.log(2)

    def calibration(self) -> list[Any]:
        """Sixteen windows."""
        return [self.parts[0][: 16 * CONTEXT].view(16, CONTEXT)]

    def example(self) -> Tensor:
        """Two windows."""
        return self.parts[1][: 2 * CONTEXT].view(2, CONTEXT)


class Shakespeare(Characters):
    """Tiny Shakespeare; its last tenth is held out."""

    def text(self) -> tuple[str, str]:
        """Nine tenths, one tenth."""
        whole = _read("tinyshakespeare/input.txt.gz")
        cut = len(whole) * 9 // 10
        return whole[:cut], whole[cut:]


class WikiText(Characters):
    """WikiText-2 character by character."""

    def text(self) -> tuple[str, str]:
        """The training and the test split."""
        train, test = (_read(f"wikitext-2/wiki.{part}.tokens.gz") for part in ("train", "test"))
        return train, test


class ShakespeareGru(Shakespeare):
    """A GRU."""

    name, title, cell = "blocks-shakespeare-gru", "Tiny Shakespeare, GRU of 128", nn.GRU


class ShakespeareLstm(Shakespeare):
    """An LSTM."""

    name, title, cell = "blocks-shakespeare-lstm", "Tiny Shakespeare, LSTM of 128", nn.LSTM


class WikiTextGru(WikiText):
    """A GRU."""

    name, title, cell = "blocks-wikitext-gru", "WikiText-2 by characters, GRU of 128", nn.GRU


class WikiTextLstm(WikiText):
    """An LSTM."""

    name, title, cell = "blocks-wikitext-lstm", "WikiText-2 by characters, LSTM of 128", nn.LSTM


def _read(path: str) -> str:
    with gzip.open(data_folder() / path, "rt", encoding="utf-8", newline="") as file:
        return file.read()
