"""A packed weight of blocks in the order of bytes that kernels read, and back; blocks.h says what stands where."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from twofour import native
from twofour.errors import PackingError, PatternError
from twofour.files import bytes_of
from twofour.kernels.block_matmul.windows import from_windows, to_windows
from twofour.native import pages
from twofour.packing import HEADER_BYTES, Header, Packed, layout_head, layout_header, read_layout_header
from twofour.patterns import Block, parse

_HEAD = struct.Struct("<iiiiq40s")  # r, c, parts, unused, indices, the pattern's text


def last_index() -> int:
    """Return what an index of a layout can say: kLastIndex of blocks.h."""
    return native.extension().block_last_index


class Places(NamedTuple):
    """Where the parts of a layout begin and the last one ends, in bytes behind the header: BlockPlaces of blocks.h.

    Attributes:
        windows: How many windows are counted; 0 where indices are not places in them, and `counts` is empty.
    """

    windows: int
    starts: int
    counts: int
    indices: int
    scales: int
    sums: int
    weights: int
    end: int


@dataclass(frozen=True)
class Grid:
    """How a weight's blocks stand in a layout; the numbers are those of BlockShape in blocks.h.

    Attributes:
        header: Of the packed weight.
    """

    header: Header

    @cached_property
    def rule(self) -> Block:
        """The pattern."""
        rule = self.header.parsed()
        assert isinstance(rule, Block), rule
        return rule

    @cached_property
    def width(self) -> int:
        """Bytes of a value."""
        return self.header.encoding.dtype.itemsize

    @cached_property
    def _sizes(self) -> tuple[int, int, int, int, int, int]:
        rule = self.rule
        return self.header.rows, self.header.reduction, rule.r, rule.c, rule.parts, self.width

    @cached_property
    def _shape(self) -> tuple[int, int, int, int, int, bool]:
        return native.extension().block_shape(*self._sizes)

    @property
    def strip(self) -> int:
        """Rows of a strip."""
        return self._shape[0]

    @property
    def of_inputs(self) -> int:
        """Inputs that an index stands for."""
        run, per = self._shape[1], 4 // self.width
        return run * per if run else 1

    @property
    def unit(self) -> int:
        """Inputs by which an index counts: those of a dword where runs are of whole ones."""
        return 4 // self.width if self._shape[1] else 1

    @property
    def strips(self) -> int:
        """Strips of the weight, those without rows included."""
        return self.rule.parts * self._shape[2] // self.strip

    @property
    def zero(self) -> int:
        """The index that strips are filled up with."""
        return self._shape[3]

    @property
    def multiple(self) -> int:
        """What the indices of a strip are a multiple of."""
        return self._shape[4]

    @property
    def fits(self) -> bool:
        """Whether 16 bits hold every index."""
        return self._shape[5]

    def places(self, indices: int) -> Places:
        """Return where the parts stand of a layout of so many indices."""
        return Places(*native.extension().block_places(*self._sizes, indices))

    @cached_property
    def strips_of_block_rows(self) -> Tensor:
        """The strips of each row of blocks: int64 (rows of blocks, strips of one)."""
        rule, of_part = self.rule, self._shape[2] // self.strip
        down = rule.grid((self.header.rows, self.header.reduction))[1]
        each = rule.r // self.strip
        one = torch.arange(down * each, device="cpu").view(down, each)
        return (torch.arange(rule.parts, device="cpu").view(-1, 1, 1) * of_part + one).view(-1, each)


def to_layout(packed: Packed, layout: str) -> Tensor:
    """Write a canonical weight of blocks in the kernels' layout.

    Args:
        packed: Canonical weight of shape (out, in); every index is validated first.
        layout: Its name, for the header.

    Returns:
        uint8: 64-byte header, then the layout's bytes.

    Raises:
        PackingError: The packed weight is inconsistent, or has too many inputs.
    """
    packed.validate()
    header, grid = packed.header, Grid(packed.header)
    rule = grid.rule
    if not grid.fits:
        raise PackingError(
            "the layout of a weight of blocks cannot hold its inputs",
            got=f"{header.reduction} inputs in {rule.name}, {header.dtype}",
            wanted=f"indices of at most {last_index()}",
            remedy="run the layer dense",
        )
    starts, indices, values = _arranged(packed, grid)
    total = len(indices)
    places = grid.places(total)
    buffer = pages.empty(HEADER_BYTES + places.end)
    buffer[: HEADER_BYTES + places.weights] = 0
    head = layout_header("block", header.dtype, layout, header.rows, header.reduction)
    head += _HEAD.pack(rule.r, rule.c, rule.parts, 0, total, rule.name.encode())
    buffer[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    body = buffer[HEADER_BYTES:]
    _write(body, places.starts, starts.to(torch.int32))
    if places.windows:
        counts, indices = to_windows(starts, indices, grid.zero, places.windows)
        _write(body, places.counts, counts)
        _write(body, places.indices, indices)
    else:
        _write(body, places.indices, indices.to(torch.uint16))
    if grid.width == 1:
        ones = torch.ones(header.rows, 1, dtype=torch.float32, device="cpu")
        _write(body, places.scales, ones if packed.scales is None else packed.scales)
        _write(body, places.sums, _sums(packed).to(torch.int32))
    _write(body, places.weights, values)
    return buffer


def _arranged(packed: Packed, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Return where each strip's indices begin, (strips + 1,), the indices, and the weights as the layout has them."""
    header, rule, of_inputs = packed.header, grid.rule, grid.of_inputs
    across = -(-header.reduction // rule.c)
    numbers = packed.positions()
    rows, columns = numbers // across, numbers % across
    # Each kept block once for each of its strips, and for each run of inputs in it, in the order of the strips.
    each, runs = rule.r // grid.strip, rule.c // of_inputs
    strips = grid.strips_of_block_rows[rows]  # (blocks, each)
    pieces = header.encoding.read(packed.values, rule.r * rule.c)
    per = min(of_inputs, 4 // grid.width)
    # (block, strip, row, run, step, per) -> (block, strip, run, step, row, per)
    cut = pieces.view(-1, each, grid.strip, runs, of_inputs // per, per).permute(0, 1, 3, 4, 2, 5)
    starting = columns.view(-1, 1, 1) * rule.c // grid.unit + torch.arange(runs, device="cpu") * (
        of_inputs // grid.unit
    )
    starting = starting.expand(-1, each, -1)
    order = strips.flatten().argsort(stable=True)
    counts = torch.bincount(strips.flatten(), minlength=grid.strips) * runs
    padded = -(-counts // grid.multiple) * grid.multiple
    starts = torch.cat([padded.new_zeros(1), padded.cumsum(0)])
    total = int(starts[-1])
    shift = (starts[:-1] - torch.cat([counts.new_zeros(1), counts.cumsum(0)[:-1]])).repeat_interleave(counts)
    at = torch.arange(int(counts.sum()), device="cpu") + shift  # where each index stands among all with the padding

    indices = torch.full((total,), grid.zero, dtype=torch.int64, device="cpu")
    indices[at] = starting.reshape(-1, runs)[order].flatten()
    values = torch.zeros(total, of_inputs // per, grid.strip, per, dtype=pieces.dtype, device="cpu")
    values[at] = cut.reshape(-1, runs, of_inputs // per, grid.strip, per)[order].flatten(0, 1)
    if per < 4 // grid.width:  # inputs apart: a dword is of several of them
        together = 4 // grid.width
        values = values.view(-1, together, grid.strip).transpose(1, 2).contiguous()
    return starts, indices, values


def from_layout(buffer: Tensor) -> Packed:
    """Read the layout back into the canonical form.

    Raises:
        PackingError: The buffer has no header of this version, or its bytes are none that `to_layout` writes.
    """
    grid, total = _described(buffer)
    header, rule = grid.header, grid.rule
    places, body = grid.places(total), buffer[HEADER_BYTES:]
    starts = _read(body, places.starts, grid.strips + 1, torch.int32).long()
    values = _weights(body, places.weights, total, grid)

    counts = starts.diff()
    if starts[0] != 0 or starts[-1] != total or bool((counts < 0).any()):
        raise _unfit("strips that do not follow each other", f"strips from 0 to {total}")
    indices = _indices(body, places, starts, grid)
    strip = torch.arange(grid.strips, device="cpu").repeat_interleave(counts)
    arranged, held = (starts, indices), indices != grid.zero
    indices, values, strip = indices[held], values[held], strip[held]
    runs, each = rule.c // grid.of_inputs, rule.r // grid.strip
    blocks = header.format.parts["values"][0][0]
    if len(indices) != blocks * each * runs:
        raise _unfit(f"{len(indices)} runs of inputs", f"{blocks} blocks of {each * runs} of them")
    # Strips of one row of blocks hold the same blocks in the same order: (row, strip, block, run) -> (row, block, ...).
    across = -(-header.reduction // rule.c)
    of_strip = torch.full((grid.strips,), -1, dtype=torch.int64, device="cpu")
    of_strip[grid.strips_of_block_rows.flatten()] = torch.arange(grid.strips_of_block_rows.numel(), device="cpu")
    column = indices * grid.unit // rule.c
    if bool((column >= across).any()):
        raise _unfit(f"an index of block column {int(column.max())}", f"{across} block columns")
    key = (of_strip[strip] // each * across + column) * each + of_strip[strip] % each
    order = key.argsort(stable=True)
    numbers = (key[order] // each).view(blocks, -1)[:, 0]
    cut = values[order].view(blocks, each, runs, *values.shape[1:]).permute(0, 1, 4, 2, 3, 5)
    form = header.format
    kept = header.encoding.store(cut.reshape(blocks, -1).contiguous())
    scales = _read(body, places.scales, header.rows, torch.float32).view(-1, 1) if grid.width == 1 else None
    packed = Packed(header, kept, form.write(numbers), scales)
    packed.validate()
    if not all(torch.equal(one, other) for one, other in zip(arranged, _arranged(packed, grid)[:2], strict=True)):
        raise _unfit("indices that stand as no packing writes them", "the runs of each block, strip by strip")
    return packed


def _indices(body: Tensor, places: Places, starts: Tensor, grid: Grid) -> Tensor:
    """Return the index of each run of inputs, or of each input."""
    total = int(starts[-1])
    if not places.windows:
        return _read(body, places.indices, total, torch.uint16).long()
    counts = _read(body, places.counts, grid.strips * places.windows, torch.uint8).view(-1, places.windows)
    found = from_windows(starts, counts, _read(body, places.indices, total, torch.uint8), grid.zero)
    if found is None:
        raise _unfit("a strip that counts more inputs than it has", f"{total} inputs in all")
    return found


def _weights(body: Tensor, at: int, total: int, grid: Grid) -> Tensor:
    """Return the weights of each index: (indices, steps, rows of the strip, inputs of a step)."""
    of_inputs, per, width = grid.of_inputs, min(grid.of_inputs, 4 // grid.width), grid.width
    stored = {4: torch.float32, 2: torch.bfloat16, 1: torch.int8}[width]
    values = _read(body, at, total * of_inputs * grid.strip, stored)
    if per < 4 // width:
        values = values.view(-1, grid.strip, 4 // width).transpose(1, 2)
    return values.reshape(total, of_inputs // per, grid.strip, per)


def _described(buffer: Tensor) -> tuple[Grid, int]:
    """Read both headers and hold the size of the buffer against them."""
    found = read_layout_header(layout_head(buffer))
    if found.pattern != "block" or buffer.numel() < HEADER_BYTES + _HEAD.size:
        raise _unfit(f"{buffer.numel()} bytes, a header of {found.pattern!r}", "the header of a weight of blocks")
    head = buffer[HEADER_BYTES : HEADER_BYTES + _HEAD.size].numpy().tobytes()
    r, c, parts, _, total, text = _HEAD.unpack(head)
    name = text.rstrip(b"\0").decode("ascii", "replace")
    try:
        rule = parse(name)
    except PatternError:
        raise _unfit(f"the pattern {name!r}", "the name of a pattern of blocks") from None
    if not isinstance(rule, Block) or (rule.r, rule.c, rule.parts) != (r, c, parts) or found.shape[0] % parts:
        raise _unfit(f"blocks of {r} x {c} in {parts} parts, pattern {rule.name!r}", "blocks of that pattern")
    grid = Grid(Header(rule.name, found.dtype, found.shape, 1))
    whole = 0 <= total <= buffer.numel() and total % grid.multiple == 0 and found.shape[0] <= 4 * buffer.numel()
    if not whole or grid.places(total).end != buffer.numel() - HEADER_BYTES:
        raise _unfit(f"{buffer.numel()} bytes, {total} indices", "as many bytes as the indices need")
    return grid, total


def _sums(packed: Packed) -> Tensor:
    """Return the sum of each row of whole numbers, by which zero points of inputs are taken off: int64 (out,)."""
    numbers = packed.header.encoding.read(packed.values, packed.header.format.kept)
    empty = torch.zeros(packed.header.rows, packed.header.reduction, dtype=numbers.dtype, device="cpu")
    return packed.header.format.scatter(empty, packed.positions(), numbers).sum(1, dtype=torch.int64)


def _write(body: Tensor, at: int, part: Tensor) -> None:
    data = bytes_of(part)
    body[at : at + data.numel()] = data


def _read(body: Tensor, at: int, count: int, dtype: torch.dtype) -> Tensor:
    return body[at : at + count * dtype.itemsize].view(dtype)


def _unfit(got: str, wanted: str) -> PackingError:
    return PackingError(
        "the bytes of a prepared weight of blocks do not fit their header",
        got=got,
        wanted=wanted,
        remedy="prepare or load the weight again",
        code="layout-size",
    )
