"""A tensor in a safetensors file: found by the header, read when it is asked for.

The layout is that of safetensors: 8 bytes with the header's length (little endian), the header as JSON, the tensors'
bytes one after the other without gaps.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from twofour import files
from twofour.errors import FormatError, cut
from twofour.files import LARGEST_LIST, unreadable
from twofour.native.mapped import LEAST, MappedFile

logger = logging.getLogger("twofour.checkpoints")

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""The names of safetensors and torch's types; of others an entry tells the name, shape and place alone."""

MOST_AXES = 64
"""Axes of a tensor at most, as torch has them."""
ENTRIES = 1 << 20
"""Tensors of a file, or of an index, at most; ten times those of the largest models."""
MOST_LETTERS = 4096
"""Letters of a tensor's name at most."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a file.

    Attributes:
        name: Its name.
        shape: Its shape.
        dtype: Its type by safetensors' name, "BF16".
        file: The file it lies in.
        start: Position of its first byte in the file.
        nbytes: How many bytes it takes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    start: int
    nbytes: int

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """Its type in torch, None where torch has none of that name."""
        return DTYPES.get(self.dtype)

    def part(self, first: int, last: int) -> Entry:
        """Return the entry of the rows `first` to `last` - 1 along the first axis."""
        row = self.nbytes // self.shape[0]
        shape = (last - first, *self.shape[1:])
        return replace(self, shape=shape, start=self.start + first * row, nbytes=(last - first) * row)

    def bytes(self) -> Tensor:
        """Read the tensor's bytes, uint8 of shape (nbytes,); as `read`."""
        with opened(self.file) as file:
            return _bytes(file, self)

    def read(self) -> Tensor:
        """Read the tensor into memory of its own: what becomes of the file later does not matter to it.

        Raises:
            FormatError: torch has no such type, or the file has become shorter or cannot be read.
        """
        return self._typed(self.bytes)

    def read_from(self, file: BinaryIO, pages: MappedFile | None = None) -> Tensor:
        """Read the tensor from its file, which is open already; as `read`.

        Args:
            file: The file.
            pages: The same file as memory: a large tensor that stands there as torch has it is not read but found.
        """
        found = _found(pages, self)
        return self._typed(lambda: _bytes(file, self) if found is None else found)

    def _typed(self, read: Callable[[], Tensor]) -> Tensor:
        dtype = self.torch_dtype
        if dtype is None:
            raise FormatError(
                "a tensor has a type that torch cannot hold",
                got=f"{self.file}: `{self.name}` is {self.dtype}",
                wanted=", ".join(DTYPES),
                code="no-dtype",
            )
        if not self.nbytes:
            return torch.empty(self.shape, dtype=dtype, device="cpu")
        return read().view(dtype).view(self.shape)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file of tensors, which must not change while the block reads.

    Raises:
        FormatError: It cannot be read, or was written to meanwhile.
    """
    try:
        with files.opened(path, buffering=0) as file:
            before = os.fstat(file.fileno())
            yield cast(BinaryIO, file)
            after = os.fstat(file.fileno())
    except OSError as error:
        raise FormatError("a tensor's file cannot be read", got=f"{path}: {error}", code="no-file") from error
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        got = f"{path}: {before.st_size} bytes, then {after.st_size}"
        raise _unsettled("file-changed", "a file was written to while it was read", got)


def as_memory(path: Path, file: BinaryIO, entries: Collection[Entry]) -> MappedFile | None:
    """Return an open file as memory, None where no tensor of it is worth that or the system does not guard it."""
    size = os.fstat(file.fileno()).st_size
    if not any(LEAST <= entry.nbytes <= size for entry in entries):
        return None
    try:
        pages = MappedFile(file.fileno())
    except OSError as error:
        logger.info("%s is read into memory of this process alone, not mapped: %s", path, error.strerror)
        return None
    logger.debug("%s is mapped; SIGIO tells of who opens it to write to it", path)
    return pages


def _found(pages: MappedFile | None, entry: Entry) -> Tensor | None:
    """Return a tensor's bytes where they are memory; None where they are not, or not where torch could take them."""
    dtype = entry.torch_dtype
    if pages is None or entry.nbytes < LEAST or dtype is None or entry.start % dtype.itemsize:
        return None
    return pages.part(entry.start, entry.nbytes)


