"""Reasons: why a weight stays dense."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from twofour.hardware.machine import group_of
from twofour.hardware.matmul_shapes import Product
from twofour.layers import walk

DEPTHWISE = "depthwise: no matrix unit multiplies it"
ACTIVATIONS = "(activations)"
"""In place of a layer: a product of two activations."""


def layer_of(weight: str | None) -> str:
    """Return the name of a parameter's layer, or what stands for none."""
    return weight.rpartition(".")[0] or weight if weight else ACTIVATIONS


def reasons_of(
    model: nn.Module, products: Sequence[Product], dtype: str | None, skip: str | Sequence[str]
) -> dict[str, str]:
    """Return why a weight stays dense, "" where it can be sparse: in whole groups of `dtype`'s, if it has any."""
    found = walk(model, skip=skip)
    reasons = {entry.name: entry.reason for entry in found.skipped} | {entry.name: "" for entry in found.weights}
    for product in products:
        if (
            product.weight
            and dtype is not None
            and not reasons.get(product.weight, "not a weight that can be pruned")
            and product.k % group_of(dtype)
        ):
            reasons[product.weight] = f"a reduction of {product.k} has no whole groups in {dtype}"
    return reasons
