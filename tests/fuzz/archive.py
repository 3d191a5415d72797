"""Files of torch.save taken apart and put together: zip archives with right checksums, pickles opcode by opcode."""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Sequence

from tests.fuzz.cursor import NUMBERS, Cursor, edit_bytes

Entries = list[tuple[str, bytes]]

SNIPPETS = [b"]", b"}", b")", b"(", b"t", b"s", b"u", b"a", b"e", b"R", b"Q", b"b", b"0", b"2", b"N", b".", b"\x85"]
SNIPPETS += [b"\x81", b"\x86", b"\x87", b"\x88", b"\x94", b"h\x00", b"q\x00", b"K\x07", b"J\xff\xff\xff\xff"]
SNIPPETS += [b"h\x01", b"h\x02", b"h\x05", b"G\x7f\xf8\0\0\0\0\0\0", b"X\x01\0\0\0x", b"X\x07\0\0\0storage"]
SNIPPETS += [b"X\x01\0\0\x000", b"X\x03\0\0\0cpu", b"X\x04\0\0\0cuda", b"X\x04\0\0\0meta", b"\x8a\x08" + b"\x7f" * 8]
SNIPPETS += [b"c%s\n" % name for name in (b"os\nsystem", b"builtins\neval", b"torch._utils\n_rebuild_tensor_v2")]
SNIPPETS += [
    b"c%s\n" % name for name in (b"torch\nFloatStorage", b"torch\nHalfStorage", b"torch\nTensor", b"torch\nint8")
]
SNIPPETS += [
    b"c%s\n" % name for name in (b"collections\nOrderedDict", b"torch\nSize", b"torch._utils\n_rebuild_parameter")
]
SNIPPETS += [b"c%s\n" % name for name in (b"torch.nn.modules.linear\nLinear", b"torch._utils\n_rebuild_sparse_tensor")]
SNIPPETS += [b"ctorch._tensor\n_rebuild_from_type_v2\n", b"ctorch._utils\n_rebuild_qtensor\n", b"ctorch\ndevice\n"]
SNIPPETS += [b"ctorch._utils\n_rebuild_device_tensor_from_numpy\n", b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n"]


def entries_of(whole: bytes) -> Entries:
    """Return what a zip archive holds."""
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        return [(entry.filename, archive.read(entry)) for entry in archive.infolist()]


def zipped(entries: Sequence[tuple[str, bytes]], method: int = 0, told: int | None = None) -> bytes:
    """Return an archive of stored entries, twenty times as fast as zipfile.

    Args:
        entries: Names and contents.
        method: Said of how they are compressed.
        told: Said of the last one's size.
    """
    body, directory = bytearray(), bytearray()
    for position, (name, content) in enumerate(entries):
        text = name.encode("utf-8", "surrogateescape")
        size = told if told is not None and position == len(entries) - 1 else len(content)
        fields = struct.pack("<HHHHHLLLHH", 20, 2048, method, 0, 33, zlib.crc32(content), size, size, len(text), 0)
        directory += b"PK\x01\x02\x14\0" + fields + struct.pack("<HHHLL", 0, 0, 0, 0, len(body)) + text
        body += b"PK\x03\x04" + fields + text + content
    count = len(entries)
    end = struct.pack("<HHHHLLH", 0, 0, count & 0xFFFF, count & 0xFFFF, len(directory), len(body), 0)
    return bytes(body) + bytes(directory) + b"PK\x05\x06" + end


def opcodes(pickled: bytes) -> list[bytes]:
    """Return a pickle's opcodes with their arguments, without those that note what is never asked for again."""
    pickled = pickletools.optimize(pickled)
    starts = [place for _, _, place in pickletools.genops(pickled) if place is not None]
    return [pickled[start:end] for start, end in zip(starts, [*starts[1:], len(pickled)], strict=True)]


def edit_opcodes(cursor: Cursor, codes: list[bytes]) -> None:
    """Change a pickle in place: a number, a text, a snippet put in, opcodes taken out, doubled or moved."""
    if not codes:
        return
    place, action = cursor.number(1 << 16) % len(codes), cursor.number(6)
    code = codes[place]
    if action == 0:
        codes.insert(place, cursor.pick(SNIPPETS))
    elif action == 1:
        codes[place] = cursor.pick(SNIPPETS)
    elif action == 2:
        del codes[place : place + 1 + cursor.number(8)]
    elif action == 3:
        codes[place:place] = codes[place : place + 1 + cursor.number(16)]
    elif action == 4 and code[:1] in b"KMJ":
        number = cursor.pick([n for n in NUMBERS if -(1 << 63) <= n < 1 << 63])
        codes[place] = b"\x8a\x08" + struct.pack("<q", number)
    elif len(code) > 1:
        changed = bytearray(code)
        changed[cursor.number(256) % len(changed)] = cursor.number(256)
        codes[place] = bytes(changed)


def edit_archive(cursor: Cursor, entries: Entries) -> bytes | None:
    """Change which entries there are or what one holds, in place; or return the archive's bytes where those changed."""
    action, place = cursor.number(8), cursor.number(max(1, len(entries)))
    if not entries:
        return None
    name, content = entries[place]
    if action == 0:
        del entries[place]
    elif action == 1:
        entries.append((cursor.pick(entries)[0], content))
    elif action == 2:
        entries[place] = (name + chr(cursor.number(256)), content)
    elif action < 5:
        entries[place] = (name, edit_bytes(cursor, content))
    elif action == 5:
        return zipped(entries, method=cursor.pick((1, 8, 12, 99)))
    elif action == 6:
        return zipped(entries, told=cursor.pick([n for n in NUMBERS if 0 <= n < 1 << 32]))
    else:
        return edit_bytes(cursor, zipped(entries))
    return None
