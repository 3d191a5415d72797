"""The price of a product with a weight of two regions on units of 2:4: a rule that is stated, not a fit.

Nobody has published times of such products on these machines, and no library has one. Priced is what the CPU's kernels
do and what a library of 2:4 could be given today:

* A dense group of four inputs is two groups of 2:4 on the same inputs. So the product is one of 2:4 whose reduction is
  k + 4 d with d dense groups, priced as every other product of 2:4. In units that do 2:4 at twice the dense rate the
  dense region takes what it takes dense, and S % of dense groups leave (100 + S) / 200 of the arithmetic.
* A library reads one matrix, so the widened input is written before: one pass that reads it as it was and writes it
  with 4 d inputs more, its launch included. A convolution's image is passed once, not once for each tap.

Two products, one of each region, would read the input in two parts and add their answers in memory: not priced.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from twofour.hardware.costs import STATIC, Costs, costs
from twofour.hardware.fitted import FITTED
from twofour.hardware.machine import Machine
from twofour.hardware.passes import traffic, value_bytes
from twofour.hardware.work import Array
from twofour.patterns import Hybrid


def of_regions(
    machine: Machine,
    dtype: str,
    pattern: Hybrid,
    m: Array,
    n: Array,
    k: Array,
    batch: Array,
    *,
    cold: bool,
    repeats: Array,
) -> Costs:
    """Return what products with weights of 2:4 and dense groups take.

    Args:
        machine: The machine, with a unit for 2:4 in `dtype`.
        dtype: Computing type.
        pattern: 2:4 and the share of dense groups.
        m: Tokens of each product.
        n: Outputs.
        k: Reduction, a multiple of 4 where the weight can be sparse.
        batch: Products in a launch.
        cold: Whether the weights come from memory, as in `costs`.
        repeats: How often a value of the input stands in its matrix, as in `costs`.
    """
    dense = np.array([pattern.dense_of(int(inputs) // pattern.m) for inputs in k], dtype=np.float64)
    wide = k + pattern.m * dense
    found = costs(machine, dtype, True, m, n, wide, batch=batch, cold=cold, repeats=(repeats, 1))
    nbytes = batch * m * (k + wide) / repeats * value_bytes(dtype)
    passing = np.array([traffic(machine, each) for each in nbytes])
    own = np.where(dense > 0, FITTED.launch_of(machine) + passing, 0.0)
    return replace(
        found,
        seconds=found.seconds + own,
        launch=found.launch + np.where(dense > 0, FITTED.launch_of(machine), 0.0),
        memory=found.memory + np.where(dense > 0, passing, 0.0),
        joules=found.joules + STATIC * machine.watts * own,
        bytes=found.bytes + np.where(dense > 0, nbytes, 0.0),
    )
