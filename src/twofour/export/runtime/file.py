"""The file of programs that libtwofour reads, byte by byte: docs/runtime.md has its format."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

import torch

from twofour import native
from twofour.errors import ExportError
from twofour.export.runtime.program import Constants, Lying, Program
from twofour.files import replacing, writing
from twofour.graph.executor.replay import TYPES

MAGIC = b"24PROG\r\n"
VERSION = 1
HEADER = struct.Struct("<8sIIQQQQQQ")
ALIGNMENT = 64
DIGEST = 8
"""Bytes of the header that are its digest, at its end."""


def write_programs(path: str | os.PathLike[str], programs: Sequence[Program], constants: Constants) -> int:
    """Write a file; returns its bytes.

    Raises:
        ExportError: It cannot be written.
    """
    content = encoded(programs, constants)
    with writing(path, ExportError), replacing(path) as temporary:
        temporary.write_bytes(content)
    return len(content)


def encoded(programs: Sequence[Program], constants: Constants) -> bytearray:
    """Return the bytes of a file."""
    blocks = constants.blocks()
    places, at = [], 0
    for block in blocks:
        places.append((at, len(block)))
        at = _rounded(at + len(block))
    parts = [struct.pack("<I", len(places)), *[struct.pack("<QQ", *place) for place in places]]
    parts += [struct.pack("<I", len(programs)), *[_program(one, constants) for one in programs]]
    description = b"".join(parts)
    begin = _rounded(HEADER.size + len(description))
    size = begin + (places[-1][0] + places[-1][1] if places else 0)
    content = bytearray(size)
    content[HEADER.size : HEADER.size + len(description)] = description
    for (offset, count), block in zip(places, blocks, strict=True):
        content[begin + offset : begin + offset + count] = block
    content[: HEADER.size] = HEADER.pack(MAGIC, VERSION, 0, size, len(description), begin, 0, 0, 0)
    seal(content)
    return content


def seal(content: bytearray) -> None:
    """Write the digest of a file's bytes into its header."""
    seed = _digest(content[: HEADER.size - DIGEST], 0)
    content[HEADER.size - DIGEST : HEADER.size] = struct.pack("<Q", _digest(content[HEADER.size :], seed))


def _digest(content: bytearray, seed: int) -> int:
    if not content:
        return native.extension().digest(torch.empty(0, dtype=torch.uint8, device="cpu"), seed)
    return native.extension().digest(torch.frombuffer(content, dtype=torch.uint8), seed)


def _program(program: Program, constants: Constants) -> bytes:
    parts = [struct.pack("<I", len(program.inputs))]
    for name, tensor in program.inputs:
        parts.append(_text(name) + _shape(tensor.dtype, tuple(tensor.shape)))
    parts.append(struct.pack("<qI", program.arena, len(program.places)))
    places = [one if isinstance(one, Lying) else constants.place(one) for one in program.places]
    for place in places:
        buffer = {"arena": 0, "input": 1, "constant": 1 + len(program.inputs)}[place.memory] + place.index
        parts.append(struct.pack("<Iq", buffer, place.offset) + _shape(place.dtype, place.shape))
        parts.append(struct.pack(f"<{len(place.strides)}q", *place.strides))
    parts.append(struct.pack("<I", len(program.calls)))
    for call in program.calls:
        parts.append(_text(call.name) + struct.pack("<I", len(call.arguments)) + call.arguments)
        parts.append(struct.pack(f"<I{len(call.operands)}i", len(call.operands), *call.operands))
    parts.append(struct.pack("<I", len(program.outputs)))
    for name, index in program.outputs:
        parts.append(_text(name) + _shape(places[index].dtype, places[index].shape) + struct.pack("<i", index))
    return b"".join(parts)


def _text(text: str) -> bytes:
    if not (text.isascii() and text.isprintable()):
        raise ExportError(
            "a name of an input or output is not printable ASCII",
            got=ascii(text),
            wanted="a name that a C program can write",
            remedy="rename it",
        )
    content = text.encode()
    return struct.pack("<H", len(content)) + content


def _shape(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    if dtype not in TYPES:
        raise ExportError(
            "an input or output has numbers that libtwofour does not know",
            got=str(dtype),
            wanted=", ".join(map(str, TYPES)),
            remedy="convert it outside of the model",
        )
    return struct.pack(f"<BB{len(shape)}q", TYPES.index(dtype), len(shape), *shape)


def _rounded(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
