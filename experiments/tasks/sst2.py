"""SST-2 with MiniLM, by the two routes of transfer learning of Mishra et al. 2021, section 4.2."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from tasks.base import Batches, Metric, Task, one_cycle
from tasks.minilm import Classifier, Embedder, embedder, encode, rows, sorted_batches
from tasks.stsb import FIRST, SECOND
from twofour import training

HALF = 2  # of the training split, every second sentence


class Sst2(Task):
    """Fine-tune dense, prune, repeat the fine-tuning."""

    name = "sst2"
    title = "SST-2, MiniLM-L6, fine-tuned, pruned, fine-tuned again"
    notes = (
        "Each fine-tuning, the dense one, the control and the sparse one, has one epoch on 3,460 sentences, every "
        "second one (AdamW 5e-5, batch 32, one cycle). Test split. The head stays dense (ASP's rule)."
    )
    pretrained = False
    epochs = 1

    @property
    def metric(self) -> Metric:
        """Accuracy."""
        return Metric("accuracy", "%", True, len(self.test[1]), "sentences")

    @cached_property
    def train(self) -> tuple[list[str], Tensor]:
        """Sentences and labels."""
        return _part("train")

    @cached_property
    def test(self) -> tuple[list[str], Tensor]:
        """The same of the test split."""
        return _part("test")

    def network(self, seed: int) -> nn.Module:
        """The published encoder under a head that follows from the seed."""
        torch.manual_seed(seed)
        return Classifier(embedder(), 2)

    def loader(self, seed: int) -> Batches:
        """Batches of 32 sentences of like length."""
        lengths = torch.tensor([len(text) for text in self.train[0][::HALF]])
        return Batches(len(lengths), 32, lambda index: self._batch(HALF * index), lengths)

    def _batch(self, index: Tensor) -> tuple[Any, Tensor]:
        return encode([self.train[0][number] for number in index.tolist()]), self.train[1][index]

    def loss(self, output: Any, target: Any) -> Tensor:
        """Cross entropy."""
        return F.cross_entropy(output, target)

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """AdamW."""
        return AdamW(parameters, lr=5e-5, weight_decay=0.01)

    def evaluate(self, model: nn.Module) -> float:
        """Accuracy on the test split."""
        right = 0
        for places, encoded in sorted_batches(self.test[0], 64):
            right += int((model(*encoded).argmax(-1) == self.test[1][places]).sum())
        return 100 * right / len(self.test[1])

    def calibration(self) -> list[Any]:
        """512 sentences of the training split."""
        return [encoded for _, encoded in sorted_batches(self.train[0][::13][:512], 16)]

    def example(self) -> Any:
        """Two sentences."""
        return encode(["a quiet , pure , elliptical film", "one long string of cliches"])


class Sst2Pretrained(Sst2):
    """Prune the pre-trained model, repeat the last of its pre-training sparse, then fine-tune under fixed masks."""

    name = "sst2-pretrained"
    title = "SST-2, MiniLM-L6, pruned before fine-tuning"
    notes = (
        "The pre-trained encoder is pruned; then one epoch stands in for the last phase of pre-training, which "
        "cannot be repeated here: the embeddings of 4,096 unlabelled sentences of STS-B are pulled towards those"
        " of the dense model. Then one epoch of fine-tuning, masks fixed. The control goes through the same"
        " two steps, dense."
    )
    pretrained = True

    def before_again(self, model: nn.Module, seed: int) -> None:
        """Pull the embeddings of unlabelled text towards those of the published weights."""
        teacher = embedder().eval()
        found = [sentence for row in rows("stsb/sts-train.csv.gz")[::2] for sentence in (row[FIRST], row[SECOND])][
            :4096
        ]

        def batch(index: Tensor) -> tuple[Any, Tensor]:
            encoded = encode([found[number] for number in index.tolist()])
            with torch.no_grad():
                return encoded, teacher(*encoded)

        batches = Batches(len(found), 64, batch, torch.tensor([len(text) for text in found]))
        student: Embedder = model.embedder  # pyright: ignore[reportAssignmentType]
        training.train(
            student,
            batches,
            loss=lambda output, target: (1 - (output * target).sum(-1)).mean(),
            optimizer=lambda parameters: AdamW(parameters, lr=1e-4, weight_decay=0.01),
            schedule=lambda optimizer: one_cycle(optimizer, len(batches)),
            epochs=1,
            seed=seed,
        )


def _part(part: str) -> tuple[list[str], Tensor]:
    found = rows(f"sst2/{part}.tsv.gz")
    return [row[0] for row in found], torch.tensor([int(row[1]) for row in found])
