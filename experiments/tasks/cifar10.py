"""CIFAR-10 with the published resnet20: the paper's workflow from a converged checkpoint."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler

from tasks.base import Batches, Metric, Task, accuracy
from twofour.demo.data import data_folder
from twofour.demo.resnet import ResNet20, normalise

CHECKPOINT = "pretrained/resnet20-12fca82f.safetensors"
BLACK = normalise(torch.zeros(1, 1, 1, 3))
"""A black pixel, (1, 3, 1, 1)."""


class Cifar10(Task):
    """ResNet-20, 18 of whose 20 weights are eligible; augmentation as He et al. 2015: pad by 4, crop, flip.

    Attributes:
        rewound: Whether a repetition has the rate of the checkpoint's last epochs, 0.001 since the 150th of 200 (0.1 at
            first, a tenth of it since the 100th), as Renda et al. 2020 (arXiv 2003.02389) rewind it for so few; else
            one cycle up to 0.05, by which one epoch costs the dense model 0.8 points.
        padding: Pixels around an image before it is cropped.
        border: Whether they are "black", as the checkpoint saw them, which was trained on images that were cropped
            before they were normalised; or the "mean" of all images, zeros behind the normalisation. The variance in
            the first norm differs by 29 % between the two, and the checkpoint has 88.5 % for 91.5 once its norms know
            the other kind.
    """

    name = "cifar10"
    title = "CIFAR-10, ResNet-20 (published checkpoint, 0.27 M parameters)"
    notes = (
        "The checkpoint was trained for 200 epochs; each repetition, control included, has the last of them (SGD "
        "0.001, momentum 0.9, weight decay 1e-4, batch 128, crops with a black border, as it saw them). The stem and "
        "the classifier stay dense (ASP's rule)."
    )
    pretrained = True
    epochs = 1
    padding = 4
    border = "black"
    rewound = True

    @property
    def metric(self) -> Metric:
        """Top-1 accuracy."""
        return Metric("accuracy", "%", True, len(self.test[1]), "images")

    @cached_property
    def train(self) -> tuple[Tensor, Tensor]:
        """Normalised images (50,000, 3, 32, 32) and labels, on the device."""
        parts = [_read(data_folder() / "cifar10" / f"{part}.npz") for part in ("train_a", "train_b")]
        images, labels = torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])
        return images.to(self.device), labels.to(self.device)

    @cached_property
    def test(self) -> tuple[Tensor, Tensor]:
        """Normalised images (10,000, 3, 32, 32) and labels."""
        return _read(data_folder() / "cifar10" / "test.npz")

    def network(self, seed: int) -> nn.Module:
        """The checkpoint; its 91.73 % are `evaluate`'s answer."""
        model = ResNet20()
        model.load_state_dict(load_file(data_folder() / CHECKPOINT))
        return model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def loader(self, seed: int) -> Batches:
        """Augmented batches of 128."""
        return Batches(len(self.train[1]), 128, self._batch)

    def _batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        n, device = len(index), self.device
        flip = torch.rand(n, 1, 1, 1) < 0.5
        top, left = torch.randint(0, 2 * self.padding + 1, (2, n))
        index, top, left = torch.stack([index, top, left]).to(device, non_blocking=True)
        images, labels = self.train[0][index], self.train[1][index]
        images = torch.where(flip.to(device, non_blocking=True), images.flip(3), images)
        bordered = F.pad(images, (self.padding,) * 4)
        if self.border == "black":
            inside = F.pad(torch.ones_like(images[:1, :1]), (self.padding,) * 4)
            bordered += (1 - inside) * BLACK.to(device)
        steps = torch.arange(32, device=device)
        rows, columns = (top[:, None] + steps)[:, None, :, None], (left[:, None] + steps)[:, None, None, :]
        places, channels = torch.arange(n, device=device)[:, None, None, None], torch.arange(3, device=device)
        cropped = bordered[places, channels[:, None, None], rows, columns]
        return cropped.contiguous(memory_format=torch.channels_last), labels

    def loss(self, output: Any, target: Any) -> Tensor:
        """Cross entropy."""
        return F.cross_entropy(output, target)

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """SGD with momentum, as the checkpoint had."""
        return SGD(parameters, lr=0.001 if self.rewound else 0.05, momentum=0.9, weight_decay=1e-4)

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        """The rate stays, or has one cycle."""
        return ConstantLR(optimizer, 1.0) if self.rewound else super().schedule(optimizer)

    def evaluate(self, model: nn.Module) -> float:
        """Accuracy on the 10,000 test images."""
        return accuracy(model, *self.test)

    def calibration(self) -> list[Any]:
        """1,024 training images without augmentation."""
        return list(self.train[0][:1024].split(128))

    def example(self) -> Tensor:
        """Two test images."""
        return self.test[0][:2]


class LowBitsCifar10(Cifar10):
    """The same net, checkpoint and test images; every training, the control's too, sees the first images once."""

    images = 12_800
    border, rewound = "mean", False
    notes = (
        "The checkpoint was trained for 200 epochs on 50,000 images; each training here, the control too, has {epochs} "
        f"epoch of the first {images:,} of them (SGD 0.05, momentum 0.9, weight decay 1e-4, batch 128, one cycle): so "
        "short that the figures compare rows of this table with each other, not with published ones."
    )

    @cached_property
    def train(self) -> tuple[Tensor, Tensor]:
        """The first images, normalised, and labels."""
        images, labels = super().train
        return images[: self.images].clone(), labels[: self.images].clone()


def _read(path: Path) -> tuple[Tensor, Tensor]:
    with np.load(path, allow_pickle=False) as file:
        # Two-dimensional differences of the planes G, R - G, B - G, modulo 256 (the folder's README).
        planes = file["residual"].cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)
        labels = torch.from_numpy(file["labels"].astype(np.int64))
    pixels = np.stack([planes[1] + planes[0], planes[0], planes[2] + planes[0]], -1)
    return normalise(torch.from_numpy(pixels)), labels
