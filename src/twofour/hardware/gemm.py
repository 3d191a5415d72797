"""gemm: seconds of one product."""

from __future__ import annotations

from twofour.errors import HardwareError
from twofour.hardware.costs import Costs, costs
from twofour.hardware.machine import Machine, group_of
from twofour.hardware.machines import machine as find
from twofour.hardware.sizes import require_integers


def gemm(
    machine: str | Machine, dtype: str, *, m: int, n: int, k: int, sparse: bool = False, cold: bool = False
) -> float:
    """Predict the seconds of (m, k) by (k, n) among repetitions of itself, as benchmarks measure it.

    What is modelled and how far it is from published times: docs/hardware.md.

    Args:
        machine: A name in `MACHINES`, or a machine.
        dtype: Computing type, one of `DTYPES`.
        m: Tokens.
        n: Outputs.
        k: Reduction.
        sparse: Whether the weight (n, k) is 2:4 along k; 1:2 in tf32, 4:8 pairs in int4.
        cold: Whether the weight stands in memory; else in the last cache, where it fits.

    Raises:
        HardwareError: The machine is unknown or has no unit for this, or a size is impossible.
    """
    return float(explain(machine, dtype, m=m, n=n, k=k, sparse=sparse, cold=cold).seconds[0])


def explain(
    machine: str | Machine, dtype: str, *, m: int, n: int, k: int, sparse: bool = False, cold: bool = False
) -> Costs:
    """Return what `gemm` adds up: seconds of the units, of memory, of the power limit, joules, bytes; arrays of one.

    Raises:
        HardwareError: As `gemm`.
    """
    device = find(machine)
    device.peak(dtype, sparse=sparse)
    m, n, k = require_integers("a product cannot have this size", "m tokens, n outputs, k reduction", m=m, n=n, k=k)
    group = group_of(dtype)
    if sparse and k % group:
        raise HardwareError(
            f"a reduction of {k} cannot be sparse in {dtype}",
            got=f"k={k}",
            wanted=f"a multiple of {group}",
            remedy=f"k={-(-k // group) * group} with zeros, or sparse=False",
        )
    return costs(device, dtype, sparse, m, n, k, cold=cold)
