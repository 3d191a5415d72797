"""What each layer runs, chosen by measuring: for each of its three products a kernel, the times and the reason."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from twofour.measure.chooser import fault, race

_log = logging.getLogger("twofour.training")

WRONG = 0.05
"""Relative error of a 16-bit product beyond which it is wrong: rounding leaves about 0.005."""

PRODUCTS = ("forward", "data", "weight")
"""The products of a Linear in training: Y = X W^T, dX = dZ W, dW = dZ^T X."""


@dataclass(frozen=True)
class Choice:
    """How one product runs.

    Attributes:
        kernel: Name of the row of the kernel table, or of the dense way ("torch", "onednn").
        sparse: Whether it is a 2:4 kernel.
        reason: Why.
        dense: The best dense way, taken where the kernel cannot be: before a mask is in force, for another type.
        dense_ms: The best dense way, milliseconds; None where nothing was measured.
        sparse_ms: The best sparse way with packing included; None where there is none or nothing was measured.
    """

    kernel: str
    sparse: bool
    reason: str
    dense: str = "torch"
    dense_ms: float | None = None
    sparse_ms: float | None = None

    def __str__(self) -> str:
        times = [
            f"{name} {ms:.2f}" for name, ms in (("dense", self.dense_ms), ("2:4", self.sparse_ms)) if ms is not None
        ]
        return f"{self.kernel} ({', '.join([*times, self.reason])})"


def fastest(
    dense: Mapping[str, Callable[[], object]],
    sparse: Mapping[str, Callable[[], object]],
    seconds: float,
    more: Mapping[str, float] | None = None,
    *,
    gpu: bool = False,
    same: bool = True,
    exact: str = "exact",
) -> Choice:
    """Time the ways of one product against each other, interleaved, and choose.

    Args:
        dense: Name -> dense way, at least one.
        sparse: Name of the row -> sparse way, what it packs in every step included.
        seconds: Time box.
        more: Name -> milliseconds of a step that the call does not show.
        gpu: Whether they run on the GPU, which its own clock times, and whose libraries are checked first: what fails
            or is wrong is left out, with a log line.
        same: Whether a sparse way gives the dense ways' numbers.
        exact: The reason where there is no sparse way.
    """
    if gpu:
        reference, left = cast(Tensor, next(iter(dense.values()))()), dict(sparse)
        for name, way in left.items():
            if why := fault(way, reference, WRONG if same else math.inf):
                _log.warning("%s is left out: %s", name, why)
                sparse = {other: one for other, one in sparse.items() if other != name}
    found_seconds, _ = race({**dense, **sparse}, seconds=seconds, repeats=20, gpu=gpu)
    times = {name: 1e3 * took for name, took in found_seconds.items()}
    for name, ms in (more or {}).items():
        times[name] += ms
    best = min(dense, key=times.__getitem__)
    if not sparse:
        return Choice(best, False, exact, best, times[best])
    found = min(sparse, key=times.__getitem__)
    gain = times[best] / times[found]
    if gain <= 1:
        return Choice(best, False, f"2:4 would take {1 / gain:.2f} times as long", best, times[best], times[found])
    return Choice(found, True, f"{gain:.2f} times as fast", best, times[best], times[found])


@dataclass(frozen=True)
class LayerPlan:
    """One layer.

    Attributes:
        name: Name of the layer.
        shape: (out, in).
        tokens: Rows of the input that was measured; 0 before there was one.
        dtype: Computing type.
        choices: Product (of `PRODUCTS`) -> how it runs.
    """

    name: str
    shape: tuple[int, int]
    tokens: int
    dtype: str
    choices: Mapping[str, Choice]

    @property
    def dense_ms(self) -> float:
        """Time of the best dense ways of the three products together; 0 where nothing was measured."""
        return sum(choice.dense_ms or 0.0 for choice in self.choices.values())

    @property
    def chosen_ms(self) -> float:
        """Time of the chosen ways together, packing included."""
        return sum((c.sparse_ms if c.sparse else c.dense_ms) or 0.0 for c in self.choices.values())


@dataclass(frozen=True)
class Plan:
    """What `attach` chose.

    Attributes:
        layers: The layers with sparse weights.
        skipped: Layers that stay as they are -> the reason.
    """

    layers: tuple[LayerPlan, ...]
    skipped: Mapping[str, str]

    def __str__(self) -> str:
        lines = []
        for layer in self.layers:
            out, columns = layer.shape
            size = f", {layer.tokens} tokens, {layer.dtype}" if layer.tokens else ""
            lines.append(f"{layer.name}  {out} x {columns}{size}")
            lines += [f"  {product:<8} {choice}" for product, choice in layer.choices.items()]
        lines += [f"{name}  dense: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)
