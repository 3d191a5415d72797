"""One file of a checkpoint: read in parts, its weights made sparse, written under the same layout.

The file written holds the same tensors at the same places behind a header with more metadata, so that a tensor can be
written as soon as it is known.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from twofour.checkpoints import Entry, read_header
from twofour.checkpoints.write import header_bytes
from twofour.criteria import Magnitude, Scored
from twofour.errors import FormatError, TwofourError
from twofour.files import bytes_of, opened, replacing
from twofour.masks.rule import fill_pruned
from twofour.patterns import VNM, Block, Hybrid, Pattern
from twofour.patterns.base import is_finite, non_finite
from twofour.streaming.checkpoint_plan import Sparse

PART = 1 << 21
"""Values of a weight that are worked on at a time: 8 MB as the float32 that masks are made from."""
COPIED = 1 << 24
"""Bytes that are copied at a time."""

Advance = Callable[[int, str], None]
"""Told how many more bytes are done, and of which tensor."""


@dataclass(frozen=True)
class Outcome:
    """What became of one tensor.

    Attributes:
        name: Its name.
        file: The file it is in.
        kind: Kind of layer.
        shape: Its shape.
        axis: Reduction axis.
        pattern: The pattern's text.
        zeros: Fraction of values that are zero now.
        kept: Fraction of the sum of |w| that was kept.
    """

    name: str
    file: str
    kind: str
    shape: tuple[int, ...]
    axis: int
    pattern: str
    zeros: float
    kept: float


@dataclass(frozen=True)
class Written:
    """A finished file.

    Attributes:
        outcomes: What became of its sparse weights.
        checksum: CRC-32 of its bytes, taken as they were written.
    """

    outcomes: tuple[Outcome, ...]
    checksum: int


@dataclass(frozen=True)
class Shard:
    """One file to write.

    Attributes:
        source: The dense file.
        target: The file to write.
        entries: All its tensors, in the order of their bytes.
        weights: Those that become sparse, by name.
        criterion: Which values stay.
        metadata: The metadata to write.
    """

    source: Path
    target: Path
    entries: tuple[Entry, ...]
    weights: Mapping[str, Sparse]
    criterion: Scored
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """How many bytes its tensors take."""
        return sum(entry.nbytes for entry in self.entries)


def write_shard(shard: Shard, advance: Advance = lambda count, name: None) -> Written:
    """Write a shard's file, whole or not at all, and say what became of its weights.

    Raises:
        FormatError: The source is not the file that the plan was made for, or became shorter.
        PatternError: A weight holds NaN or infinity.
        OSError: The file cannot be written.
    """
    if read_header(shard.source).entries != shard.entries:
        raise FormatError(
            "a file changed after the plan was made",
            got=str(shard.source),
            wanted="the file as it was, on every machine that works on it",
            remedy="run the command again; machines of a cluster must share the file system",
        )
    outcomes: list[Outcome] = []
    with replacing(shard.target) as temporary, open(temporary, "wb") as target, opened(shard.source) as source:
        file = _Summed(target)
        shapes = ((entry.name, entry.dtype, entry.shape, entry.nbytes) for entry in shard.entries)
        file.write(header_bytes(shapes, shard.metadata))  # the source's tensors in their order, and more metadata
        for entry in shard.entries:
            if weight := shard.weights.get(entry.name):
                outcomes.append(_write_sparse(file, weight, shard.criterion, advance))
            else:
                _copy(source, file, entry, advance)
    return Written(tuple(outcomes), file.checksum)


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file's bytes, read a part at a time."""
    found = 0
    with opened(path) as file:
        while data := file.read(COPIED):
            found = zlib.crc32(data, found)
    return found


class _Summed:
    """A file that is written from its start to its end, and the checksum of what went by."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.checksum = 0

    def write(self, data: bytes | memoryview) -> None:
        self.checksum = zlib.crc32(data, self.checksum)
        self.file.write(data)


def _copy(source: BinaryIO, target: _Summed, entry: Entry, advance: Advance) -> None:
    source.seek(entry.start)
    left = entry.nbytes
    while left:
        data = source.read(min(COPIED, left))
        if not data:
            raise FormatError("a file became shorter while it was read", got=str(entry.file), wanted="a whole file")
        target.write(data)
        left -= len(data)
        advance(len(data), entry.name)


@torch.no_grad()
def _write_sparse(file: _Summed, weight: Sparse, criterion: Scored, advance: Advance) -> Outcome:
    zeros, before, after = 0, 0.0, 0.0
    for part in _parts(weight, criterion):
        values = part.read()
        before += _sum(values)
        try:
            make_sparse(values, weight, criterion)
        except TwofourError as error:
            raise _in_whole(error, weight) from None
        after += _sum(values)
        zeros += values.numel() - int(values.count_nonzero())
        file.write(bytes_of(values).numpy().data)
        advance(part.nbytes, part.name)
    entry, count = weight.entry, weight.entry.nbytes // _itemsize(weight.entry)
    kept = after / before if before else 1.0
    return Outcome(
        entry.name,
        entry.file.name,
        weight.kind,
        entry.shape,
        weight.axis.axis,
        weight.pattern.name,
        round(zeros / count, 6),
        round(kept, 6),
    )


def make_sparse(values: Tensor, weight: Sparse, criterion: Scored) -> None:
    """Set what the pattern does not keep of a tensor, or of a part as `_parts` cuts it, to +0, in place.

    The same values stay as in `criteria.solve`: scores are made and ranked as the matrix (out, positions * in). Where
    zeros obey the pattern already all values stay, as in `criteria.settled`; by magnitude they do in any case.
    """
    last = weight.axis.last(values)
    if not isinstance(criterion, Magnitude) and weight.pattern.check(last).ok:
        return
    rows = last.reshape(last.shape[0], -1)
    scores = criterion.score(rows, None, weight.weight)
    keep = criterion.choose(scores, weight.pattern)
    fill_pruned(values, weight.axis.restore(keep.view(last.shape)))


def _parts(weight: Sparse, criterion: Scored) -> Iterator[Entry]:
    """Cut a weight along its first axis where groups end; only magnitude ranks the parts as it ranks the whole."""
    entry = weight.entry
    ranked_whole = isinstance(weight.pattern, Block | Hybrid) or not isinstance(criterion, Magnitude)
    if ranked_whole or weight.axis.parts != 1:
        yield entry
        return
    rows, step = entry.shape[0], _step(weight.pattern)
    row = entry.nbytes // _itemsize(entry) // rows
    step *= max(1, PART // (row * step))
    for first in range(0, rows, step):
        yield entry.part(first, min(rows, first + step))


def _step(pattern: Pattern) -> int:
    """Return after how many positions along either axis a group can begin anew."""
    return pattern.group * (pattern.v if isinstance(pattern, VNM) else 1)


def _sum(values: Tensor) -> float:
    wide = values.abs() if values.dtype in (torch.float32, torch.float64) else values.float().abs_()
    total = float(wide.sum())
    # Summing in float64 takes 25 ms for a part of 4 million bfloat16 values, this 6.
    return total if isfinite(total) else float(values.abs().sum(dtype=torch.float64))


def _itemsize(entry: Entry) -> int:
    dtype = entry.torch_dtype
    assert dtype is not None, entry
    return dtype.itemsize


def _in_whole(error: TwofourError, weight: Sparse) -> TwofourError:
    """Say which values cannot be ranked in the coordinates of the whole weight."""
    whole = weight.entry.read()
    found = error if is_finite(whole) else non_finite("the weight", whole)
    return found.for_layer(weight.entry.name)
