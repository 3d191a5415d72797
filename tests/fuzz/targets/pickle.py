"""State dicts that torch.save wrote, as zip archives and in the form before them."""

from __future__ import annotations

import io
import pickletools
import warnings
import zlib
from collections import OrderedDict
from functools import cache

import torch
from torch.sparse import SparseSemiStructuredTensorCUTLASS
from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

from tests.fuzz.archive import Entries, edit_archive, edit_opcodes, entries_of, opcodes, zipped
from tests.fuzz.cursor import Cursor, edit_bytes
from tests.fuzz.imported import require_sound
from tests.fuzz.shelf import put
from tests.importing.small import sparse
from twofour import importing

TRACED = ("twofour.importing", "twofour.files", "torch._weights_only_unpickler")
SEEDS = (b"", b"\x01", b"\x02", b"\x03")


@cache
def saved(kind: int, whole: bool) -> bytes:
    """Return a good file: a plain state dict, or one with a tensor of torch's semi-structured class."""
    torch.manual_seed(1)
    state = OrderedDict({"fc.weight": sparse(8, 16), "fc.bias": torch.nn.Parameter(torch.ones(8))})
    if kind:
        packed, meta = sparse_semi_structured_from_dense_cutlass(sparse(32, 64, torch.float16))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch calls the class a prototype
            parts = {"packed": packed, "meta": meta, "packed_t": None, "meta_t": None}
            made = SparseSemiStructuredTensorCUTLASS((32, 64), **parts, compressed_swizzled_bitmask=None)
        state = {"fc.weight": made, "other.weight": sparse(8, 16), "other.__weight_mma_mask": sparse(8, 16).ne(0)}
    buffer = io.BytesIO()
    content = {"state_dict": state, "step": 3} if kind else state
    torch.save(content, buffer, _use_new_zipfile_serialization=whole)
    return buffer.getvalue()


@cache
def entries(kind: int) -> Entries:
    """Return the archive's entries, the pickle left empty."""
    return entries_of(saved(kind, True))


@cache
def codes(kind: int, whole: bool) -> tuple[bytes, ...]:
    """Return the opcodes of the archive's pickle, or of the five pickles before the older form's tensors."""
    if whole:
        return tuple(opcodes(next(content for name, content in entries(kind) if name.endswith("data.pkl"))))
    stream, found = io.BytesIO(saved(kind, False)), []
    for _ in range(5):
        start = stream.tell()
        for _code in pickletools.genops(stream):
            pass
        found += opcodes(stream.getvalue()[start : stream.tell()])
    return (*found, stream.read())


def build(data: bytes) -> bytes:
    """Return the file."""
    cursor = Cursor(data)
    first = cursor.number(4)
    kind, whole = first % 2, first < 2
    program, held = list(codes(kind, whole)), list(entries(kind))
    for _ in range(6):
        if cursor.empty:
            break
        if not whole or cursor.number(2):
            edit_opcodes(cursor, program)
        elif (found := edit_archive(cursor, held)) is not None:
            return found
    if not whole:
        content = b"".join(program)
        return edit_bytes(cursor, content) if not cursor.empty else content
    return zipped([(name, b"".join(program) if name.endswith("data.pkl") else of) for name, of in held])


def run(built: bytes) -> str:
    """Decode it; what comes back is what it is said to be."""
    return require_sound(importing.decode(put("state.pt", built)), zlib.crc32(built))
