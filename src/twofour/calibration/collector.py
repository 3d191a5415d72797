"""The hooks of one pass: each call's inputs go to the statistics of the layer's weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from twofour.calibration.inputs import caller, rows
from twofour.calibration.statistics import Need, Statistics
from twofour.calls import first_input, observing
from twofour.layers import PrunableWeight


class Unshared(BaseException):
    """Two layers that shared their first input do not share a later one: the pass must be run again without sharing."""


class Collector:
    """Statistics of several weights, summed by hooks on their layers.

    Linear layers that are called one after the other with the same tensor, as query, key and value are, share one sum:
    for three layers that is a third of the products and of the memory.
    """

    def __init__(self, model: nn.Module, weights: Sequence[PrunableWeight], need: Need, *, share: bool = True) -> None:
        self.model, self.weights, self.share = model, weights, share
        self.need: Need = need
        self.tokens: Tensor | None = None
        self._own: dict[str, Statistics] = {}
        # Whose statistics each weight uses; settled at its first call.
        self._leader: dict[str, str] = {}
        self._last: tuple[str, Tensor, int] | None = None

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Observe the layers inside."""
        with observing(((weight, caller(self.model, weight)) for weight in self.weights), self._see):
            yield
        self._last = None

    def release(self, weight: PrunableWeight) -> Statistics:
        """Return the statistics of a weight and let go of them, unless another weight still waits for them."""
        leader = self._leader.get(weight.name, weight.name)
        found = self._own.get(leader) or Statistics(self.need)
        found.readers = found.readers or tuple(name for name, first in self._leader.items() if first == leader)
        self._leader.pop(weight.name, None)
        if leader not in self._leader.values():
            self._own.pop(leader, None)
        return found

    def _last_leader(self, x: Tensor) -> str | None:
        """Return the layer whose call came last if it was with this very tensor, unchanged since."""
        if self._last is None or self._last[1] is not x or self._last[2] != x._version:
            return None
        return self._last[0]

    def _see(self, weight: PrunableWeight, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x, name, linear = first_input(args, kwargs), weight.name, weight.kind in ("linear", "hf_conv1d")
        last = self._last_leader(x) if linear and self.share else None
        leader = self._leader.setdefault(name, last or name)
        if leader != name:
            if last != leader:
                raise Unshared
            return
        statistics = self._own.setdefault(name, Statistics(self.need))
        for part in rows(weight, module, args, kwargs, self.tokens):
            statistics.add(part)
        self._last = (name, x, x._version) if linear else None
