"""Machine: what a processor with a sparse matrix unit can do at most, each number with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from twofour.errors import HardwareError

DTYPES = ("float32", "tf32", "float16", "bfloat16", "float8", "int8", "int4")
"""Types that `gemm` and `estimate` know, widest first."""

BITS = MappingProxyType({"float32": 32, "tf32": 32, "float16": 16, "bfloat16": 16, "float8": 8, "int8": 8, "int4": 4})
"""Bits of a stored value; tf32 is stored as float32."""

INDEX_BITS = MappingProxyType({"tf32": 4, "float16": 2, "bfloat16": 2, "float8": 2, "int8": 2, "int4": 1})
"""Bits of selector per kept value: 2 in 2:4, 4 in 1:2 (tf32), 2 for each pair of int4 in 4:8 (PTX ISA, sparse matrix
storage, 9.7.14.6.1)."""

SPARSE_DTYPES = tuple(dtype for dtype in DTYPES if dtype in INDEX_BITS)
"""Those that can have a sparse unit: what `estimate` compares; float32 has none on any machine."""


@dataclass(frozen=True)
class Machine:
    """A processor, by published numbers alone; what was fitted to measurements is in `fitted`.

    Attributes:
        name: As on the command line.
        units: Multiprocessors (or cores) that each own a matrix unit.
        clock: Cycles a second at which the published peaks hold.
        dense: Peak operations a second by dtype, a multiply-add counted as two.
        sparse: The same for a 2:4 operand, counted as if it were dense; a dtype without an entry has no sparse unit.
        bandwidth: Bytes a second of memory.
        l2: Bytes of the last cache that all units share.
        watts: Power limit of the board.
        family: Architecture, "ampere", "ada", "hopper", "blackwell" or another word.
        sources: Where each number comes from, by attribute.
    """

    name: str
    units: int
    clock: float
    dense: Mapping[str, float] = field(hash=False)
    sparse: Mapping[str, float] = field(hash=False)
    bandwidth: float
    l2: float
    watts: float
    family: str
    sources: Mapping[str, str] = field(hash=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("dense", "sparse", "sources"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        wrong = [name for name in ("units", "clock", "bandwidth", "l2", "watts") if not getattr(self, name) > 0]
        if wrong:
            raise HardwareError(
                f"the machine `{self.name}` cannot exist",
                got=", ".join(f"{name}={getattr(self, name)}" for name in wrong),
                wanted="positive numbers",
                remedy="give every number of the machine in units, hertz, bytes and watts",
            )

    @property
    def copy_engine(self) -> bool:
        """Whether tiles are fetched by a copy engine (TMA) while the threads compute: Hopper and later."""
        return self.family in ("hopper", "blackwell")

    def peak(self, dtype: str, *, sparse: bool = False) -> float:
        """Return the published operations a second, a sparse one counted as if its operand were dense.

        Raises:
            HardwareError: The dtype is unknown, or the machine has no unit for it.
        """
        rates = self.sparse if sparse else self.dense
        if dtype in rates:
            return rates[dtype]
        known = tuple(name for name in DTYPES if name in rates)
        if dtype not in DTYPES:
            raise HardwareError(
                f"the dtype {dtype!r} is unknown",
                got=repr(dtype),
                wanted=f"one of {', '.join(DTYPES)}",
                remedy='dtype="bfloat16", or another of these',
            )
        kind = "2:4" if sparse else "dense"
        raise HardwareError(
            f"{self.name} has no {kind} matrix unit for {dtype}",
            got=f"dtype={dtype!r}, sparse={sparse}",
            wanted=f"one of {', '.join(known)}",
            remedy=self._remedy(dtype, sparse),
        )

    def _remedy(self, dtype: str, sparse: bool) -> str:
        rates = self.sparse if sparse else self.dense
        if dtype == "float32" and sparse:
            return 'dtype="tf32" keeps float32 storage and has a sparse unit' if "tf32" in rates else "sparse=False"
        nearest = {"int4": ("int8", "float8"), "float8": ("int8", "bfloat16"), "tf32": ("bfloat16", "float32")}
        other = next((name for name in nearest.get(dtype, ()) if name in rates), next(iter(rates), None))
        return f'dtype="{other}"' if other else "another machine"


def stored_bytes(dtype: str, *, sparse: bool) -> float:
    """Return bytes of a weight as the unit reads it, per dense value: half the values and their selectors when sparse.

    bfloat16 has 9/16 of its dense bytes, int8 5/8, tf32 9/16 (NVIDIA, cuSPARSELt's compressed sizes).
    """
    bits = BITS[dtype]
    return (bits + INDEX_BITS[dtype]) / 16 if sparse else bits / 8
