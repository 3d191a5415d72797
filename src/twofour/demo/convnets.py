"""Two convolutional nets for images of about 32 x 32, which the experiments train and the benchmarks time."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


def vgg(channels: int = 1) -> nn.Module:
    """Return a VGG-like net for images of so many channels: 64, 128 and 256, two 3x3 convolutions each, pooled."""
    layers: list[nn.Module] = []
    for index, outputs in enumerate((64, 64, 128, 128, 256, 256)):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if index % 2 else []
        channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


class Block(nn.Module):
    """A basic residual block (He et al. 2016, arXiv 1512.03385, figure 2)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        same = stride == 1 and inputs == outputs
        across = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.across = nn.Identity() if same else across

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) -> (n, outputs, h / stride, w / stride)."""
        y = self.norms[1](self.second(self.norms[0](self.first(x)).relu()))
        return (y + self.across(x)).relu()


def resnet18(channels: int = 1, width: int = 64) -> nn.Module:
    """Return ResNet-18 for small images of so many channels: a 3x3 stem, no pool behind it; 11 M parameters.

    `width`: outputs of the stem, an eighth of the last block's.
    """
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
        layers += [Block(inputs, outputs, stride), Block(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


def half_resnet18(channels: int = 1) -> nn.Module:
    """Return ResNet-18 of half the width: a quarter of its products and parameters, for machines without a GPU."""
    return resnet18(channels, 32)


NETS: dict[str, Callable[[int], nn.Module]] = {"vgg": vgg, "resnet18": resnet18, "half-resnet18": half_resnet18}
"""Name -> what builds one for images of so many channels: (n, channels, h, w) -> scores (n, 10)."""
