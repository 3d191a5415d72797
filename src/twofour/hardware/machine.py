"""Machine: what a processor with a sparse matrix unit can do at most, each number with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from twofour.errors import HardwareError, one_of
from twofour.packing import encodings, formats

BITS = MappingProxyType({encoding.name: encoding.bits for encoding in encodings.known()})
"""Bits of a stored value; tf32 is stored as float32."""

DTYPES = tuple(encoding.name for encoding in encodings.known() if encoding not in encodings.LOW_BITS)
"""Types that `gemm` and `estimate` know, widest first: those that some machine's matrix unit computes in."""

CORE = MappingProxyType({encoding.name: encoding.core for encoding in encodings.known() if encoding.core is not None})
"""Pattern that a sparse unit multiplies by, in each type that can have one (PTX ISA 9.7.14.6.1)."""

SPARSE_DTYPES = tuple(CORE)
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
        family: Architecture, "ampere", "ada", "hopper", "blackwell", "blackwell-rtx" or another word.
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

    @property
    def graphics(self) -> bool:
        """Whether its units are those of graphics boards: products by threads (mma.sync), a last cache that all share.

        Boards of both families are alike in what bounds them; the libraries run the kernels of Ampere on them.
        """
        return self.family in ("ada", "blackwell-rtx")

    @property
    def halved(self) -> bool:
        """Whether units sum products of floats at half their rate, as on GeForce boards: no power limit shows there."""
        return self.graphics and self.dense["int8"] > 3 * self.dense["float16"]

    def peak(self, dtype: str, *, sparse: bool = False) -> float:
        """Return the published operations a second, a sparse one counted as if its operand were dense.

        Raises:
            HardwareError: The dtype is unknown, or the machine has no unit for it.
        """
        rates = self.sparse if sparse else self.dense
        if dtype in rates:
            return rates[dtype]
        known = tuple(name for name in DTYPES if name in rates)
        one_of(f"the dtype {dtype!r} is unknown", dtype, DTYPES, HardwareError, 'dtype="bfloat16", or another of these')
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
    encoding, width = encodings.get(dtype), 64  # whole bytes of each part
    if not sparse:
        return encoding.bits / 8
    form = formats.find(CORE[dtype])
    assert form is not None, dtype
    return form(CORE[dtype], encoding, 1, width).nbytes / width


def group_of(dtype: str) -> int:
    """Return the values of the reduction in one group of a type's pattern; 4 where no unit fixes one."""
    return CORE[dtype].group if dtype in CORE else 4
