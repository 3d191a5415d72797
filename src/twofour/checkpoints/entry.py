"""A tensor in a safetensors file: found by the header, read by memory map.

The layout is that of safetensors: 8 bytes with the header's length (little endian), the header as JSON, the tensors'
bytes one after the other without gaps.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from twofour.errors import FormatError

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

_METADATA = "__metadata__"


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
        """Map the tensor's bytes into memory, uint8 of shape (nbytes,); as `read`."""
        if not self.nbytes:
            return torch.empty(0, dtype=torch.uint8)
        before = self.start % mmap.ALLOCATIONGRANULARITY
        try:
            with open(self.file, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self.start + self.nbytes:  # reading beyond its end would kill the process
                    raise _shorter(self, size)
                # Private: who writes into the tensor changes a copy of the page, not the file.
                mapped = mmap.mmap(
                    file.fileno(), before + self.nbytes, offset=self.start - before, access=mmap.ACCESS_COPY
                )
        except OSError as error:
            raise FormatError(
                "a tensor's file cannot be read", got=f"`{self.name}`: {error}", code="no-file"
            ) from error
        return torch.frombuffer(mapped, dtype=torch.uint8, offset=before)

    def read(self) -> Tensor:
        """Map the tensor into memory: its pages are read when they are used and given back with the tensor.

        Raises:
            FormatError: torch has no such type, or the file has become shorter or cannot be read.
        """
        return self._typed(self.bytes)

    def read_in(self, mapped: Tensor) -> Tensor:
        """Return the tensor as a view of its file, which `map_file` mapped; as `read`."""
        return self._typed(lambda: mapped[self.start : self.start + self.nbytes])

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
            return torch.empty(self.shape, dtype=dtype)
        stored = read()
        if self.start % dtype.itemsize:
            stored = stored.clone()  # a writer that did not align its tensors; kernels take aligned ones
        return stored.view(dtype).view(self.shape)


def map_file(path: Path, nbytes: int) -> Tensor:
    """Map a whole file into memory, uint8 (nbytes,); who writes into it changes a copy of the page, not the file.

    One map for all tensors of a file: each map of Python's own keeps a descriptor open, of which a process has 1024.

    Raises:
        FormatError: The file cannot be read or has become shorter.
    """
    try:
        return torch.from_file(os.fspath(path), shared=False, size=nbytes, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise FormatError(
            "a file became shorter while it was read",
            got=f"{path}: {str(error).partition(chr(10))[0]}",
            wanted=f"a file of {nbytes} bytes that nobody writes to",
            remedy="wait until its download or copy is complete",
            code="file-shorter",
        ) from error


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
        with safe_open(path, framework="numpy") as file:  # validates names, types, sizes and offsets
            metadata = dict(file.metadata() or {})
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            table = json.loads(file.read(length))
    except FileNotFoundError as error:
        what = "there is no such file"
        raise FormatError(what, got=str(path), wanted="a .safetensors file", code="no-file") from error
    except (OSError, SafetensorError, ValueError, RecursionError, struct.error) as error:
        raise FormatError(
            "the file is not readable as safetensors",
            got=f"{path}: {error}",
            wanted="a complete .safetensors file",
            remedy="compare its size with the original's: a broken copy or download is the usual cause",
            code="not-safetensors",
        ) from error
    entries = [
        Entry(name, tuple(of["shape"]), of["dtype"], path, 8 + length + of["data_offsets"][0], _size(of))
        for name, of in table.items()
        if name != _METADATA
    ]
    return Header(tuple(sorted(entries, key=lambda entry: (entry.start, entry.name))), metadata)


def _size(of: dict[str, list[int]]) -> int:
    start, end = of["data_offsets"]
    return end - start


def _shorter(entry: Entry, size: int) -> FormatError:
    return FormatError(
        "a file became shorter while it was read",
        got=f"{entry.file}: {size} bytes, `{entry.name}` ends at {entry.start + entry.nbytes}",
        wanted="a file that nobody writes to",
        remedy="wait until its download or copy is complete",
        code="file-shorter",
    )
