"""The index stream of the canonical format: which values of each group were kept.

Index i of a kept value takes b = ceil(log2(M)) bits; the indices of a group stand in ascending order, those of a row
one after the other, least significant bit first, and each row is padded to whole bytes with zero bits. For 2:4 that is
one nibble a group: low two bits the first position, high two bits the second (PTX ISA, "Sparse matrix storage").
Where the encoding has codes of its own (tf32), each group's one index is written as the 4-bit code of that position.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from twofour.packing.formats.base import illegal
from twofour.patterns.base import first_true
from twofour.shapes import Int, Int64, UInt8

CODE_BITS = 4
"""Bits of a hardware's code."""


def index_bits(units: int, codes: Sequence[int] = ()) -> int:
    """Return the bits of one index into a group of `units` values (or pairs): ceil(log2(units)), or those of a code."""
    return CODE_BITS if codes else (units - 1).bit_length()


def encode(
    positions: Int[Tensor, "rows groups kept"], units: int, codes: Sequence[int] = ()
) -> UInt8[Tensor, "rows bytes"]:
    """Write ascending positions as an index stream.

    Args:
        positions: Integers (rows, groups, kept), ascending in the last axis, each below `units`.
        units: Values (or pairs) per group.
        codes: Written instead of each position, where there are any.

    Returns:
        uint8 (rows, bytes of a row's stream).
    """
    rows, bits = positions.shape[0], index_bits(units, codes)
    fields = torch.tensor(codes, dtype=torch.int64, device=positions.device)[positions.long()] if codes else positions
    stream = fields.reshape(rows, -1, 1).numpy().astype(np.uint8)
    planes = (stream >> np.arange(bits, dtype=np.uint8)) & 1
    written = np.packbits(planes.reshape(rows, -1), axis=1, bitorder="little")
    return torch.as_tensor(written, dtype=torch.uint8, device="cpu")


def decode(
    stream: UInt8[Tensor, "rows bytes"], groups: int, kept: int, units: int, codes: Sequence[int] = ()
) -> Int64[Tensor, "rows {groups} {kept}"]:
    """Read an index stream back and validate every index.

    Args:
        stream: uint8 (rows, bytes of a row's stream).
        groups: Groups per row.
        kept: Indices per group.
        units: Values (or pairs) per group.
        codes: The code of each position, where `encode` was given them.

    Returns:
        int64 (rows, groups, kept), ascending in the last axis.

    Raises:
        PackingError: An index is out of bounds or not ascending, a code is illegal, or padding bits are set.
    """
    rows, bits = stream.shape[0], index_bits(units, codes)
    count = groups * kept
    planes = np.unpackbits(stream.numpy(), axis=1, bitorder="little")
    if planes[:, count * bits :].any():
        raise illegal("padding", "padding bits that are not zero", "zero bits behind the last index of a row")
    weights = (1 << np.arange(bits)).astype(np.uint8)
    found = planes[:, : count * bits].reshape(rows, count, bits) @ weights
    fields = torch.as_tensor(found, dtype=torch.int64, device="cpu")
    if codes:
        fields = _from_codes(fields, codes)
    positions = fields.view(rows, groups, kept)
    if int(positions.max()) >= units:
        raise illegal("bound", f"index {int(positions.max())}", f"indices below {units}")
    falling = (positions.diff(dim=-1) <= 0).any(-1)
    if falling.any():
        row, group = first_true(falling)
        offending = [*map(int, positions[row, group])]
        raise illegal("order", f"indices {offending} in row {row}, group {group}", "ascending indices")
    return positions


def _from_codes(fields: Tensor, codes: Sequence[int]) -> Tensor:
    matches = fields.unsqueeze(-1) == torch.tensor(codes, dtype=torch.int64, device=fields.device)
    bad = ~matches.any(-1)
    if bad.any():
        wanted = " or ".join(f"{code:#06b}" for code in codes)
        raise illegal("code", f"code {int(fields[bad][0]):#06b}", f"{wanted} for each group")
    return matches.long().argmax(-1)


def ascending(stream: UInt8[Tensor, "rows bytes"], groups: int) -> bool:
    """Tell whether every nibble of a 2:4 index stream is a legal code, and the padding zero; a few bytes a byte."""
    low = (stream & 3) < (stream >> 2 & 3)
    high = (stream >> 4 & 3) < stream >> 6
    if groups % 2:
        high[:, -1] = stream[:, -1] >> 4 == 0
    return bool((low & high).all())
