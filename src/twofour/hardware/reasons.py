"""Reasons: why a weight stays dense."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from twofour.hardware.machine import group_of
from twofour.hardware.matmul_shapes import Product
from twofour.layers import walk
from twofour.patterns import Hybrid, Pattern

DEPTHWISE = "depthwise: no matrix unit multiplies it"
ACTIVATIONS = "(activations)"
"""In place of a layer: a product of two activations."""


def layer_of(weight: str | None) -> str:
    """Return the name of a parameter's layer, or what stands for none."""
    return weight.rpartition(".")[0] or weight if weight else ACTIVATIONS


def reasons_of(
    model: nn.Module,
    products: Sequence[Product],
    dtype: str | None,
    skip: str | Sequence[str],
    rule: Pattern | None = None,
) -> dict[str, str]:
    """Return why a weight stays dense, "" where it can be sparse: in whole groups of `dtype`'s, if it has any.

    Of 2:4 with dense groups, the `rule`, no kernel takes a convolution in groups of channels: `compile` runs it dense.
    """
    found = walk(model, skip=skip)
    reasons = {entry.name: entry.reason for entry in found.skipped} | {entry.name: "" for entry in found.weights}
    for product in products:
        if not product.weight or reasons.get(product.weight, "not a weight that can be pruned"):
            continue
        if dtype is not None and product.k % group_of(dtype):
            reasons[product.weight] = f"a reduction of {product.k} has no whole groups in {dtype}"
        elif isinstance(rule, Hybrid) and product.positions is not None and product.batch > 1:
            reasons[product.weight] = f"no kernel has dense groups of inputs in {product.batch} groups of channels"
    return reasons
