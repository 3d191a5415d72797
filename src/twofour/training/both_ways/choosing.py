"""How products run, chosen once for all layers that are called alike: in the example's type, and in others later."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from twofour.training.both_ways.choose import choices
from twofour.training.both_ways.convolution import Seen, conv_choices
from twofour.training.both_ways.kept_states import processes
from twofour.training.sparse_linear import PRODUCTS, Choice
from twofour.training.sparse_linear.implementations import TORCH, types

LEAST_GAIN = 1.05
"""Of a layer's products together, for a mask: what is less is within the noise of a choice and the cost of the mask
itself (packing from cold memory, keeping pruned values at zero), and costs accuracy. ResNet-20's first convolutions
gained 1.03 (16 channels, a busy Zen 4), and its step nothing."""

_log = logging.getLogger("twofour.training")


@dataclass(frozen=True)
class Called:
    """How a layer was called.

    Attributes:
        shape: (out, in) of its product.
        tokens: Rows of its input; of a convolution pixels of its output.
        device: Where it is computed.
        convolution: How it was called as a convolution, where it is no product over rows; else None.
        idle: Products that no step takes, of an input or a weight without a gradient.
    """

    shape: tuple[int, int]
    tokens: int
    device: torch.device
    convolution: Seen | None
    idle: tuple[str, ...] = field(default=(), compare=False)


class Choosing:
    """Chooses for the layers of one `attach`; what was measured holds for this machine and is not copied.

    Attributes:
        gradient: As in `attach`, like those that follow.
        every: Steps between two choices of the mask, or None.
        kernels: "measured", "dense" or "sparse".
        state: "dense" or "packed".
        seconds: Time box of one product.
    """

    def __init__(self, gradient: str, every: int | None, kernels: str, state: str, seconds: float) -> None:
        self.gradient, self.every, self.kernels, self.state, self.seconds = gradient, every, kernels, state, seconds
        self._known: dict[tuple[Called, torch.dtype], Mapping[str, Choice]] = {}
        self._said: set[torch.dtype] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_known": {}}

    @property
    def keeps_masks(self) -> bool:
        """Whether layers have masks whatever their products gain: asked for, for half of the memory, or in one group.

        Processes that train together measure each by itself, and their masks must not differ.
        """
        return self.kernels != "measured" or self.state == "packed" or processes() > 1

    def choose(self, called: Called, dtype: torch.dtype) -> Mapping[str, Choice]:
        """Return how each product runs."""
        if (called, dtype) not in self._known:
            self._known[called, dtype] = self._chosen(called, dtype)
        return self._known[called, dtype]

    def say(self, dtype: torch.dtype, example: str) -> None:
        """Say once that a training computes in another type than the example's."""
        if dtype not in self._said:
            self._said.add(dtype)
            name = str(dtype).removeprefix("torch.")
            _log.warning(
                "the training computes in %s, the example was in %s: products are chosen anew, once for each shape, "
                "and layers keep the masks that they have. attach inside the training's torch.autocast decides both",
                *(name, example),
            )

    def _chosen(self, called: Called, dtype: torch.dtype) -> Mapping[str, Choice]:
        if dtype not in types(called.device):
            why = f"no 2:4 kernel for {str(dtype).removeprefix('torch.')} on {called.device.type}"
            return dict.fromkeys(PRODUCTS, Choice(TORCH, False, why))
        if called.convolution is not None:
            return conv_choices(self.every, self.kernels, self.seconds, called.convolution, dtype)
        rules = self.gradient, self.every, self.kernels, self.state, self.seconds
        return choices(*rules, called.shape, called.tokens, dtype, called.device)


class Anew(NamedTuple):
    """What a layer's products are chosen by in another type than the example's.

    Attributes:
        choosing: Of its `attach`.
        called: As the example called it.
    """

    choosing: Choosing
    called: Called

    def __call__(self, dtype: torch.dtype, example: str) -> Mapping[str, Choice]:
        """Return how each product runs in a type; `example`: the type before."""
        self.choosing.say(dtype, example)
        return self.choosing.choose(self.called, dtype)
