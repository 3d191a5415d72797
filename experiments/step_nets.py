"""The nets whose training step is projected and measured: those of the SDGP paper, and BERT-base.

McDanel, Dinh and Magallanes 2022 (arXiv 2202.00774) train with four GPUs on ImageNet; a net's batch here is that of one
of them, at 224 x 224, and nothing is between GPUs. Their blur pooling is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer


@dataclass(frozen=True)
class StepNet:
    """A net, how it is built, and what one GPU is given in a step.

    Attributes:
        name: As on the command line.
        title: As in tables.
        batch: Samples a step and GPU.
        build: Makes the net, small for a test where True.
        shape: Of a sample: (channels, height, width) of images, (tokens,) of texts.
        classes: Scores of a sample.
        adam: Whether AdamW trains it; else SGD with momentum.
    """

    name: str
    title: str
    batch: int
    build: Callable[[bool], nn.Module]
    shape: tuple[int, ...]
    classes: int
    adam: bool = False

    def model(self, tiny: bool = False) -> nn.Module:
        """Random weights."""
        return self.build(tiny)

    def example(self, tiny: bool = False, batch: int | None = None) -> Any:
        """A batch of random images, or of token ids."""
        batch = 2 if tiny else batch or self.batch
        if len(self.shape) == 1:
            return {"input_ids": torch.randint(0, 100, (batch, 16 if tiny else self.shape[0]))}
        channels, *size = self.shape
        return torch.randn(batch, channels, *(min(64, side) if tiny else side for side in size))

    @staticmethod
    def scores(output: Any) -> Tensor:
        """Return the scores in what the net returns."""
        return output if isinstance(output, Tensor) else output.logits

    def optimizer(self, parameters: Any, fused: bool = True) -> Optimizer:
        """SGD with momentum and decay, or AdamW."""
        if self.adam:
            return AdamW(parameters, lr=1e-5, fused=fused)
        return SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=5e-5, fused=fused)


def _resnet9(tiny: bool) -> nn.Module:
    from tasks.resnet9 import ResNet9

    return ResNet9(8 if tiny else 128)


def _resnet(kind: str, tiny: bool) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    deep = kind == "bottleneck"
    sizes, depths = [256, 512, 1024, 2048] if deep else [64, 128, 256, 512], [3, 4, 6, 3] if deep else [2, 2, 2, 2]
    config = ResNetConfig(layer_type=kind, hidden_sizes=sizes, depths=[1] * 4 if tiny else depths)
    config.num_labels = 1000
    return ResNetForImageClassification(config)


def _regnet(tiny: bool) -> nn.Module:
    """RegNetX-400MF: Radosavovic et al. 2020 (arXiv 2003.13678), widths 32 to 384 in groups of 16."""
    from transformers import RegNetConfig, RegNetForImageClassification

    depths = [1, 1, 1, 1] if tiny else [1, 2, 7, 12]
    config = RegNetConfig(
        layer_type="x",
        embedding_size=32,
        hidden_sizes=[32, 64, 160, 384],
        depths=depths,
        groups_width=16,
    )
    config.num_labels = 1000
    return RegNetForImageClassification(config)


def _bert(tiny: bool) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(num_hidden_layers=1 if tiny else 12))


IMAGE, SMALL = (3, 224, 224), (3, 32, 32)

NETS: Mapping[str, StepNet] = MappingProxyType(
    {
        net.name: net
        for net in (
            StepNet("resnet18", "ResNet-18", 256, partial(_resnet, "basic"), IMAGE, 1000),
            StepNet("bert-base", "BERT-base, 128 tokens", 32, _bert, (128,), 2, adam=True),
            StepNet("resnet50", "ResNet-50", 128, partial(_resnet, "bottleneck"), IMAGE, 1000),
            StepNet("resnet9", "ResNet-9-like, CIFAR", 512, _resnet9, SMALL, 10),
            StepNet("regnetx400", "RegNetX-400MF", 256, _regnet, IMAGE, 1000),
        )
    }
)
"""By name, the most wanted first: a measurement may end before the last."""
