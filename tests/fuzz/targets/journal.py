"""The journal of a streamed run and the files beside it: what is gone on with is whole, and no file is lost."""

from __future__ import annotations

import json
import zlib
from typing import Any

from tests.fuzz.cursor import WORDS, Cursor, edit_bytes, edit_json
from tests.fuzz.shelf import put, shelf
from twofour.streaming.journal import Journal

TRACED = ("twofour.streaming.journal", "twofour.files")
SEEDS = (b"", b"\x01\x02\x03", b"\x00\x08\x01")

FILES = {"model-1.safetensors": b"first", "model-2.safetensors": b"second"}
OWN = "thesis.txt"
"""A file of the user's."""
ASKED = {"source": ["a", 1], "recipe": "r", "version": "1"}
TEXTS = [*FILES, OWN, "../thesis.txt", "/etc/passwd", ".", "", "a\0b", "x" * 300, "model-3.safetensors", ASKED]


def good() -> dict[str, Any]:
    """Return the journal of a run that finished both files."""
    weight = {"name": "w", "file": "f", "kind": "linear", "shape": [8, 8], "axis": 1, "pattern": "2:4"}
    weights = [{**weight, "zeros": 0.5, "kept": 0.9}]
    done = {
        name: {"bytes": len(content), "crc32": zlib.crc32(content), "weights": weights}
        for name, content in FILES.items()
    }
    return {"format": 1, "asked": ASKED, "done": done}


def build(data: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Return the journal and the files that lie in the folder."""
    cursor = Cursor(data)
    found, files, whole = good(), {**FILES, OWN: b"mine"}, b""
    for _ in range(6):
        if cursor.empty:
            break
        action = cursor.number(16)
        if action < 12:
            edit_json(cursor, found, WORDS + TEXTS, ("x", OWN, "done", "claimed", *FILES))
        elif action < 14:
            files[cursor.pick(list(FILES))] = edit_bytes(cursor, b"first")
        elif action == 14:
            files.pop(cursor.pick(list(FILES)), None)
        else:
            whole = edit_bytes(cursor, json.dumps(found).encode())
    return whole or json.dumps(found).encode(), files


def run(built: tuple[bytes, dict[str, bytes]]) -> str:
    """Go on with it; the files it calls finished are those that were written, and all others stay."""
    text, files = built
    folder = shelf() / "out"
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        put(f"out/{name}", content)
    for name in FILES.keys() - files.keys():
        (folder / name).unlink(missing_ok=True)
    journal = Journal(put("out.journal.json", text), folder, ASKED)
    try:
        with journal.opened():
            for name in journal.files:
                assert files[name] == FILES[name] or name == OWN, name
                assert all(isinstance(outcome.shape, tuple) for outcome in journal.outcomes(name))
    finally:
        assert (folder / OWN).read_bytes() == b"mine", "the user's file was lost"
    return f"{len(journal.files)} files"
