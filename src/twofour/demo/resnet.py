"""ResNet-20 for CIFAR-10 as its authors describe it, and the network of a published checkpoint with 91.73 %.

Source: He et al. 2015, "Deep Residual Learning for Image Recognition" (arXiv 1512.03385), section 4.2; shortcuts of
kind A, without parameters. Names and checkpoint: github.com/akamaster/pytorch_resnet_cifar10.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut that halves the image and pads the new channels with zeros."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.padding = stride, (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, inputs, h, w) -> (n, outputs, h / stride, w / stride)."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(y + shortcut)


class ResNet20(nn.Module):
    """Three stages of three blocks with 16, 32 and 64 channels; 0.27 M parameters."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(Block(16, 16, 1), Block(16, 16, 1), Block(16, 16, 1))
        self.layer2 = nn.Sequential(Block(16, 32, 2), Block(32, 32, 1), Block(32, 32, 1))
        self.layer3 = nn.Sequential(Block(32, 64, 2), Block(64, 64, 1), Block(64, 64, 1))
        self.linear = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Normalised images (n, 3, 32, 32) -> scores (n, classes)."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


def normalise(pixels: Tensor) -> Tensor:
    """RGB bytes (n, 32, 32, 3) -> float32 images (n, 3, 32, 32) as the checkpoint was trained on."""
    images = pixels.permute(0, 3, 1, 2).float() / 255
    mean, deviation = torch.tensor([MEAN, DEVIATION], dtype=images.dtype, device=images.device).view(2, 3, 1, 1)
    return (images - mean) / deviation
