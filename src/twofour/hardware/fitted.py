"""Fitted: the few numbers that no data sheet has, and the command that made them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from twofour.hardware.machine import Machine
from twofour.hardware.machines import MACHINES

GPU = ("launch", "sustained")
"""Constants that GPUs have for themselves."""

UNLIMITED = 2.0
"""Fraction of the peak where no power limit shows."""

FALLING = 5 / 8
"""Power of a unit's watts by which its sustained rate grows within a family, between 1/2 (power as the square of the
rate) and 1 (voltage at its floor); chosen by one pair of boards, H100 PCIe and SXM: docs/hardware.md."""


@dataclass(frozen=True)
class Fitted:
    """Constants of `costs` fitted to published GEMM times; `python experiments/hardware.py` makes them again.

    Attributes:
        launch: Seconds from launch to the first instruction and from the last to the next launch, by GPU.
        sustained: Fraction of the dense peak that a GPU keeps up, by GPU; one that is in `launch` alone shows no limit.
        sparse_sustained: The same of the sparse peak, over the dense fraction.
        int8_issue: Fraction of the peak that int8 dense products by mma.sync reach; wgmma, on Hopper, is not held back.
        boost: Clock of graphics boards over the published peak's.
        sparse_tile: Further seconds to fill and drain the pipeline of one 2:4 tile, at 1.5 GHz.
        split: Seconds to sum the parts where the reduction is split.
        port: Bytes a cycle that a unit loads where its threads copy.
        load_shared: The same of a graphics board where all units load at once.
        load_async: The same with a copy engine (TMA: Hopper, data-centre Blackwell).
        step: Least seconds for each element of the reduction, latency of the loads, threads copying, dense.
        sparse_step: The same for a 2:4 product.
        memory: Fraction of the published memory bandwidth that a product reaches.
        cache: Fraction of the last cache that holds operands from one run to the next.
        quantized: How far the last wave counts whole: 1 as `ceil`, 0 as if work were divided evenly.
        sparse_issue: Fraction of the sparse peak on Hopper, whose shared memory delivers the dense operand to each 64
            rows of the sparse one, twice as fast as for a dense product.
        margin: Least predicted speed-up at which 2:4 is said to win: the one that tells wins and losses of the rows
            seen best, both weighing the same.
    """

    launch: Mapping[str, float] = field(hash=False)
    sustained: Mapping[str, float] = field(hash=False)
    sparse_sustained: float = 0.821
    int8_issue: float = 0.838
    boost: float = 1.03
    sparse_tile: float = 1.28e-06
    split: float = 5.26e-06
    port: float = 35.5
    load_shared: float = 14
    load_async: float = 66
    step: float = 2.84e-09
    sparse_step: float = 2.34e-09
    memory: float = 0.805
    cache: float = 0.672
    quantized: float = 0.59
    sparse_issue: float = 0.529
    margin: float = 1.14

    def __post_init__(self) -> None:
        for name in GPU:
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def launch_of(self, machine: Machine) -> float:
        """Return the seconds of a launch: fitted for the machine or its family, else the mean of the others."""
        known = self._known(machine)
        return self.launch[known] if known else sum(self.launch.values()) / len(self.launch)

    def sustained_of(self, machine: Machine, sparse: bool) -> float:
        """Return the fraction of its peak that a machine keeps up, by its power limit and its library.

        Boards of one family differ by `FALLING`. Where floats are halved no limit shows, and only kin of the same kind
        are asked. An unknown family has the geometric mean of those that show a limit.
        """
        known = self._known(machine)
        known = known if known and MACHINES[known].halved == machine.halved else None
        if known is not None and known in self.sustained:
            like, share = MACHINES[known], self.sustained[known]
            units, watts = machine.units / like.units, machine.watts / like.watts
            share *= units * (watts / units) ** FALLING * like.peak("float16") / machine.peak("float16")
        elif known is not None or machine.halved or not self.sustained:
            return UNLIMITED
        else:
            share = math.exp(sum(map(math.log, self.sustained.values())) / len(self.sustained))
        return min(share * (self.sparse_sustained if sparse else 1), UNLIMITED)

    def _known(self, machine: Machine) -> str | None:
        if machine.name in self.launch:
            return machine.name
        return next((name for name in self.launch if MACHINES[name].family == machine.family), None)


FITTED = Fitted(
    launch={
        **{"a100-pcie": 6.37e-06, "h100-pcie": 5.05e-06, "b200": 5.78e-06},
        **{"rtx-4090": 7.25e-06, "rtx-5080": 2.86e-06, "gb10": 4.31e-06},
    },
    sustained={"a100-pcie": 0.713, "h100-pcie": 0.591, "b200": 0.704, "gb10": 0.66},
)
"""From `python experiments/hardware.py`, every third row of the data, three digits."""
