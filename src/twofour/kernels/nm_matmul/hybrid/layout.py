"""A packed weight of two regions in the order of bytes that kernels read, and back; hybrid.h says what stands where."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from twofour.errors import PackingError, PatternError
from twofour.files import bytes_of
from twofour.kernels.nm_matmul import layout as regular
from twofour.native import pages
from twofour.packing import HEADER_BYTES, Header, Packed, layout_head, layout_header, read_layout_header
from twofour.packing.formats import HybridRows
from twofour.packing.formats.indices import encode
from twofour.patterns import NM, Hybrid, parse

PREFIX = "dual_"
"""Before the name of the layout of 2:4 that stands in one of two regions; 16 letters of a header hold both."""

GROUP = 4
"""Inputs of a group of 2:4."""


def inner_layout(layout: str) -> str:
    """Return the layout of 2:4 inside one of two regions."""
    return layout.removeprefix(PREFIX)


def widened(packed: Packed) -> tuple[Packed, Tensor]:
    """Return a weight of two regions as one of 2:4, (out, in + 4 dense), and the numbers of its dense groups, int64.

    The first two values of a dense group stay where they are; the last two stand behind all inputs, group by group.
    """
    form = packed.header.format
    assert isinstance(form, HybridRows), form
    rows, columns = packed.header.shape
    dense, places = form.dense_groups(packed.indices), packed.positions()
    sparse = torch.ones(columns // GROUP, dtype=torch.bool, device="cpu").index_fill_(0, dense, False)
    numbers = packed.header.encoding.read(packed.values, form.kept)
    cut = 2 * int(sparse.sum())

    def arranged(first: Tensor, last: Tensor) -> Tensor:
        both = first.new_empty(rows, columns // GROUP + len(dense), 2)
        pairs = last.reshape(rows, len(dense), 2, 2)
        both[:, : len(sparse)][:, sparse] = first.reshape(rows, -1, 2)
        both[:, dense], both[:, len(sparse) :] = pairs[:, :, 0], pairs[:, :, 1]
        return both

    inside = places % GROUP
    header = replace(packed.header, pattern="2:4", shape=(rows, columns + GROUP * len(dense)))
    values = arranged(numbers[:, :cut], numbers[:, cut:]).flatten(1)
    indices = encode(arranged(inside[:, :cut], inside[:, cut:]), GROUP)
    return Packed(header, packed.header.encoding.store(values), indices, packed.scales), dense


def narrowed(found: Packed, dense: Tensor, pattern: Hybrid) -> Packed:
    """Return the weight of two regions that `widened` was given."""
    rows, wide = found.header.shape
    header = replace(found.header, pattern=pattern.name, shape=(rows, wide - GROUP * len(dense)))
    form = header.format
    assert isinstance(form, HybridRows), form
    positions, groups = found.positions(), header.reduction // GROUP
    values = header.encoding.read(found.values, found.header.format.kept).view(positions.shape)
    sparse = torch.ones(groups, dtype=torch.bool, device="cpu").index_fill_(0, dense, False)
    places = form.columns(positions[:, :groups][:, sparse], dense)
    last = torch.stack([values[:, dense], values[:, groups:]], 2)
    both = torch.cat([values[:, :groups][:, sparse].flatten(1), last.flatten(1)], 1)
    return Packed(header, header.encoding.store(both), form.write(places), found.scales)


def to_layout(packed: Packed, layout: str) -> Tensor:
    """Write a canonical weight of two regions in the kernels' layout.

    Args:
        packed: Canonical weight of shape (out, in); every index is validated first.
        layout: Name of the layout, a row's.

    Returns:
        uint8: 64-byte header, then the layout's bytes.

    Raises:
        PackingError: The packed weight is inconsistent.
    """
    packed.validate()
    header = packed.header
    inner, dense = widened(packed)
    body = regular.to_layout(inner, inner_layout(layout))[HEADER_BYTES:]
    said = torch.cat([torch.tensor([len(dense)], dtype=torch.int32, device="cpu"), dense.to(torch.int32)])
    room = _room(len(dense))
    buffer = pages.empty(HEADER_BYTES + room + body.numel())
    head = layout_header(header.pattern, header.dtype, layout, header.rows, header.reduction)
    buffer[:HEADER_BYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    buffer[HEADER_BYTES : HEADER_BYTES + room] = 0
    buffer[HEADER_BYTES : HEADER_BYTES + 4 * len(said)] = bytes_of(said)
    buffer[HEADER_BYTES + room :] = body
    return buffer


def from_layout(buffer: Tensor) -> Packed:
    """Read the kernels' layout back into the canonical form.

    Raises:
        PackingError: The buffer has no header of this version, or its bytes are none that `to_layout` writes.
    """
    found = read_layout_header(layout_head(buffer))
    pattern, dense = _described(buffer, found)
    rows, columns = found.shape
    room = _room(len(dense))
    head = layout_header("2:4", found.dtype, inner_layout(found.layout), rows, columns + GROUP * len(dense))
    inner = pages.empty(buffer.numel() - room)
    inner[:HEADER_BYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    inner[HEADER_BYTES:] = buffer[HEADER_BYTES + room :]
    packed = narrowed(regular.from_layout(inner), dense, pattern)
    packed.validate()
    return packed


def _room(dense: int) -> int:
    """Return the bytes of the numbers of so many dense groups, and of how many there are: whole cache lines."""
    return -(-4 * (1 + dense) // 64) * 64


def _described(buffer: Tensor, found: Header) -> tuple[Hybrid, Tensor]:
    """Read the header's pattern and which groups are dense, and hold the size of the buffer against them."""
    try:
        pattern = parse(found.pattern)
    except PatternError:
        pattern = None
    if not isinstance(pattern, Hybrid) or pattern.regular != NM(2, 4) or not found.layout.startswith(PREFIX):
        raise _unfit(f"a header of {found.pattern!r}, layout {found.layout!r}", "a weight of 2:4 and dense groups")
    groups = found.reduction // GROUP
    wanted, body = pattern.dense_of(groups), buffer[HEADER_BYTES:]
    if found.reduction % GROUP or body.numel() < _room(wanted):
        raise _unfit(f"{buffer.numel()} bytes, {found.reduction} inputs", f"room for {wanted} dense groups of {groups}")
    said = body[: 4 * (1 + wanted)].view(torch.int32).long()
    dense = said[1:]
    legal = int(said[0]) == wanted and bool((dense.diff() > 0).all())
    if not legal or (wanted and (int(dense[0]) < 0 or int(dense[-1]) >= groups)):
        raise _unfit(f"{int(said[0])} dense groups of {groups}", f"{wanted} of them, their numbers ascending")
    return pattern, dense


def _unfit(got: str, wanted: str) -> PackingError:
    return PackingError(
        "the bytes of a prepared weight of two regions do not fit their header",
        got=got,
        wanted=wanted,
        remedy="prepare or load the weight again",
        code="layout-size",
    )
