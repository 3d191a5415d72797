"""Initialisers of an ONNX file (TensorProto in onnx.proto): shapes, and values, external ones by memory map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twofour.checkpoints import MOST_AXES, Entry
from twofour.errors import FormatError, cut
from twofour.files import reason, require_plain
from twofour.packing import LARGEST_WEIGHT

_FLOATS = {
    "FLOAT": torch.float32,
    "DOUBLE": torch.float64,
    "FLOAT16": torch.float16,
    "BFLOAT16": torch.bfloat16,
    "FLOAT8E4M3FN": torch.float8_e4m3fn,
    "FLOAT8E5M2": torch.float8_e5m2,
}
_WHOLE = {"INT8": torch.int8, "UINT8": torch.uint8}
_HALVES = {"INT4": torch.int8, "UINT4": torch.uint8}
"""Two values a byte, the first in the low half."""


@dataclass(frozen=True)
class Initializer:
    """A constant of a graph.

    Attributes:
        name: Its name.
        shape: Its shape.
        kind: Its type by ONNX's name, "FLOAT16".
        proto: The message that holds it.
        file: The model's file, which external data is beside.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    proto: Any
    file: Path

    @classmethod
    def of(cls, proto: Any, file: Path, name: str = "") -> Initializer:
        """Describe a TensorProto.

        Raises:
            FormatError: Its shape or type is impossible.
        """
        from onnx import TensorProto  # pyright: ignore[reportMissingImports]

        called = name or proto.name
        if len(proto.dims) > MOST_AXES:  # before their product, which takes time quadratic in their number
            raise _malformed(called, f"{len(proto.dims)} axes", f"at most {MOST_AXES}")
        shape = tuple(proto.dims)
        if min(shape, default=0) < 0 or prod(shape) > LARGEST_WEIGHT:
            raise _malformed(called, f"shape {shape}", "dimensions of 0 or more, at most 2^40 values")
        if proto.data_type not in TensorProto.DataType.values():
            raise _malformed(called, f"data type {proto.data_type}", "a type of onnx.proto")
        return cls(called, shape, TensorProto.DataType.Name(proto.data_type), proto, file)

    @property
    def is_weight(self) -> bool:
        """Whether its type is one that weights have."""
        return self.kind in _FLOATS or self.is_whole

    @property
    def is_whole(self) -> bool:
        """Whether it holds whole numbers of 8 or 4 bits."""
        return self.kind in _WHOLE or self.kind in _HALVES

    def read(self) -> Tensor:
        """Return its values; each 4-bit one takes a byte.

        Raises:
            FormatError: The values are not there, or fewer or more than its shape says.
        """
        dtype = {**_FLOATS, **_WHOLE, **_HALVES}[self.kind]
        count = prod(self.shape)
        nbytes = (count + 1) // 2 if self.kind in _HALVES else count * dtype.itemsize
        if self.proto.data_location == self.proto.EXTERNAL:
            stored = self._external(nbytes)
        elif self.proto.HasField("raw_data"):
            if len(self.proto.raw_data) != nbytes:
                raise _malformed(self.name, f"{len(self.proto.raw_data)} bytes", f"{nbytes} for shape {self.shape}")
            stored = torch.frombuffer(bytearray(self.proto.raw_data), dtype=torch.uint8) if nbytes else _none()
        else:
            stored = self._fields(nbytes)
        if self.kind in _HALVES:
            return _apart(stored, dtype, count).view(self.shape)
        return stored.view(dtype).view(self.shape)

    def _external(self, nbytes: int) -> Tensor:
        said = {entry.key: entry.value for entry in self.proto.external_data}
        offset, length = _number(self.name, said, "offset", 0), _number(self.name, said, "length", nbytes)
        location = said.get("location", "")
        place = Path(location)
        if not location or place.is_absolute() or ".." in place.parts or "\0" in location:
            raise _malformed(
                self.name, f"external data in {cut(repr(location), 120)}", "a file beside the model, or below"
            )
        if length != nbytes:
            raise _malformed(self.name, f"{length} bytes of external data", f"{nbytes} for shape {self.shape}")
        self._require_beside(location)
        return Entry(self.name, (nbytes,), "U8", self.file.parent / place, offset, nbytes).bytes()

    def _require_beside(self, location: str) -> None:
        """Refuse external data that is no plain file, or that a link takes out of the folders of the model.

        The hub's cache has links in one folder to files in another: those beside the file that the model's own link
        stands for are taken.
        """
        file = self.file.parent / location
        try:
            require_plain(file)
            real, folders = file.resolve(), (self.file.parent.resolve(), self.file.resolve().parent)
        except (OSError, RuntimeError) as error:
            why = reason(error) if isinstance(error, OSError) else str(error)
            raise _malformed(
                self.name, f"external data in {cut(repr(location), 120)}: {why}", "a file that can be read"
            ) from error
        if not any(real.is_relative_to(folder) for folder in folders):
            raise _malformed(
                self.name, f"external data in {cut(repr(location), 120)}, a link to elsewhere", "a file beside it"
            )

    def _fields(self, nbytes: int) -> Tensor:
        """Read values that stand in the message's typed fields, each type in its own."""
        from onnx import numpy_helper  # pyright: ignore[reportMissingImports]

        try:
            values = np.ascontiguousarray(numpy_helper.to_array(self.proto))
        except (ValueError, TypeError, OverflowError, KeyError) as error:
            raise _malformed(
                self.name, f"{type(error).__name__}: {error}", f"the values of shape {self.shape}"
            ) from error
        if self.kind in _HALVES:
            return _together(torch.from_numpy(values.astype(np.int8)))
        stored = torch.from_numpy(values.reshape(-1).view(np.uint8).copy())
        if stored.numel() != nbytes:
            raise _malformed(self.name, f"{stored.numel()} bytes", f"{nbytes} for shape {self.shape}")
        return stored


def _number(name: str, said: Mapping[str, str], key: str, default: int) -> int:
    text = said.get(key, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise _malformed(name, f"external data with {key} {cut(repr(text), 40)}", "a whole number of bytes")
    return int(text)


def _apart(stored: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    both = torch.stack((stored & 15, stored >> 4), -1).flatten()[:count]
    return both if dtype is torch.uint8 else torch.where(both > 7, both.to(torch.int8) - 16, both.to(torch.int8))


def _together(values: Tensor) -> Tensor:
    low = values.flatten().to(torch.uint8) & 15
    low = torch.cat((low, low.new_zeros(low.numel() % 2)))
    return low[::2] | low[1::2] << 4


def _none() -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu")


def _malformed(name: str, got: str, wanted: str) -> FormatError:
    return FormatError(
        "an initialiser of the ONNX file is malformed",
        got=f"`{cut(name, 120)}`: {got}",
        wanted=wanted,
        remedy="export the model again; onnx.checker.check_model says more",
    )
