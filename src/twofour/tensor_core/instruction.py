"""The sparse instructions as data: shapes, types, registers and who supplies the metadata, each with its PTX section.

Numbers of sections are those of PTX ISA 9.0. `confirmed` says on which GPUs they ran.
"""

from __future__ import annotations

from dataclasses import dataclass

from twofour.errors import PackingError, one_of
from twofour.tensor_core.element import ELEMENTS, WORD, Element, element

DERIVED = "derived, unverified"
"""The mapping follows from the text of the PTX ISA and from its neighbours; nothing that runs has agreed yet."""

CHECKED = "cross-checked, not run on a GPU"
"""Code of others maps alike that runs on GPUs: torch's packer as CUTLASS reads it, CuTe's layouts, TVM's tests."""

CONFIRMED = ("sm_90",)
"""Where `check` found every instruction here, and those of single bits, to be the emulator's: an H100, whose record is
`tests/tensor_core/records/sm_90.json`."""


@dataclass(frozen=True)
class Instruction:
    """One shape of `mma.sp` or `wgmma.mma_async.sp` for one type of A.

    Attributes:
        family: "mma.sp" (a warp) or "wgmma.sp" (four warps, stacked along M).
        m: Rows of A and D.
        k: Dense columns of A, rows of B.
        a: Element type of A.
        partners: Element types that B may have.
        accumulators: Types that C and D may have.
        holders: Lanes of each four that supply metadata: 1, 2 or 4.
        rows_per_word: Rows of A that a lane's metadata register describes: 2 (half a register each) or 1.
        arch: First architecture.
        section: PTX ISA 9.0, section of the fragments.
        cross_checked: Whether code of others that runs on GPUs maps alike.
        confirmed: Architectures on which the probe agreed with the emulator, bit for bit.
    """

    family: str
    m: int
    k: int
    a: Element
    partners: tuple[Element, ...]
    accumulators: tuple[str, ...]
    holders: int
    rows_per_word: int
    arch: str
    section: str
    cross_checked: bool = False
    confirmed: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For example "mma.sp.m16n8k32.bf16" or "wgmma.sp.m64nNk32.bf16"."""
        n = "n8" if self.family == "mma.sp" else "nN"
        return f"{self.family}.m{self.m}{n}k{self.k}.{self.a.name}"

    @property
    def lanes(self) -> int:
        """Threads that execute it together."""
        return 32 if self.family == "mma.sp" else 128

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns N of B and D that it may have (9.7.15.2 "Shape" for wgmma)."""
        if self.family == "mma.sp":
            return (8,)
        return (8, 16, 24, *range(32, 257, 16)) if self.a.integer else tuple(range(8, 257, 8))

    @property
    def selectors(self) -> int:
        """Legal sparsity selectors: 0 up to one less than this."""
        return 4 // self.holders

    @property
    def chunks(self) -> int:
        """Chunks, so codes, of a row of A."""
        return self.k // self.a.chunk

    @property
    def a_registers(self) -> int:
        """32-bit registers of A that a lane holds."""
        return 16 * self.k // 2 * self.a.bits // (32 * WORD)

    @property
    def b_registers(self) -> int:
        """32-bit registers of B that a lane holds; 0 where B is read from shared memory."""
        return 8 * self.k * self.a.bits // (32 * WORD) if self.family == "mma.sp" else 0

    @property
    def evidence(self) -> str:
        """How far the mapping of lanes and registers is known: `DERIVED`, `CHECKED`, or where it was confirmed."""
        if self.confirmed:
            return f"confirmed on {', '.join(self.confirmed)}"
        return CHECKED if self.cross_checked else DERIVED

    def ptx(self, accumulator: str, b: str, n: int = 8, *, ordered: bool = False) -> str:
        """Return the opcode, for example `mma.sp.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32`."""
        types = f"{self.a.name}.{b}"
        if self.family == "wgmma.sp":
            return f"wgmma.mma_async.sp.sync.aligned.m64n{n}k{self.k}.{accumulator}.{types}"
        opcode = "mma.sp::ordered_metadata" if ordered else "mma.sp"
        return f"{opcode}.sync.aligned.m16n8k{self.k}.row.col.{accumulator}.{types}.{accumulator}"


