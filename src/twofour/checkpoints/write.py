"""Tensors to a safetensors file, in the very file that it is given.

safetensors' own writer makes a file under a name of its own in the same folder and renames it: when the process is
killed that file stays, and nobody can tell whose it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from twofour.checkpoints.entry import DTYPES
from twofour.errors import FormatError
from twofour.files import bytes_of
from twofour.shapes import Shaped, UInt8

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"),
)
"""The order in which safetensors writes types, so that one model gives one file, whoever writes it."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write named tensors into `path`, byte by byte as safetensors does, the metadata in the order of its keys.

    Args:
        path: File to write; what was in it is gone at once: see `twofour.files.replacing`.
        tensors: By name, of any device and strides; each is written on its own, also where two share memory.
        metadata: Free text by key.

    Raises:
        FormatError: safetensors has no name for a tensor's type.
        OSError: The file cannot be written.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise FormatError(
                "a tensor has a type that the file cannot hold",
                got=f"`{name}` is {str(tensor.dtype).removeprefix('torch.')}",
                wanted=", ".join(DTYPES),
                code="no-dtype",
            )
    order = sorted(tensors, key=lambda name: (_ORDER.index(_NAMES[tensors[name].dtype]), name.encode()))
    shapes = [(name, _NAMES[tensors[name].dtype], tensors[name].shape, tensors[name].nbytes) for name in order]
    with open(path, "wb") as file:
        file.write(header_bytes(shapes, metadata))
        for name in order:
            if tensors[name].nbytes:
                file.write(stored_bytes(tensors[name]).numpy().data)


def stored_bytes(tensor: Shaped[Tensor, " ..."]) -> UInt8[Tensor, " bytes"]:
    """Return the bytes that a file has of a tensor (...), of any device and strides: uint8 (bytes,)."""
    return bytes_of(tensor.detach().resolve_conj().resolve_neg().to("cpu"))


def header_bytes(tensors: Iterable[tuple[str, str, Iterable[int], int]], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a file, the header filled up to a multiple of 8 with spaces, as safetensors does.

    Args:
        tensors: Name, type by safetensors' name, shape and bytes of each tensor, in the order of their bytes.
        metadata: Free text by key.
    """
    table: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    at = 0
    for name, dtype, shape, nbytes in tensors:
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at := at + nbytes]}
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
