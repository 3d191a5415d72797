"""step_layer: a layer of a topology computed on its array, on drawn whole numbers, beside the product it should be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twofour.hardware.systolic.layer import Layer
from twofour.hardware.systolic.operands import operands
from twofour.hardware.systolic.settings import Settings
from twofour.hardware.systolic.stepped import step
from twofour.hardware.systolic.weights import keep


@dataclass(frozen=True)
class SteppedLayer:
    """What stepping a layer found.

    Attributes:
        layer: The layer.
        cycles: Cycles counted.
        exact: Whether every output is that of the whole numbers' product.
    """

    layer: Layer
    cycles: int
    exact: bool


def step_layer(layer: Layer, settings: Settings, seed: int = 0) -> SteppedLayer:
    """Draw an image and filters, sparse where the settings say so, step their product and compare it.

    Args:
        layer: The layer.
        settings: Its array and sparsity.
        seed: Of the whole numbers, -8 to 8.
    """
    drawn = np.random.default_rng(seed)
    found = operands(layer, sparse=settings.representation is not None, block=settings.block, seed=settings.seed)
    pixels = np.append(drawn.integers(-8, 9, layer.height * layer.width * layer.channels), 0)
    x = pixels[operands(layer).inputs]  # NONE is the last, a zero
    w = drawn.integers(-8, 9, found.mask.shape) * found.mask
    kept, group = layer.kept, layer.group
    if settings.block is not None:  # SCALE-Sim fills the reduction up to pairs of blocks and keeps half of each
        kept, group = settings.block // 2, settings.block
        short = -layer.k % (2 * settings.block)
        x, w = np.pad(x, ((0, 0), (0, short))), np.pad(w, ((0, short), (0, 0)))
    dense = settings.representation is None or group == 1
    done = step(settings.array, x, w if dense else keep(w, kept, group))
    return SteppedLayer(layer, done.cycles, bool((done.output == x @ w).all()))
