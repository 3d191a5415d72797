"""The ResNet-9-like net of KakaoBrain's AutoCLINT that McDanel et al. 2022 (arXiv 2202.00774) train on CIFAR-10."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class ResNet9(nn.Module):
    """Eight convolutions, seven of them prunable.

    Args:
        width: Channels of the first convolution; 128 is theirs.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem, self.wide = _convolution(3, width, 3, 1, 1), _convolution(width, 2 * width, 5, 2, 2)
        self.residual1 = nn.Sequential(*(_convolution(2 * width, 2 * width, 3, 1, 1) for _ in range(2)))
        self.wider = _convolution(2 * width, 4 * width, 3, 1, 1)
        self.residual2 = nn.Sequential(*(_convolution(4 * width, 4 * width, 3, 1, 1) for _ in range(2)))
        self.narrow = _convolution(4 * width, 2 * width, 3, 1, 0)
        self.head = nn.Linear(2 * width, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, 3, 32, 32) -> scores (n, 10)."""
        x = self.wide(self.stem(x))
        x = functional.max_pool2d(self.wider(x + self.residual1(x)), 2)
        return 0.2 * self.head(self.narrow(x + self.residual2(x)).amax((2, 3)))


def _convolution(inputs: int, outputs: int, size: int, stride: int, padding: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())
