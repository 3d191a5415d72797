"""The nets that `benchmarks/run.py bits-nets` times, on all images of Fashion-MNIST and CIFAR-10, trained on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer

from tasks.base import Batches, Metric, Task, accuracy
from tasks.cifar10 import Cifar10
from tasks.fashion import Fashion
from twofour.demo.convnets import NETS

RATE = 0.1
"""The highest learning rate."""


_TIMED = "The net that `benchmarks/run.py bits-nets` times"
_WHICH = {"vgg": _TIMED, "resnet18": _TIMED, "half-resnet18": "The net"}


class OutOfTime(Exception):
    """An epoch would begin behind the deadline."""


class AllFashion(Fashion):
    """All 60,000 training images."""

    @cached_property
    def train(self) -> tuple[Tensor, Tensor]:
        """Images (60,000, 1, 28, 28) with mean 0 and deviation 1, and labels."""
        return self._read("train", 60_000)


@dataclass(frozen=True)
class Source:
    """A data set.

    Attributes:
        kind: What reads it.
        title: Of the page.
        channels: Of its images.
        side: Their height and width.
        shift: Places by which training images are shifted at most.
    """

    kind: type[AllFashion] | type[Cifar10]
    title: str
    channels: int
    side: int
    shift: int


SOURCES = {
    "fashion": Source(AllFashion, "Fashion-MNIST", 1, 28, 2),
    "cifar10": Source(Cifar10, "CIFAR-10", 3, 32, 4),
}

TITLES = {
    "vgg": "a VGG-like net of 64 to 256 channels",
    "resnet18": "ResNet-18 for small images",
    "half-resnet18": "ResNet-18 for small images at half its width (32 to 256 channels)",
}


class ConvNet(Task):
    """One of `NETS` on one data set, its images held and augmented on a device.

    Args:
        source: Of `SOURCES`.
        net: Of `NETS`.
        device: Where images are and nets are trained.
        images: Training images to use, None for all.
        held: Test images to use, None for all; for trials.
        deadline: Moment of `time.monotonic` after which no epoch begins.
    """

    pretrained = False
    epochs = 15
    start_epochs = 15
    """Of the float net that all others start from; `epochs` are those of every training after it."""
    taught = True
    batch = 512
    halves = True
    """Whether nets multiply in bfloat16 while they are trained."""
    low_rate = 2e-3
    """The highest learning rate of nets of few bits, which Adam trains."""

    def __init__(
        self,
        source: str,
        net: str,
        device: torch.device | str = "cpu",
        *,
        images: int | None = None,
        held: int | None = None,
        deadline: float = float("inf"),
    ) -> None:
        self.name, self.source, self.net = f"{source}-{net}", SOURCES[source], net
        self.title = f"{self.source.title}, {TITLES[net]}"
        self.device, self.images, self.held, self.deadline = torch.device(device), images, held, deadline

    @property
    def notes(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What was trained, and how: what stands in braces is to be put in."""
        source = self.source
        return (
            f"{_WHICH[self.net]}, for {source.channels} x {source.side} x {source.side} "
            "inputs. The float net has {start_epochs} epochs of the first {images} training images, each training "
            "after it, the control's too, {epochs} more{teacher} (SGD, momentum 0.9, weight decay 5e-4, batch {batch}, "
            f"one cycle, rate {RATE} at most, gradients clipped at 1, flips, shifts by {source.shift}; "
            "nets of few bits: {recipe})."
        )

    @property
    def metric(self) -> Metric:
        """Top-1 accuracy."""
        return Metric("accuracy", "%", True, len(self.test[1]), "images")

    @cached_property
    def train(self) -> tuple[Tensor, Tensor]:
        """Normalised images (n, h, w, channels), zeros around them, and labels, on the device."""
        images, labels = _read(self.source.kind)[0]
        beside = (self.source.shift,) * 4
        images = F.pad(images[: self.images].to(self.device), beside).permute(0, 2, 3, 1).contiguous()
        return images, labels[: self.images].to(self.device)

    @cached_property
    def test(self) -> tuple[Tensor, Tensor]:
        """Normalised images (10,000, channels, h, w) and labels, on the device."""
        images, labels = _read(self.source.kind)[1]
        return images[: self.held].to(self.device), labels[: self.held].to(self.device)

    def network(self, seed: int) -> nn.Module:
        """Random weights."""
        torch.manual_seed(seed)
        return NETS[self.net](self.source.channels).to(self.device)

    def loader(self, seed: int) -> Batches:
        """Shifted and flipped batches."""
        return _Timed(len(self.train[1]), self.batch, self._batch, self.deadline)

    def _batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return images in channels_last and labels; the numbers that are drawn go to the device in one piece."""
        images, labels = self.train
        shift, n = self.source.shift, len(index)
        drawn = torch.stack([index, *torch.randint(0, 2 * shift + 1, (2, n)), torch.randint(0, 2, (n,))])
        at, top, left, flip = drawn.to(self.device, non_blocking=True)
        steps = torch.arange(self.source.side, device=self.device)
        rows = top[:, None] + steps
        columns = left[:, None] + torch.where(flip[:, None] == 1, steps.flip(0), steps)
        return images[at[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2), labels[at]

    def loss(self, output: Any, target: Any) -> Tensor:
        """Cross entropy."""
        return F.cross_entropy(output, target)

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """SGD with Nesterov's momentum."""
        return SGD(parameters, lr=RATE, momentum=0.9, weight_decay=5e-4, nesterov=True)

    def low_bit_optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Adam without weight decay: signs turn by steps of one size, whatever the scale of their gradients."""
        return Adam(parameters, lr=self.low_rate)

    @property
    def recipe(self) -> str:
        """What that is, in words."""
        return f"Adam, rate {self.low_rate:g} at most, no weight decay"

    def evaluate(self, model: nn.Module) -> float:
        """Accuracy on the test images, in float32 without TF32."""
        return self._accuracy(model, len(self.test[1]))

    def evaluate_first(self, images: int) -> Callable[[Task, nn.Module], float]:
        """Return what evaluates a model on the first test images alone, in the batches of `evaluate`."""
        return lambda _, model: self._accuracy(model, images)

    def _accuracy(self, model: nn.Module, images: int) -> float:
        batch = 500 if self.device.type == "cuda" else 100  # whose values a CPU's cache holds
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
            return accuracy(model, *(part[:images] for part in self.test), batch=batch)

    def calibration(self) -> list[Any]:
        """1,024 training images as they are."""
        images, inside = self.train[0][:1024], slice(self.source.shift, -self.source.shift)
        return list(images[:, inside, inside].permute(0, 3, 1, 2).contiguous().split(128))

    def example(self) -> Tensor:
        """Two test images."""
        return self.test[0][:2]


class _Timed(Batches):
    """Batches that stop where an epoch would begin too late."""

    def __init__(self, size: int, batch: int, make: Any, deadline: float) -> None:
        super().__init__(size, min(batch, size), make)
        self.deadline = deadline

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        if time.monotonic() > self.deadline:
            raise OutOfTime
        yield from super().__iter__()


@cache
def _read(kind: type[Any]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the training part and the test part of a data set, which several nets learn."""
    data = kind()
    return data.train, data.test
