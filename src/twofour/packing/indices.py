"""The index stream of the canonical format: which values of each group were kept.

Index i of a kept value takes b = ceil(log2(M)) bits; the indices of a group stand in ascending order, those of a row
one after the other, least significant bit first, and each row is padded to whole bytes with zero bits. For 2:4 that is
one nibble a group: low two bits the first position, high two bits the second (PTX ISA, "Sparse matrix storage").
tf32 writes each pair of a 1:2 weight as the hardware's 4-bit code: 0b0100 keeps the first, 0b1110 the second value.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from twofour.errors import PackingError

TF32_CODES = (0b0100, 0b1110)
"""4-bit code for keeping the first or the second value of a pair."""


def index_bits(units: int) -> int:
    """Return the bits of one index into a group of `units` values (or pairs): ceil(log2(units))."""
    return (units - 1).bit_length()


def row_bytes(groups: int, kept: int, units: int, tf32: bool = False) -> int:
    """Return the bytes of one row's index stream of `groups` groups with `kept` indices each."""
    bits = groups * (4 if tf32 else kept * index_bits(units))
    return (bits + 7) // 8


def encode(positions: Tensor, units: int, tf32: bool = False) -> Tensor:
    """Write ascending positions as an index stream.

    Args:
        positions: Integers (rows, groups, kept), ascending in the last axis, each below `units`.
        units: Values (or pairs) per group.
        tf32: Write the hardware's 4-bit codes of a 1:2 weight instead.

    Returns:
        uint8 (rows, row_bytes).
    """
    rows = positions.shape[0]
    if tf32:
        fields, bits = torch.tensor(TF32_CODES, dtype=torch.long, device=positions.device)[positions.long()], 4
    else:
        fields, bits = positions, index_bits(units)
    stream = fields.reshape(rows, -1, 1).numpy().astype(np.uint8)
    planes = (stream >> np.arange(bits, dtype=np.uint8)) & 1
    return torch.from_numpy(np.packbits(planes.reshape(rows, -1), axis=1, bitorder="little"))


def decode(stream: Tensor, groups: int, kept: int, units: int, tf32: bool = False) -> Tensor:
    """Read an index stream back and validate every index.

    Args:
        stream: uint8 (rows, row_bytes(groups, kept, units, tf32)).
        groups: Groups per row.
        kept: Indices per group.
        units: Values (or pairs) per group.
        tf32: The stream holds the hardware's 4-bit codes of a 1:2 weight.

    Returns:
        int64 (rows, groups, kept), ascending in the last axis.

    Raises:
        PackingError: An index is out of bounds or not ascending, a code is illegal, or padding bits are set.
    """
    rows, bits = stream.shape[0], 4 if tf32 else index_bits(units)
    count = groups * kept
    planes = np.unpackbits(stream.numpy(), axis=1, bitorder="little")
    if planes[:, count * bits :].any():
        raise _illegal("padding", "padding bits that are not zero", "zero bits behind the last index of a row")
    weights = (1 << np.arange(bits)).astype(np.uint8)
    fields = torch.from_numpy(planes[:, : count * bits].reshape(rows, count, bits) @ weights).long()
    if tf32:
        fields = _from_codes(fields)
    positions = fields.view(rows, groups, kept)
    if int(positions.max()) >= units:
        raise _illegal("bound", f"index {int(positions.max())}", f"indices below {units}")
    falling = (positions.diff(dim=-1) <= 0).any(-1)
    if falling.any():
        row, group = falling.nonzero()[0].tolist()
        raise _illegal(
            "order", f"indices {positions[row, group].tolist()} in row {row}, group {group}", "ascending indices"
        )
    return positions


def _from_codes(codes: Tensor) -> Tensor:
    second = codes == TF32_CODES[1]
    bad = ~second & (codes != TF32_CODES[0])
    if bad.any():
        raise _illegal("code", f"code {int(codes[bad][0]):#06b}", "0b0100 or 0b1110 for each pair")
    return second.long()


def _illegal(part: str, got: str, wanted: str) -> PackingError:
    return PackingError(
        "the index stream of a packed weight is illegal",
        got=got,
        wanted=wanted,
        remedy="the file is damaged or was not written by twofour; write it again from the dense weights",
        code=f"indices-{part}",
    )
