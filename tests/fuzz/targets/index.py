"""model.safetensors.index.json and the shards it names."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save

from tests.fuzz.cursor import WORDS, Cursor, edit_bytes, edit_json
from tests.fuzz.draft import Draft
from tests.fuzz.shelf import put, shelf
from twofour.checkpoints import INDEX, Checkpoint

TRACED = ("twofour.checkpoints", "twofour.files")
SEEDS = (b"",)

SHARDS = ("model-1.safetensors", "model-2.safetensors")
TEXTS = [*SHARDS, "model-3.safetensors", "../x.safetensors", "/etc/passwd", "a\0.safetensors", "..\\x.safetensors"]
TEXTS += ["a.weight", ".safetensors", "x" * 300 + ".safetensors", INDEX]


@cache
def good() -> tuple[Draft, Draft]:
    """Return two shards."""
    one = save({"a.weight": torch.ones(4, 4), "a.bias": torch.ones(4)}, {"format": "pt"})
    return Draft.of(one), Draft.of(save({"b.weight": torch.ones(4, 4).half()}))


@cache
def hub() -> Path:
    """Return the folder of the index and the shards."""
    (shelf() / "index").mkdir()
    return shelf() / "index"


def build(data: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the index and the shards."""
    cursor = Cursor(data)
    drafts = [draft.copy() for draft in good()]
    places = {name: SHARDS[i] for i, draft in enumerate(drafts) for name in draft.parts}
    index = {"metadata": {"total_size": 112}, "weight_map": places}
    found = [b"", b"", b""]
    for _ in range(6):
        if cursor.empty:
            break
        action = cursor.number(8)
        if action < 5:
            edit_json(cursor, index, WORDS + TEXTS, ("a.weight", "c.weight", "weight_map"))
        elif action < 7:
            drafts[action - 5].edit(cursor, ("a.weight", "b.weight", "c.weight"))
        elif action == 7 and cursor.number(2):
            found[0] = edit_bytes(cursor, json.dumps(index).encode())
        else:
            which = cursor.number(2)
            found[1 + which] = drafts[which].broken(cursor)
    contents = (json.dumps(index).encode(), *(draft.to_bytes() for draft in drafts))
    return tuple(edited or content for edited, content in zip(found, contents, strict=True))


def run(built: tuple[bytes, bytes, bytes]) -> str:
    """Open the folder and read a tensor of each file; none lies elsewhere."""
    folder = hub()
    for name, content in zip((INDEX, *SHARDS), built, strict=True):
        put(f"index/{name}", content)
    found = Checkpoint.open(folder)
    assert all(file.parent == folder for file in found.files)
    for file, tensors in found.read_all().items():
        for name, tensor in tensors.items():
            entry = found.entries[name]
            assert entry.file == file and tuple(tensor.shape) == entry.shape and tensor.nbytes == entry.nbytes
    return "read"
