"""Files of libtwofour, changed and sealed again: refused with a text, or run within their memory.

Each input is a program of one call of the extension, of which every bound function has some, its description or its
constants changed. Under the sanitizers' build the library is theirs too.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.export.runtime import library as lib
from tests.fuzz.cursor import NUMBERS, Cursor
from tests.native.calls import models, products, recurrent
from twofour import native
from twofour.export.runtime.file import HEADER, seal

TRACED = ("twofour.export.runtime",)
SEEDS = tuple(bytes([number]) for number in range(0, 250, 5))

SIGNED = [number for number in NUMBERS if -(1 << 63) <= number < 1 << 63]
MOST_BYTES = 1 << 22
"""Inputs and outputs that are larger are not made."""


@dataclass(frozen=True, eq=False)
class Changed:
    """Bytes of a file, and what the call answered before they were changed; None where they were."""

    content: bytearray
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor] | None


@cache
def files() -> list[tuple[bytearray, dict[str, Tensor], dict[str, Tensor]]]:
    """Return a file for each recorded call of the rows that this machine has."""
    torch.manual_seed(0)
    found = []
    for make in (products, recurrent, models):
        for isa, function, arguments in make(1):
            made = lib.recorded_call(function, arguments) if native.supports(isa) else None
            found += [made] if made else []
    return found


def build(data: bytes) -> Changed:
    """Return a file whose description, header, constants or length are changed."""
    cursor = Cursor(data)
    good, inputs, outputs = cursor.pick(files())
    content, whole = bytearray(good), True
    described = HEADER.unpack(good[: HEADER.size])[4]
    for _ in range(6):
        if cursor.empty:
            break
        action, whole = cursor.number(10), False
        if action < 3:
            place = HEADER.size + cursor.number(1 << 16) % described
            content[place % len(content)] = cursor.number(256)
        elif action < 6:
            form, numbers = cursor.pick((("<i", [-2, -1, 0, 1, 2, 3, 9, 1 << 30]), ("<q", SIGNED), ("<q", range(64))))
            place = HEADER.size + cursor.number(1 << 16) % described
            if place + 8 <= len(content):
                struct.pack_into(form, content, place, cursor.pick(numbers))
        elif action < 8:
            for _ in range(1 + cursor.number(16)):
                content[cursor.number(1 << 20) % len(content)] = cursor.number(256)
        elif action == 8:
            place = HEADER.size + cursor.number(1 << 16) % described
            del content[place : place + 1 + cursor.number(16)]
        elif len(content) > HEADER.size:
            del content[max(HEADER.size, len(content) - 1 - cursor.number(256)) :]
    if not whole and cursor.number(8) != 7 and len(content) >= HEADER.size:
        if cursor.number(4) != 3:
            struct.pack_into("<Q", content, 16, len(content))
        seal(content)
    return Changed(content, inputs, outputs if whole else None)


def run(built: Changed) -> str:
    """Load it and run it on what it asks for; what was not changed answers as before."""
    try:
        model = lib.Model(built.content)
        given: dict[str, Tensor] = {}
        for name, dtype, shape in model.described("input"):
            if torch.empty(shape, dtype=dtype, device="meta").nbytes > MOST_BYTES:
                return "large"
            known = built.inputs.get(name)
            fits = known is not None and known.dtype is dtype and tuple(known.shape) == shape
            given[name] = known if fits else torch.ones(shape, dtype=dtype)  # type: ignore[assignment]
        wanted = model.described("output")
        if any(torch.empty(shape, dtype=dtype, device="meta").nbytes > MOST_BYTES for _, dtype, shape in wanted):
            return "large"
        found = model.run(given)
    except lib.RefusedError as error:
        assert built.outputs is None, error
        assert len(str(error)) > 20 and error.status not in (lib.ARGUMENT, lib.FILE), error
        return f"status {error.status}"
    if built.outputs is not None:
        _require_same(found, built.outputs)
    return "good"


def _require_same(found: dict[str, Tensor], want: dict[str, Any]) -> None:
    assert found.keys() == want.keys()
    for name, one in want.items():
        assert torch.equal(found[name].view(torch.uint8), one.contiguous().view(torch.uint8)), name
