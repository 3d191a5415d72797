"""The protocol of a task: a converged dense model, its training, its data, and one figure that says how good it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler


@dataclass(frozen=True)
class Metric:
    """What is measured on held-out data.

    Attributes:
        name: "accuracy", "Spearman", "perplexity".
        unit: "%" or "".
        higher: Whether more is better.
        held_out: How many examples (or tokens) it is measured on.
        of: What those are.
        decimals: Of its values on the page.
    """

    name: str
    unit: str
    higher: bool
    held_out: int
    of: str
    decimals: int = 2


class Task(ABC):
    """One network on one data set. A task is made once and serves every row of its table.

    Attributes:
        name: What the command line and the record call it.
        title: One line for the page.
        notes: What a reader must know to read the figures: what was shortened, and where weights come from.
        pretrained: Whether the dense model comes from a published checkpoint, so that seeds change the training alone.
        epochs: Epochs of every training: the dense one where there is none published, and each repetition.
        skip: Layers that stay dense, beside those that `eligibility` leaves out.
        eligibility: As in `twofour.prune`.
        patterns: What the task is pruned to beside the patterns of every task.
        draws: How many samples, drawn by the seed, calibrate in rows that compare their numbers: see `Arm.drawn`.
        low_bits: Rows of its table of low bits, beside the float control.
        after: Epochs behind the cut of nets that lose channels while they train; `epochs` are those before.
        strengths: Of their gates, two.
        share: Of the training before the cut during which gates are pulled.
        restarts: Whether the training behind the cut is a cycle of learning rates of its own.
        taught: Whether the dense net teaches them in it.
        device: On which models are trained and answer.
    """

    name: str
    title: str
    notes: str
    pretrained: bool
    epochs: int
    skip: tuple[str, ...] = ()
    eligibility: str = "asp"
    patterns: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()
    low_bits: tuple[str, ...] = ("w1a1", "w1a2", "w2a2")
    after: int = 0
    strengths: tuple[float, float] = (2.8, 5.0)
    share: float = 1.0
    restarts: bool = True
    taught: bool = False
    device: torch.device = torch.device("cpu")

    @property
    @abstractmethod
    def metric(self) -> Metric:
        """What `evaluate` answers."""

    @abstractmethod
    def network(self, seed: int) -> nn.Module:
        """The network before any training here: published weights, or random ones that follow from `seed`."""

    @abstractmethod
    def loader(self, seed: int) -> Sequence[Any] | Batches:
        """Training batches (input, target), anew in each epoch."""

    @abstractmethod
    def loss(self, output: Any, target: Any) -> Tensor:
        """The training loss."""

    @abstractmethod
    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """The optimiser of every training."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> float:
        """The metric on all held-out data."""

    @abstractmethod
    def calibration(self) -> list[Any]:
        """Inputs, from training data, on which criteria collect their statistics."""

    def drawn(self, seed: int) -> list[Any]:
        """Inputs, from training data, in an order that follows from the seed; only for tasks with `draws`."""
        raise NotImplementedError(f"{self.name} has no draws")

    @abstractmethod
    def example(self) -> Any:
        """One input, for tracing the model."""

    def before_again(self, model: nn.Module, seed: int) -> None:
        """What happens to a model, dense or sparse, before its training is repeated; nothing by default."""
        return None

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        """One cycle over all steps of a training: up over the first tenth, then down to zero as a cosine."""
        return one_cycle(optimizer, self.epochs * len(self.loader(0)))


class Batches:
    """Shuffled batches of index-aligned tensors: made by a function from the indices, in an order torch's seed gives.

    Args:
        size: Number of examples.
        batch: Examples per batch; the last, smaller batch is left out.
        make: Indices (batch,) -> (input, target).
        lengths: Of the examples, (size,), where batches are to hold examples of like length, so that little is
            padding: pools of 16 batches are drawn at random, each is sorted by length, and the batches are shuffled.
    """

    POOL = 16

    def __init__(self, size: int, batch: int, make: Any, lengths: Tensor | None = None) -> None:
        self.size, self.batch, self.make, self.lengths = size, batch, make, lengths

    def __len__(self) -> int:
        return self.size // self.batch

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        order = torch.randperm(self.size)[: len(self) * self.batch]
        for index in self._alike(order) if self.lengths is not None else order.split(self.batch):
            yield self.make(index)

    def hold_back(self, seed: int) -> tuple[Batches, list[Any]]:
        """Return batches of nineteen twentieths of the examples, and those of the others, the same each time."""
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(seed))
        count = min(1024, self.size // 20)
        places = order[count:]
        lengths = None if self.lengths is None else self.lengths[places]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            held = [self.make(index) for index in order[:count].split(self.batch)]
        return Batches(len(places), self.batch, lambda index: self.make(places[index]), lengths), held

    def _alike(self, order: Tensor) -> list[Tensor]:
        assert self.lengths is not None
        pools = order.split(self.POOL * self.batch)
        batches = [part for pool in pools for part in pool[self.lengths[pool].argsort()].split(self.batch)]
        return [batches[place] for place in torch.randperm(len(batches))]


def one_cycle(optimizer: Optimizer, steps: int, begin: int = 0) -> LRScheduler:
    """Linear from 0 over the first tenth of `steps`, then half a cosine down to 0; from step `begin` on."""
    rise = max(1, steps // 10)

    def factor(step: int) -> float:
        step += begin
        if step < rise:
            return (step + 1) / rise
        return 0.5 * (1 + float(torch.cos(torch.tensor(torch.pi * min(1.0, (step - rise) / max(1, steps - rise))))))

    return LambdaLR(optimizer, factor)


def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor, batch: int = 500) -> float:
    """Percentage of right answers."""
    right = sum(
        int((model(x).argmax(-1) == y).sum()) for x, y in zip(inputs.split(batch), labels.split(batch), strict=True)
    )
    return 100 * right / len(labels)