def _row(
    family: str, k: int, a: str, section: str, holders: int, *, arch: str = "sm_80", checked: bool = False
) -> Instruction:
    kind = ELEMENTS[a]
    partners = {"8w": ("s8", "u8"), "4w": ("s4", "u4"), "8": ("e4m3", "e5m2")}
    whole = f"{kind.bits}{'w' if kind.integer else ''}"
    halves = a == "f16" or (family == "wgmma.sp" and a in ("e4m3", "e5m2"))
    return Instruction(
        family,
        16 if family == "mma.sp" else 64,
        k,
        kind,
        tuple(ELEMENTS[name] for name in partners.get(whole, (a,))),
        ("s32",) if kind.integer else ("f32", "f16") if halves else ("f32",),
        holders,
        2 if kind.bits >= 16 else 1,
        arch,
        section,
        checked,
        CONFIRMED,
    )


_MMA, _WGMMA = "9.7.14.6.2", "9.7.15.6.2"

MMA_SP = (
    _row("mma.sp", 16, "f16", f"{_MMA}.1", 1, checked=True),
    _row("mma.sp", 16, "bf16", f"{_MMA}.1", 1, checked=True),
    _row("mma.sp", 32, "f16", f"{_MMA}.2", 2, checked=True),
    _row("mma.sp", 32, "bf16", f"{_MMA}.2", 2, checked=True),
    _row("mma.sp", 16, "tf32", f"{_MMA}.3", 2, checked=True),
    _row("mma.sp", 8, "tf32", f"{_MMA}.4", 1),
    _row("mma.sp", 32, "s8", f"{_MMA}.5", 2),
    _row("mma.sp", 32, "u8", f"{_MMA}.5", 2),
    _row("mma.sp", 64, "s8", f"{_MMA}.6", 4, checked=True),
    _row("mma.sp", 64, "u8", f"{_MMA}.6", 4, checked=True),
    _row("mma.sp", 64, "e4m3", f"{_MMA}.6", 4, arch="sm_89", checked=True),
    _row("mma.sp", 64, "e5m2", f"{_MMA}.6", 4, arch="sm_89", checked=True),
    _row("mma.sp", 64, "s4", f"{_MMA}.7", 2),
    _row("mma.sp", 64, "u4", f"{_MMA}.7", 2),
    _row("mma.sp", 128, "s4", f"{_MMA}.8", 4),
    _row("mma.sp", 128, "u4", f"{_MMA}.8", 4),
)
"""Every shape of `mma.sp` and `mma.sp::ordered_metadata` for these types; `.kind::` forms of sm_120a are not here."""

WGMMA_SP = (
    _row("wgmma.sp", 32, "f16", f"{_WGMMA}.1", 2, arch="sm_90a", checked=True),
    _row("wgmma.sp", 32, "bf16", f"{_WGMMA}.1", 2, arch="sm_90a", checked=True),
    _row("wgmma.sp", 16, "tf32", f"{_WGMMA}.2", 2, arch="sm_90a", checked=True),
    _row("wgmma.sp", 64, "s8", f"{_WGMMA}.3", 4, arch="sm_90a", checked=True),
    _row("wgmma.sp", 64, "u8", f"{_WGMMA}.3", 4, arch="sm_90a", checked=True),
    _row("wgmma.sp", 64, "e4m3", f"{_WGMMA}.3", 4, arch="sm_90a", checked=True),
    _row("wgmma.sp", 64, "e5m2", f"{_WGMMA}.3", 4, arch="sm_90a", checked=True),
)
"""Every K of `wgmma.mma_async.sp`; N is one of `widths`."""

INSTRUCTIONS = {row.name: row for row in (*MMA_SP, *WGMMA_SP)}
"""Name -> instruction, all of them."""


def instruction(name: str) -> Instruction:
    """Look an instruction up, for example "mma.sp.m16n8k32.bf16".

    Raises:
        PackingError: There is none of that name.
    """
    one_of("there is no such sparse instruction", name, INSTRUCTIONS, PackingError)
    return INSTRUCTIONS[name]


def widest(kind: Element | str, family: str = "mma.sp") -> Instruction:
    """Return the family's instruction with the largest K for this type of A, given as in `Operand.from_dense`.

    Raises:
        PackingError: The family has none (`wgmma.sp` takes no 4-bit types), or there is no such type.
    """
    kind = element(kind)
    rows = [row for row in INSTRUCTIONS.values() if row.family == family and row.a == kind]
    if not rows:
        raise PackingError(
            f"{family} has no instruction for {kind.name}",
            got=kind.name,
            wanted=", ".join(sorted({row.a.name for row in INSTRUCTIONS.values() if row.family == family})),
        )
    return max(rows, key=lambda row: row.k)
