"""Weights that stand in a file in several parts: our packed form, and the compressed ones of other libraries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from twofour.checkpoints import Entry
from twofour.errors import FormatError, PackingError
from twofour.export.file import INDICES, SCALES, VALUES, ZEROS, packed_in
from twofour.export.metadata import malformed
from twofour.importing import Format, Source
from twofour.importing.bitmask import OFFSETS, SCALE, ZERO, Bitmask
from twofour.importing.bitmask import PARTS as BITMASK_PARTS
from twofour.importing.marlin import PARTS as MARLIN_PARTS
from twofour.importing.marlin import Marlin
from twofour.importing.semi_structured import PARTS as TORCH_PARTS
from twofour.importing.semi_structured import SemiStructured
from twofour.packing import Header, Packed

_SIZES = ("I64", "I32", "I16", "I8", "U8")
"""Types that a shape is stored in."""


class Stored(Protocol):
    """A weight in a file: a tensor of its own (`checkpoints.Entry`), or one in parts."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense weight."""
        ...

    def read(self) -> Tensor:
        """Return its values."""
        ...


@dataclass(frozen=True)
class Ours:
    """A packed weight of our own format.

    Attributes:
        name: Its name.
        header: What its bytes say of themselves.
        parts: Where they are.
        file: The file.
        by: Who promises its pattern.
    """

    name: str
    header: Header
    parts: Mapping[str, Entry]
    file: Path
    by: str = "packed form"

    @property
    def promise(self) -> str:
        """The pattern that the form holds."""
        return self.header.pattern

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense weight."""
        return self.header.shape

    def read(self) -> Tensor:
        """Validate the parts and unpack them.

        Raises:
            FormatError: They are malformed.
        """
        parts = {name: entry.read() for name, entry in self.parts.items()}
        ((_, packed),) = packed_in(self.file, {self.name: self.header.to_dict()}, parts)
        return packed.unpack()


@dataclass(frozen=True)
class Foreign:
    """A compressed weight of another library.

    Attributes:
        name: Name of the weight.
        format: What reads it.
        parts: Where its tensors are.
        file: The file or folder.
        shape: Shape of the dense weight.
        promise: The pattern that the form holds; None where it holds any.
    """

    name: str
    format: Format
    parts: Mapping[str, Entry]
    file: Path
    shape: tuple[int, ...]
    promise: str | None = "2:4"

    @property
    def by(self) -> str:
        """Who promises the pattern."""
        return self.format.name

    def read(self) -> Tensor:
        """Validate and decompress it.

        Raises:
            FormatError: It is malformed.
        """
        source = Source(self.file, {name: entry.read() for name, entry in self.parts.items()})
        found = self.format.decode(source, None)
        weight = found.sparse[self.name].weight if self.name in found.sparse else found.plain[self.name]
        dense = weight.unpack() if isinstance(weight, Packed) else weight
        if tuple(dense.shape) != self.shape:
            raise FormatError(
                "a compressed weight has another shape than its parts say",
                got=f"{tuple(dense.shape)}, not {self.shape}",
                wanted="parts of one weight",
                layer=self.name,
            )
        return dense


def ours(file: Path, headers: Mapping[str, object], entries: Mapping[str, Entry]) -> Iterator[Ours]:
    """Yield the packed weights that a file's metadata describes; all parts of one stand in that file, as `load` wants.

    Raises:
        FormatError: A header is malformed, or a weight stands there packed and plain.
    """
    here = {name: entry for name, entry in entries.items() if entry.file == file}
    for name, fields in headers.items():
        if name in entries:
            raise malformed("stored-twice", file, f"`{name}` is stored packed and plain")
        try:
            header = Header.from_dict(fields)
        except PackingError as error:
            raise FormatError(
                f"the packed weight cannot be used: {error.what}",
                got=f"{file}: {error.got}",
                wanted=error.wanted,
                layer=name,
                code=error.code,
            ) from error
        suffixes = (VALUES, INDICES, *((SCALES, ZEROS) if header.encoding.scaled else ()))
        yield Ours(name, header, _parts(here, (name + suffix for suffix in suffixes)), file)


def foreign(path: Path, entries: Mapping[str, Entry]) -> Iterator[Foreign]:
    """Yield the weights of compressed-tensors' compressed forms and of torch's semi-structured state dicts.

    Raises:
        FormatError: The parts of one do not tell its shape.
    """
    for found in _found(path, entries):
        if len(found.shape) != 2 or min(found.shape) < 1:
            found.read()  # says what is wrong with it
        yield found


def _found(path: Path, entries: Mapping[str, Entry]) -> Iterator[Foreign]:
    for name in entries:
        stem, _, part = name.rpartition(".")
        if part == "bitmask" and f"{stem}.compressed" in entries:
            yield _bitmask(path, stem, entries)
        elif part == MARLIN_PARTS[0] and f"{stem}.{MARLIN_PARTS[2]}" in entries:
            meta = entries[f"{stem}.{MARLIN_PARTS[2]}"].shape
            shape = (meta[1] // 2, meta[0] * 32) if len(meta) == 2 else ()
            parts = _parts(entries, (f"{stem}.{one}" for one in MARLIN_PARTS))
            yield Foreign(f"{stem}.weight", Marlin(), parts, path, shape)
        elif part == TORCH_PARTS[0] and f"{stem}.{TORCH_PARTS[1]}" in entries:
            shape = entries[name].shape
            parts = _parts(entries, (f"{stem}.{one}" for one in TORCH_PARTS))
            promise = "1:2" if entries[name].dtype == "F32" else "2:4"  # tf32
            yield Foreign(stem, SemiStructured(), parts, path, (*shape[:-1], shape[-1] * 2) if shape else (), promise)


def _bitmask(path: Path, stem: str, entries: Mapping[str, Entry]) -> Foreign:
    layer, values = stem.removesuffix(".weight"), entries[f"{stem}.compressed"].shape
    names = [f"{stem}.{one}" for one in (*BITMASK_PARTS, OFFSETS)]
    parts = _parts(entries, (*names, f"{layer}.{SCALE}", f"{layer}.{ZERO}"))
    said = entries.get(f"{stem}.shape")
    whole = said is not None and said.dtype in _SIZES and said.nbytes < 64
    shape = tuple(said.read().flatten().tolist()) if said is not None and whole else ()
    return Foreign(f"{layer}.weight", Bitmask(), parts, path, shape, "2:4" if len(values) == 2 else None)


def _parts(entries: Mapping[str, Entry], names: Iterable[str]) -> dict[str, Entry]:
    return {name: entries[name] for name in names if name in entries}
