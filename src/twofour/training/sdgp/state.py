"""What one layer knows of its pruning, found by a number that operators can carry through a compiled graph."""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from twofour.training import randomness
from twofour.training.sdgp.rule import Rule, packed, pruned
from twofour.training.sdgp.ways import Ways

_numbers = itertools.count()
_states: WeakValueDictionary[int, State] = WeakValueDictionary()


class State:
    """The rule of one layer and its random draws.

    The n-th backward pass of a layer draws from a stream that follows from (seed, position in the model, n) alone:
    recomputing a forward pass does not advance it, and every process that has the seed draws the same.

    Attributes:
        layer: Name of the layer.
        rule: How its gradients are pruned.
        parts: Groups of the convolution, which groups of channels may not straddle.
        seed: Of the random modes.
        position: Of the layer among the pruned ones.
        draws: Backward passes that have drawn.
        ways: How its products run.
        number: What `found` knows it by.
    """

    title = "pruned gradients (SDGP)"

    def __init__(self, layer: str, rule: Rule, parts: int, seed: int, position: int, ways: Ways) -> None:
        self.layer, self.rule, self.parts, self.seed, self.position = layer, rule, parts, seed, position
        self.ways = ways
        self.draws = 0
        self._register()

    def prune(self, gradient: Tensor, *, trial: bool = False) -> Tensor:
        """Return the pruned dL/dz, (samples, pixels, channels); a trial, for measuring, counts no draw."""
        return pruned(gradient, self.rule, parts=self.parts, generator=self._generator(gradient.device, trial))

    def pack(self, gradient: Tensor, out: Tensor, *, trial: bool = False) -> Tensor:
        """Return what `prune` returns, packed into the beginning of `out`: the same choices."""
        return packed(gradient, self.rule, generator=self._generator(gradient.device, trial), out=out)

    def _generator(self, device: torch.device, trial: bool) -> torch.Generator | None:
        if not self.rule.draws:
            return None
        if trial:
            return torch.Generator(device).manual_seed(0)
        seed = randomness.derive(self.seed, self.draws, f"gradient of layer {self.position}")
        self.draws += 1
        return torch.Generator(device).manual_seed(seed)

    def _register(self) -> None:
        self.number = next(_numbers)
        _states[self.number] = self

    def __setstate__(self, state: dict[str, Any]) -> None:  # a copy, also of another process, gets a number of its own
        self.__dict__.update(state)
        self._register()


def found(number: int) -> State:
    """Return the state of that number."""
    return _states[number]
