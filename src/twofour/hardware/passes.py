"""Passes: what reads and writes memory and computes next to nothing, priced by its bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from twofour.hardware.fitted import FITTED
from twofour.hardware.machine import BITS, Machine, stored_bytes
from twofour.hardware.matmul_shapes import Product

OPTIMIZERS: Mapping[str, int] = MappingProxyType({"sgd": 20, "adamw": 28})
"""Bytes of memory for each parameter in a fused step in float32: gradient, parameter and momentum are read, parameter
and momentum written (SGD with momentum: 3 + 2 values of 4 bytes); Adam has two moments (4 + 3 values)."""

OPTIMIZER = "adamw"
"""Of a training step where none is named."""

CAST = 6
"""Bytes for each value cast between float32 and 16 bits: autocast does it to each weight, and to its gradient."""

MASK = 18
"""Bytes for each value of a weight that stays 2:4: after a step weight and gradient, in float32, are read and written
with a mask of one byte, as `masks.enforce` and its hooks do it."""


def traffic(machine: Machine, nbytes: float) -> float:
    """Return the seconds that so many bytes of memory take, without a launch."""
    return nbytes / (machine.bandwidth * FITTED.memory)


def own_pass(machine: Machine, nbytes: float) -> float:
    """Return the seconds of a kernel that passes so many bytes, its launch included."""
    return FITTED.launch_of(machine) + traffic(machine, nbytes)


def value_bytes(dtype: str) -> float:
    """Return the bytes of a value between layers: those of the computing type, 16 bits at most."""
    return min(BITS[dtype], 16) / 8


def is_cold(machine: Machine, dtype: str, products: Sequence[Product]) -> bool:
    """Say whether weights come from memory: together they do not fit the cache."""
    weights = {product.weight: product.values for product in products if product.weight}
    return sum(weights.values()) * BITS[dtype] / 8 > FITTED.cache * machine.l2


def depthwise(product: Product, machine: Machine, dtype: str) -> float:
    """Return the seconds of a depthwise convolution, or of one of its gradients: both sides pass once.

    Libraries have direct kernels for it (cuDNN, torch), which no matrix unit bounds. Each of the three products reads
    or writes the input's places and the output's once; the filters are nothing beside them.
    """
    assert product.positions is not None
    values = (product.positions + product.m * product.n) * product.batch
    return own_pass(machine, values * value_bytes(dtype))


def pack_weight(machine: Machine, dtype: str, values: int) -> float:
    """Return the seconds of masking and packing a float32 weight for one product: read once, written packed."""
    return own_pass(machine, values * (4 + stored_bytes(dtype, sparse=True)))


def pack_gradient(machine: Machine, dtype: str, values: int, *, reads: int) -> float:
    """Return the seconds of choosing and packing half of a gradient: read so often, written once, packed."""
    nbytes = values * (reads * value_bytes(dtype) + stored_bytes(dtype, sparse=True))
    return reads * FITTED.launch_of(machine) + traffic(machine, nbytes)
