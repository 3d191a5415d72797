"""Messages of protobuf changed field by field: lengths are repaired all the way up, whatever changes inside."""

from __future__ import annotations

import struct

from tests.fuzz.cursor import NUMBERS, Cursor, edit_bytes

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def varint(number: int) -> bytes:
    """Write a number, seven bits a byte."""
    number &= (1 << 64) - 1
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def fields_of(message: bytes) -> list[tuple[int, int, bytes]] | None:
    """Return a message's fields, (number, kind, content), or None where the bytes are none."""
    found, place = [], 0
    while place < len(message):
        key, place = _varint(message, place)
        kind = key & 7
        if kind == VARINT:
            start = place
            _, place = _varint(message, place)
            found.append((key >> 3, kind, message[start:place]))
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
            found.append((key >> 3, kind, message[place : place + size]))
            place += size
        elif kind == BYTES:
            length, place = _varint(message, place)
            found.append((key >> 3, kind, message[place : place + length]))
            place += length
        else:
            return None
        if place > len(message) or key < 8:
            return None
    return found


def joined(fields: list[tuple[int, int, bytes]]) -> bytes:
    """Return the message of the fields."""
    return b"".join(
        varint(number << 3 | kind) + (varint(len(content)) if kind == BYTES else b"") + content
        for number, kind, content in fields
    )


def edited(cursor: Cursor, message: bytes, texts: tuple[bytes, ...], depth: int = 0) -> bytes:
    """Return the message with one field, at some depth, changed, taken out, doubled or given another number.

    Args:
        cursor: Chooses.
        message: A message.
        texts: What a name may be replaced by.
        depth: How many messages it lies in.
    """
    fields = fields_of(message)
    if not fields:
        return edit_bytes(cursor, message)
    place, action = cursor.number(256) % len(fields), cursor.number(16)
    number, kind, content = fields[place]
    if action == 0:
        del fields[place]
    elif action == 1:
        fields.insert(place, fields[cursor.number(256) % len(fields)])
    elif action == 2:
        fields[place] = (1 + cursor.number(24), kind, content)
    elif kind == VARINT:
        fields[place] = (number, kind, varint(cursor.number(32) if action < 10 else cursor.pick(NUMBERS)))
    elif kind != BYTES:
        fields[place] = (number, kind, struct.pack("<Q", cursor.pick(NUMBERS) & ((1 << 64) - 1))[: len(content)])
    elif action < 12 and depth < 6 and fields_of(content):
        fields[place] = (number, kind, edited(cursor, content, texts, depth + 1))
    elif action < 14:
        fields[place] = (number, kind, cursor.pick(texts))
    else:
        fields[place] = (number, kind, edit_bytes(cursor, content))
    return joined(fields)


def _varint(message: bytes, place: int) -> tuple[int, int]:
    number = shift = 0
    while place < len(message):
        byte = message[place]
        place += 1
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128 or shift > 63:
            break
    return number, place
