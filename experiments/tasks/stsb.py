"""MiniLM on the STS Benchmark: how well the cosine of two sentences' embeddings ranks their likeness."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from tasks.base import Batches, Metric, Task
from tasks.minilm import embedder, encode, rows, sorted_batches

SCORE, FIRST, SECOND = 4, 5, 6


class Stsb(Task):
    """Pairs of sentences scored 0 to 5; both sentences of a batch go through the encoder together."""

    name = "stsb"
    title = "STS Benchmark, MiniLM-L6 (published weights)"
    notes = (
        "Spearman's rank correlation times 100 on the test split, cosine of mean-pooled embeddings. A repetition "
        "is one epoch on the 5,749 training pairs (AdamW 5e-5, batch 32, squared error of the cosine against score "
        "/ 5, one cycle); the control is the dense model fine-tuned the same. 512 training sentences "
        "calibrate the criteria; of rows that name another number each seed draws its own."
    )
    pretrained = True
    epochs = 1
    draws = ("128", "512", "default")
    patterns = ("block:16x16@0.5", "block:16x16@0.8")

    @property
    def metric(self) -> Metric:
        """Spearman's rank correlation, times 100."""
        return Metric("Spearman", "", True, len(self.test[1]), "sentence pairs")

    @cached_property
    def train(self) -> tuple[list[tuple[str, str]], Tensor]:
        """Pairs of sentences and their scores / 5."""
        return _pairs("train")

    @cached_property
    def test(self) -> tuple[list[tuple[str, str]], Tensor]:
        """The same of the test split."""
        return _pairs("test")

    def network(self, seed: int) -> nn.Module:
        """The published weights."""
        return embedder()

    def loader(self, seed: int) -> Batches:
        """Batches of 32 pairs of like length: 64 sentences, first all the first ones."""
        lengths = torch.tensor([max(len(first), len(second)) for first, second in self.train[0]])
        return Batches(len(lengths), 32, self._batch, lengths)

    def _batch(self, index: Tensor) -> tuple[Any, Tensor]:
        pairs = [self.train[0][number] for number in index.tolist()]
        return encode([first for first, _ in pairs] + [second for _, second in pairs]), self.train[1][index]

    def loss(self, output: Any, target: Any) -> Tensor:
        """Squared error of the cosine."""
        first, second = output.chunk(2)
        return F.mse_loss((first * second).sum(-1), target)

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """AdamW."""
        return AdamW(parameters, lr=5e-5, weight_decay=0.01)

    def evaluate(self, model: nn.Module) -> float:
        """100 times Spearman's correlation on the test split."""
        sentences = [sentence for pair in self.test[0] for sentence in pair]
        found = torch.empty(len(sentences), 384)
        for places, encoded in sorted_batches(sentences, 64):
            found[places] = model(*encoded)
        return 100 * spearman((found[0::2] * found[1::2]).sum(-1), self.test[1])

    def calibration(self) -> list[Any]:
        """512 sentences of the training split: some 8,000 tokens."""
        sentences = [sentence for pair in self.train[0][::22] for sentence in pair][:512]
        return [encoded for _, encoded in sorted_batches(sentences, 16)]

    def drawn(self, seed: int) -> list[Any]:
        """All training sentences in an order drawn by the seed, in batches of 16, by name: padding does not count."""
        sentences = [sentence for pair in self.train[0] for sentence in pair]
        order = torch.randperm(len(sentences), generator=torch.Generator().manual_seed(seed)).split(16)
        names = "input_ids", "attention_mask"
        parts = (encode([sentences[place] for place in part.tolist()]) for part in order)
        return [dict(zip(names, part, strict=True)) for part in parts]

    def example(self) -> Any:
        """Two sentences."""
        return encode(["A plane is taking off.", "An air plane is taking off."])


class ShrinkStsb(Stsb):
    """The same with a model that loses half of the parameters of its layers."""

    name = "shrink-stsb"
    title = "STS Benchmark, MiniLM-L6 with half of its encoder's parameters"
    notes = (
        "Spearman's rank correlation times 100 on the test split. Parameters: those of the encoder's layers. Dense is "
        "the published model trained {epochs} epoch on 5,749 training pairs (AdamW 5e-5, batch 32, squared error of "
        "the cosine against score / 5, one cycle). Cut is the published model cut once on 512 training sentences, all "
        "layers alike, so that `from_pretrained` loads it, and not trained. Distilled is that one trained as long on "
        "the same batches (AdamW 1e-4); half of its loss is the distance to the vectors of the dense one of its seed. "
        "Layers too: the mean over the layers of the squared distance of what they hand on, relative to the dense "
        "one's, is added to that."
    )


def spearman(found: Tensor, wanted: Tensor) -> float:
    """Spearman's rank correlation; tied values share the mean of their ranks."""
    a, b = _ranks(found), _ranks(wanted)
    a, b = a - a.mean(), b - b.mean()
    return float((a @ b) / (a.norm() * b.norm()))


def _ranks(values: Tensor) -> Tensor:
    _, inverse, counts = values.double().unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[inverse]


def _pairs(part: str) -> tuple[list[tuple[str, str]], Tensor]:
    found = rows(f"stsb/sts-{part}.csv.gz")
    return [(row[FIRST], row[SECOND]) for row in found], torch.tensor([float(row[SCORE]) / 5 for row in found])
