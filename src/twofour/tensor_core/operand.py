"""The sparse operand A as every layout stores it: kept values, and one 4-bit code for each chunk of a row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from twofour.errors import PackingError
from twofour.packing import Header, Packed, encodings
from twofour.packing.encodings import TF32_CODES
from twofour.tensor_core.element import Element, element

CODES = (0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110)
"""Codes of two ascending positions: low two bits the first, high two bits the second (PTX ISA 9.0, 9.7.14.6.1)."""

_CANONICAL = {"float16": "f16", "bfloat16": "bf16", "tf32": "tf32", "int8": "s8", "int4": "s4"}
"""Encoding of a packed weight -> element type."""


@dataclass(frozen=True, eq=False)
class Operand:
    """Matrix A of a sparse product, (m, k) dense, in no particular layout.

    Attributes:
        element: The type of its values.
        values: Kept values (m, k / 2), in `element.dtype`.
        codes: uint8 (m, k / element.chunk), one code a chunk, chunks in their order.
    """

    element: Element
    values: Tensor
    codes: Tensor

    def __post_init__(self) -> None:
        kind, values, codes = self.element, self.values, self.codes
        wanted = (len(values), values.shape[1] // kind.kept) if values.ndim == 2 else None
        if values.dtype != kind.dtype or codes.dtype != torch.uint8 or tuple(codes.shape) != wanted:
            raise PackingError(
                f"values and codes make no operand of {kind.name}",
                got=f"values {tuple(values.shape)} {values.dtype}, codes {tuple(codes.shape)} {codes.dtype}",
                wanted=f"values (m, k / 2) {kind.dtype}, codes (m, k / {kind.chunk}) torch.uint8",
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Dense rows and columns."""
        return self.values.shape[0], self.values.shape[1] * 2

    @classmethod
    def from_packed(cls, packed: Packed) -> Operand:
        """Read a canonical packed weight; its scales stay with it, for the epilogue.

        Raises:
            PackingError: Its pattern or dtype is none that Sparse Tensor Cores read, or it is damaged.
        """
        header = packed.header
        if header.dtype not in _CANONICAL or header.parsed() != header.encoding.core:
            raise PackingError(
                "Sparse Tensor Cores cannot read this packed weight",
                got=f"pattern {header.pattern}, dtype {header.dtype}",
                wanted="2:4 in float16, bfloat16 or int8; 1:2 in tf32; 4:8-pairs in int4",
                remedy="float32 weights: pack(weight, pattern, dtype=...) rounds them to one of these",
            )
        packed.validate()
        kind = element(_CANONICAL[header.dtype])
        codes = torch.stack((packed.indices & 0xF, packed.indices >> 4), -1).flatten(1)
        values = header.encoding.read(packed.values, header.format.kept)
        return cls(kind, values, codes[:, : header.reduction // kind.chunk].contiguous())

    def to_packed(self) -> Packed:
        """Return the canonical packed weight (m, k) with these values and positions.

        Raises:
            PackingError: The canonical form has no such type (u8, u4, e4m3, e5m2), or a code is illegal there.
        """
        name = next((name for name, kind in _CANONICAL.items() if kind == self.element.name), None)
        if name is None:
            raise PackingError(
                f"the canonical packed form has no {self.element.name}",
                got=self.element.name,
                wanted=", ".join(_CANONICAL.values()),
                remedy="keep the operand, or one of its layouts",
            )
        encoding = encodings.get(name)
        assert encoding.core is not None, encoding
        even = torch.nn.functional.pad(self.codes, (0, self.codes.shape[1] % 2))
        indices = even[:, 0::2] | even[:, 1::2] << 4
        packed = Packed(Header(encoding.core.name, name, self.shape, 1), encoding.store(self.values), indices)
        packed.validate()
        return packed

    @classmethod
    def from_dense(cls, dense: Tensor, kind: str | Element) -> Operand:
        """Compress a dense matrix that obeys the type's pattern: the non-zeros of each chunk, then its lowest zeros.

        Args:
            dense: (m, k) in the type's dtype (see `ELEMENTS`); -0.0 counts as zero.
            kind: The element type or its name.

        Raises:
            PackingError: Another dtype or shape, or a chunk with too many non-zeros.
        """
        kind = element(kind)
        if dense.ndim != 2 or dense.dtype != kind.dtype or not dense.numel() or dense.shape[1] % kind.chunk:
            raise PackingError(
                f"this is no matrix of {kind.name}",
                got=f"{tuple(dense.shape)} {dense.dtype}",
                wanted=f"(m, k) {kind.dtype}, k a multiple of {kind.chunk}",
            )
        dense = dense.detach().cpu().contiguous()
        units = _nonzero(dense, kind).view(len(dense), -1, kind.chunk // kind.unit, kind.unit).any(-1)
        kept = kind.kept // kind.unit
        if bool((units.sum(-1, dtype=torch.uint8) > kept).any()):
            row, chunk = (units.sum(-1) > kept).nonzero()[0].tolist()
            start = chunk * kind.chunk
            raise PackingError(
                f"the matrix is not sparse as {kind.name} asks",
                got=f"row {row}, columns {start} to {start + kind.chunk - 1}: {int(units[row, chunk].sum())} units",
                wanted=f"at most {kept} non-zero units of {kind.unit} in every {kind.chunk} values",
                remedy=f'prune first: dense *= patterns.parse("{_pattern(kind)}").project(dense, absolute=True)',
            )
        codes = _codes(kind)[
            (units.to(torch.uint8) << torch.arange(units.shape[-1], dtype=torch.uint8, device="cpu")).sum(-1)
        ]
        positions = unit_positions(codes, kind, ordered=True).unsqueeze(-1)
        stored = kind.stored(dense).view(*units.shape, kind.unit)
        picked = stored.gather(2, positions.expand(*positions.shape[:-1], kind.unit))
        return cls(kind, picked.flatten(1).view(kind.dtype), codes)

    def to_dense(self) -> Tensor:
        """Return the dense matrix (m, k) in the element's dtype.

        Raises:
            PackingError: A code names a position twice, or is none that tf32 knows.
        """
        positions = unit_positions(self.codes, self.element, ordered=False)
        kind, (rows, columns) = self.element, self.shape
        bits = kind.raw(self.values).view(*positions.shape, kind.unit)
        dense = torch.zeros(
            rows, columns // kind.chunk, kind.chunk // kind.unit, kind.unit, dtype=torch.int64, device="cpu"
        )
        dense.scatter_(2, positions.unsqueeze(-1).expand_as(bits), bits)
        return kind.from_raw(dense.view(rows, columns))

    def padded(self, rows: int, columns: int) -> Operand:
        """Return the operand with zero rows and columns added, up to multiples of `rows` and `columns`."""
        kind, (m, k) = self.element, self.shape
        down, right = -m % rows, -k % columns
        bits = torch.nn.functional.pad(kind.raw(self.values), (0, right // 2, 0, down))
        codes = torch.nn.functional.pad(self.codes, (0, right // kind.chunk, 0, down), value=CODES[0])
        return Operand(kind, kind.from_raw(bits), codes)


def unit_positions(codes: Tensor, kind: Element, *, ordered: bool) -> Tensor:
    """Read codes as positions of the kept units in their chunks.

    Args:
        codes: Integers below 16, any shape.
        kind: The element type; tf32 keeps one unit, the others two.
        ordered: Take only ascending positions, as `mma.sp::ordered_metadata` does.

    Returns:
        int64 (..., 1 or 2).

    Raises:
        PackingError: A code whose behaviour PTX leaves undefined (9.7.14.6.1).
    """
    codes = codes.to(torch.int64)
    legal = TF32_CODES if kind.name == "tf32" else CODES
    wrong = ~torch.isin(codes, torch.tensor(legal, dtype=torch.int64, device="cpu"))
    if kind.name != "tf32" and not ordered:
        wrong = (codes & 3) == (codes >> 2)
    if bool(wrong.any()):
        raise PackingError(
            "the metadata holds a code whose behaviour is undefined",
            got=f"{int(codes[wrong][0]):#06b}",
            wanted=", ".join(f"{code:#06b}" for code in legal),
            remedy="pack the weight again; every chunk needs distinct positions, ascending where the order matters",
        )
    if kind.name == "tf32":
        return (codes >> 1 & 1).unsqueeze(-1)
    return torch.stack((codes & 3, codes >> 2), -1)


def require_operand(operand: Operand, rows: int, columns: int, layout: str) -> None:
    """Refuse an operand whose shape is no multiple of a layout's tile.

    Raises:
        PackingError: `m` is no multiple of `rows` or `k` none of `columns`.
    """
    m, k = operand.shape
    if m % rows or k % columns:
        raise PackingError(
            f"the {layout} of {operand.element.name} has no such shape",
            got=f"{m} x {k}",
            wanted=f"a multiple of {rows} rows and of {columns} columns",
            remedy=f"operand.padded({rows}, {columns}) adds zeros",
        )


@cache
def _codes(kind: Element) -> Tensor:
    """The code of each set of non-zero units, bit u of the index for unit u: the non-zeros, then the lowest zeros."""
    count, kept = kind.chunk // kind.unit, kind.kept // kind.unit
    codes = []
    for index in range(1 << count):
        chosen = sorted(sorted(range(count), key=lambda unit: not index >> unit & 1)[:kept])
        codes.append(TF32_CODES[chosen[0]] if kept == 1 else chosen[0] | chosen[1] << 2)
    return torch.tensor(codes, dtype=torch.uint8, device="cpu")


def _nonzero(dense: Tensor, kind: Element) -> Tensor:
    """What is not zero, -0.0 being zero; torch compares no 8-bit floats."""
    return dense.view(torch.uint8) & 0x7F != 0 if kind.bits == 8 and not kind.integer else dense != 0


def _pattern(kind: Element) -> str:
    return "1:2" if kind.chunk == 2 else "4:8-pairs" if kind.unit == 2 else "2:4"
