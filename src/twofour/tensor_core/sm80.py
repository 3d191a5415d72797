"""The layout of CUTLASS's Ampere kernels, which torch's CUTLASS operators take: values in order, metadata reordered.

The metadata is the registers' own order: 128 bytes hold the words of the 32 lanes of a warp, for one K of the widest
`mma.sp` and as many tiles of 16 rows as there are selectors, so that an `ldmatrix` of it lands in place. Blocks of
rows follow each other within a K, then come the next columns. torch calls that "reordered" metadata
(torch/sparse/_semi_structured_conversions.py, the oracle of our tests).
"""

from __future__ import annotations

import torch
from torch import Tensor

from twofour.errors import PackingError
from twofour.tensor_core.element import Element, element
from twofour.tensor_core.fragments import metadata_codes, shared_metadata
from twofour.tensor_core.instruction import Instruction, widest
from twofour.tensor_core.operand import Operand, require_operand, unit_positions


def evidence(kind: str | Element) -> str:
    """Say how far this layout is known for an element type."""
    name = element(kind).name
    if name in ("f16", "bf16", "tf32", "s8"):
        return "equal to torch's packer"
    return "derived, unverified"


def to_sm80(operand: Operand) -> tuple[Tensor, Tensor]:
    """Write an operand in the layout of torch's CUTLASS operators.

    Args:
        operand: (m, k); m a multiple of 16 (8- and 4-bit types) or 32, k of the widest `mma.sp`'s.

    Returns:
        Values (m, k / 2), and metadata (m, k / 16) int16, or int32 (m, k / 32) for s8, u8, e4m3, e5m2 and
        (m, k / 64) for 4-bit types; tf32: int16 (m, k / 8). 4-bit values are packed two a byte, the first low.

    Raises:
        PackingError: The shape is no multiple of the tile.
    """
    row = widest(operand.element)
    require_operand(operand, row.m * row.selectors, row.k, "CUTLASS layout")
    m, k = operand.shape
    tiles = operand.codes.view(m // (row.m * row.selectors), row.selectors, row.m, k // row.k, row.chunks)
    words = shared_metadata(row, tiles.permute(3, 0, 1, 2, 4))
    meta = words.view(_meta_dtype(row)).view(m, -1)
    values = operand.values
    if operand.element.bits == 4:
        bits = operand.element.raw(values)
        values = (bits[:, 0::2] | bits[:, 1::2] << 4).to(torch.uint8)
    return values, meta


def from_sm80(values: Tensor, meta: Tensor, kind: str | Element) -> Operand:
    """Read an operand back from the layout of torch's CUTLASS operators.

    Raises:
        PackingError: Shapes or dtypes do not fit together, or a code is undefined.
    """
    kind = element(kind)
    row = widest(kind)
    if kind.bits == 4 and values.dtype == torch.uint8 and values.ndim == 2:
        stored = values.to(torch.int64)
        values = kind.from_raw(torch.stack((stored & 0xF, stored >> 4), -1).flatten(1))
    dtype, rows = _meta_dtype(row), 16 * row.selectors
    per_meta = dtype.itemsize * 2 * kind.chunk  # dense columns that an element of the metadata describes
    wanted = (len(values), values.shape[1] * 2 // per_meta) if values.ndim == 2 else None
    fits = tuple(meta.shape) == wanted and (values.dtype, meta.dtype) == (kind.dtype, dtype)
    if not fits or len(values) % rows or values.shape[1] * 2 % row.k:
        raise PackingError(
            f"this is no {kind.name} operand in the CUTLASS layout",
            got=f"values {tuple(values.shape)} {values.dtype}, metadata {tuple(meta.shape)} {meta.dtype}",
            wanted=f"values {kind.dtype} (m, k / 2), metadata {dtype} {wanted}, m a multiple of {rows}, k of {row.k}",
        )
    m, k = len(values), values.shape[1] * 2
    words = meta.contiguous().view(-1).view(torch.int32).view(k // row.k, m // rows, 32)
    tiles = torch.stack([metadata_codes(row, words, s) for s in range(row.selectors)], 2)
    codes = tiles.permute(1, 2, 3, 0, 4).reshape(m, k // kind.chunk)
    unit_positions(codes, kind, ordered=True)
    return Operand(kind, values, codes)


def _meta_dtype(row: Instruction) -> torch.dtype:
    return torch.int16 if row.selectors == 2 else torch.int32