def _bytes(file: BinaryIO, entry: Entry) -> Tensor:
    """Read: a mapped file that another program cuts would end the process that looks at it."""
    size = os.fstat(file.fileno()).st_size
    if size < entry.start + entry.nbytes:  # before the memory is asked for
        raise _shorter(entry, size)
    stored = torch.empty(entry.nbytes, dtype=torch.uint8, device="cpu")
    room, done = stored.numpy().data, 0
    file.seek(entry.start)
    while done < entry.nbytes:  # the system reads 2 GB at a time at most
        count = cast(Any, file).readinto(room[done:])
        if not count:
            raise _shorter(entry, entry.start + done)
        done += count
    return stored


@dataclass(frozen=True)
class Header:
    """What stands at the head of a safetensors file.

    Attributes:
        entries: The tensors in the order of their bytes.
        metadata: Free text by key.
    """

    entries: tuple[Entry, ...]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """Read and validate the header of a safetensors file; no tensor is read.

    Raises:
        FormatError: The file is missing, truncated or no safetensors.
    """
    try:
        with files.opened(path) as file:
            length, text = _text(path, file)
    except OSError as error:
        raise unreadable(path, error, ".safetensors") from error
    try:
        with safe_open(path, framework="numpy") as file:  # validates names, types, sizes and offsets
            metadata = dict(file.metadata() or {})
        table = json.loads(text)
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise FormatError(
            "the file is not readable as safetensors",
            got=f"{path}: {error}",
            wanted="a complete .safetensors file",
            remedy="compare its size with the original's: a broken copy or download is the usual cause",
            code="not-safetensors",
        ) from error
    table.pop("__metadata__", None)
    for name, of in table.items():
        if len(of["shape"]) > MOST_AXES or len(name) > MOST_LETTERS:
            raise _beyond(
                path,
                f"`{cut(name, 80)}`: {len(of['shape'])} axes and a name of {len(name)} letters",
                f"at most {MOST_AXES} axes and {MOST_LETTERS} letters",
            )
    places = {name: of["data_offsets"] for name, of in table.items()}
    entries = [
        Entry(
            name, tuple(of["shape"]), of["dtype"], path, 8 + length + places[name][0], places[name][1] - places[name][0]
        )
        for name, of in table.items()
    ]
    return Header(tuple(sorted(entries, key=lambda entry: (entry.start, entry.name))), metadata)


def _text(path: Path, file: BinaryIO) -> tuple[int, bytes]:
    """Return the length of a header and the header; one cut short is left to safetensors to refuse."""
    head = file.read(8)
    length = int.from_bytes(head, "little") if len(head) == 8 else 0
    if LARGEST_LIST < length <= os.fstat(file.fileno()).st_size - 8:
        raise _beyond(path, f"a header of {length} bytes", f"at most {LARGEST_LIST} bytes")
    text = file.read(min(length, LARGEST_LIST))
    if (count := text.count(b'"data_offsets"')) > ENTRIES:
        raise _beyond(path, f"{count} tensors", f"at most {ENTRIES} tensors in a file")
    return length, text


def _beyond(path: Path, got: str, wanted: str) -> FormatError:
    return FormatError(
        "the file holds more than a checkpoint can need",
        got=f"{path}: {got}",
        wanted=wanted,
        remedy="a damaged or hostile file is the usual cause; write the model again with save_pretrained, in shards",
        code="limit",
    )


def _shorter(entry: Entry, size: int) -> FormatError:
    got = f"{entry.file}: {size} bytes, `{entry.name}` ends at {entry.start + entry.nbytes}"
    return _unsettled("file-shorter", "a file became shorter while it was read", got)


def _unsettled(code: str, what: str, got: str) -> FormatError:
    wanted, remedy = "a file that nobody writes to", "wait until its download or copy is complete"
    return FormatError(what, got=got, wanted=wanted, remedy=remedy, code=code)
