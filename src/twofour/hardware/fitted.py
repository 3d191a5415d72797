"""Fitted: the few numbers that no data sheet has, and the command that made them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from twofour.hardware.machine import Machine
from twofour.hardware.machines import MACHINES

GPU = ("launch", "sparse_launch", "sustained", "sparse_sustained")
"""Constants that each GPU has for itself."""


@dataclass(frozen=True)
class Fitted:
    """Constants of `costs` fitted to published GEMM times; `python experiments/hardware.py` makes them again.

    Attributes:
        launch: Seconds from launch to the first instruction and from the last to the next launch, by GPU.
        sparse_launch: Further seconds of a sparse product, by GPU.
        sustained: Fraction of the dense float16 peak that the power limit allows, by GPU; above 1 the clock limits.
        sparse_sustained: The same of the sparse float16 peak.
        tile: Seconds to fill and drain the pipeline of one dense tile, at 1.5 GHz.
        sparse_tile: The same for a sparse one.
        split: Seconds to sum the parts where the reduction is split.
        load_sync: Bytes a cycle that a unit loads with asynchronous copies by its threads (Ampere, Ada).
        load_async: The same with a copy engine (TMA: Hopper, Blackwell).
        step_sync: Least seconds for each element of the reduction, latency of the loads, threads copying.
        memory: Fraction of the published memory bandwidth that a product reaches.
        cache: Fraction of the last cache that holds operands from one run to the next.
        load_energy: Joules for each byte loaded by a tile.
        float8_energy: Energy of a float8 operation, times the float16 one over the ratio of their peaks.
        int8_energy: The same for int8, where the GPU has float8 units.
        int8_energy_sync: The same on GPUs before Hopper.
        quantized: How far the last wave counts whole, dense: 1 as `ceil`, 0 as if work were divided evenly.
        sparse_quantized: The same for a sparse product.
        issue: Fraction of the peak that the units reach when nothing else limits.
        sparse_issue_async: The same, sparse, from Hopper on: shared memory has to deliver the dense operand twice as
            fast as for a dense product.
    """

    launch: Mapping[str, float] = field(hash=False)
    sparse_launch: Mapping[str, float] = field(hash=False)
    sustained: Mapping[str, float] = field(hash=False)
    sparse_sustained: Mapping[str, float] = field(hash=False)
    tile: float = 2.48e-07
    sparse_tile: float = 2.45e-07
    split: float = 4.13e-06
    load_sync: float = 32.5
    load_async: float = 99.1
    step_sync: float = 2.84e-09
    memory: float = 0.698
    cache: float = 0.334
    load_energy: float = 2.42e-11
    float8_energy: float = 1.1
    int8_energy: float = 0.914
    int8_energy_sync: float = 1.62
    quantized: float = 0.317
    sparse_quantized: float = 0.657
    issue: float = 1.1
    sparse_issue_async: float = 0.644

    def __post_init__(self) -> None:
        for name in GPU:
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def launch_of(self, machine: Machine, sparse: bool) -> float:
        """Return the seconds of a launch: fitted for the machine or its family, else the mean of the others."""
        known = self._known(machine)
        of = {name: first + self.sparse_launch[name] * sparse for name, first in self.launch.items()}
        return of[known] if known else sum(of.values()) / len(of)

    def sustained_of(self, machine: Machine, sparse: bool) -> float:
        """Return the fraction of the float16 peak that the power limit allows.

        Power goes with the square of a unit's rate (its energy per operation with the rate, see `costs`), so a board
        of the same family with another limit, number of units or clock sustains what keeps watts / units the same
        function of the rate. An unknown family has the geometric mean of the others.
        """
        known, of = self._known(machine), self.sparse_sustained if sparse else self.sustained
        if known is None:
            return math.exp(sum(map(math.log, of.values())) / len(of))
        like = MACHINES[known]
        if like == machine:
            return of[known]
        watts, units = machine.watts / like.watts, machine.units / like.units
        return of[known] * math.sqrt(watts * units) * like.peak("float16") / machine.peak("float16")

    def energy_of(self, machine: Machine, dtype: str) -> float:
        """Return what an operation takes over a float16 one at the same fraction of its own peak."""
        if dtype in ("int8", "int4"):
            return self.int8_energy if machine.copy_engine else self.int8_energy_sync
        return self.float8_energy if dtype == "float8" else 1.0

    def _known(self, machine: Machine) -> str | None:
        if machine.name in self.sustained:
            return machine.name
        return next((name for name in self.sustained if MACHINES[name].family == machine.family), None)


FITTED = Fitted(
    launch={"a100-pcie": 4.97e-06, "h100-pcie": 4.32e-06, "b200": 4.69e-06, "rtx-4090": 8.33e-06},
    sparse_launch={"a100-pcie": 9.1e-07, "h100-pcie": 1.7e-06, "b200": 8.45e-07, "rtx-4090": 4.84e-07},
    sustained={"a100-pcie": 0.794, "h100-pcie": 0.735, "b200": 0.817, "rtx-4090": 1.13},
    sparse_sustained={"a100-pcie": 0.666, "h100-pcie": 0.503, "b200": 1.08, "rtx-4090": 1.02},
)
"""From `python experiments/hardware.py`, every second row of the data but the odd ones, three digits."""
