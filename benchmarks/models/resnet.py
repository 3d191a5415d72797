"""ResNet-50 for 224x224 images. He et al. 2016, with the stride in the 3x3 convolution as torchvision has it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.subject import Subject

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
EXPANSION = 4


def conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution that keeps the size (over its stride) and its batch norm."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up, added to a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * EXPANSION
        self.reduce, self.middle = conv_norm(inputs, width, 1), conv_norm(width, width, 3, stride)
        self.expand = conv_norm(width, outputs, 1)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else conv_norm(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, h, w) -> (batch, 4 width, h / stride, w / stride)."""
        y = torch.relu(self.middle(torch.relu(self.reduce(x))))
        return torch.relu(self.expand(y) + self.shortcut(x))


class ResNet50(nn.Module):
    """Images (batch, 3, h, w) to 1000 logits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = conv_norm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)
        blocks, inputs = [], 64
        for index, (width, count) in enumerate(STAGES):
            for step in range(count):
                blocks.append(Bottleneck(inputs, width, 2 if index and not step else 1))
                inputs = width * EXPANSION
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(inputs, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (batch, 1000)."""
        x = self.blocks(self.pool(torch.relu(self.stem(x))))
        return self.classifier(x.mean((2, 3)))


def with_statistics(model: nn.Module, images: int = 4) -> nn.Module:
    """Give the batch norms of a model the statistics of random images (3, 224, 224); returns the model, evaluating."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
        if isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
            module.momentum = None
    with torch.no_grad():
        model.train()(torch.randn(images, 3, 224, 224))
    return model.eval()


def resnet50(batch: int) -> Subject:
    """Random weights, batch-norm statistics of random images: nothing but time is measured."""
    torch.manual_seed(0)
    model = with_statistics(ResNet50()).requires_grad_(False).to(memory_format=torch.channels_last)
    image = torch.randn(batch, 3, 224, 224).to(memory_format=torch.channels_last)
    return Subject("resnet50", "random weights, statistics of random images", model, (image,), batch, batch)
