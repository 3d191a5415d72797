"""The price of a product with a weight of blocks on a machine's dense units: a rule that is stated, not a fit.

There were no published times of block-sparse products on these machines to fit. Assumed is:

* Arithmetic, energy and the weight's traffic shrink to the share d of the blocks that stay, and each block costs four
  bytes of index; activations travel as in the dense product, whose launch stays too.
* A program makes the R outputs of a row of blocks for T = min(tokens, 128) tokens. A product of tiles of T by R loads
  (T + R) values for T R multiply-adds, the dense one's tiles of T by 128 load T + 128 for 128 T. The units are used in
  proportion, u = R (T + 128) / (128 (T + R)): 0.4 for R = 32 at 128 tokens, 0.67 for 64, all of them for 128.
* All rows of blocks hold equally many.

Sides below 16 fill no instruction of a tensor core and are refused.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from twofour.errors import HardwareError
from twofour.hardware.costs import STATIC, Costs
from twofour.hardware.fitted import FITTED
from twofour.hardware.machine import BITS, Machine
from twofour.hardware.work import Array
from twofour.patterns import Block

SMALLEST = 16
"""The least side of a block: k of an instruction of 16-bit types, and the smallest tile of Triton's products."""

TILE = 128
"""Tokens and outputs of the dense product's tile."""


def require_large(pattern: Block) -> None:
    """Refuse blocks that no tensor core multiplies.

    Raises:
        HardwareError: A side is below 16.
    """
    if min(pattern.r, pattern.c) < SMALLEST:
        raise HardwareError(
            "blocks this small fill no instruction of the machine's units",
            got=pattern.name,
            wanted=f"sides of {SMALLEST} and more",
            remedy='"block:32x32@0.9", or twofour.advise on the CPU at hand',
        )


def used(pattern: Block, tokens: Array) -> Array:
    """Return which share of the dense product's use of the units a product with these blocks makes."""
    tall, outputs = np.minimum(tokens, TILE), min(pattern.r, TILE)
    return outputs * (tall + TILE) / (TILE * (tall + outputs))


def of_blocks(
    dense: Costs,
    machine: Machine,
    dtype: str,
    pattern: Block,
    m: Array,
    n: Array,
    k: Array,
    batch: Array,
    *,
    cold: bool,
) -> Costs:
    """Return what products with weights of blocks take, from what they take dense.

    Args:
        dense: The prices of the dense products.
        machine: The machine.
        dtype: Computing type.
        pattern: Blocks, of at least 16 by 16.
        m: Tokens of each product.
        n: Outputs.
        k: Reduction.
        batch: Products in a launch.
        cold: Whether the weights come from memory, as in `costs`.
    """
    kept = pattern.density
    weights = n * k * batch * BITS[dtype] / 8
    index = 4 * kept * batch * np.ceil(n / pattern.r) * np.ceil(k / pattern.c)
    traffic = np.maximum(dense.bytes - (1 - kept) * weights * cold, 0) + index * cold
    memory = traffic / (machine.bandwidth * FITTED.memory)
    math, power = dense.math * kept / used(pattern, m), dense.power * kept
    alone = dense.launch + (math**8 + memory**8) ** (1 / 8)
    seconds = (alone**8 + power**8) ** (1 / 8)
    moving = (dense.joules - STATIC * machine.watts * dense.seconds) * kept
    joules = STATIC * machine.watts * seconds + moving
    return replace(dense, seconds=seconds, math=math, memory=memory, power=power, joules=joules, bytes=traffic)
