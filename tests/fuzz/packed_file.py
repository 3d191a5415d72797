"""Bytes to a damaged twofour file: which of the good ones, which damages, where."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import torch
from torch import nn

from tests.fuzz.cursor import WORDS, Cursor, edit_json
from tests.fuzz.draft import Draft
from tests.fuzz.shelf import shelf
from twofour.export import Contents
from twofour.export.digest import DIGEST
from twofour.export.file import write
from twofour.packing import Packed, pack, read_pattern

KINDS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("2:4", "float32", {}),
    ("2:4", "bfloat16", {}),
    ("2:4", "int8", {}),
    ("2:4", "int4", {"group": 32, "symmetric": False}),
    ("1:2", "tf32", {}),
    ("1:4", "float16", {}),
    ("2:6", "float32", {}),
    ("4:2:8", "float32", {}),
    ("4:8-pairs", "int4", {}),
    ("block:4x16@0.5", "float32", {}),
    ("block:3x7@0.7/2", "bfloat16", {}),
    ("block:1x32@0.9", "int8", {}),
    ("dense", "s2", {"group": 24}),
    ("2:4", "ternary", {}),
    ("dense", "ternary5", {}),
    ("block:4x16@0.5", "b1", {}),
    ("1:4", "u3", {"group": 32}),
    ("2:4", "s2", {}),
    ("dense", "int8", {}),
)
"""Pattern, encoding and options of the packed weight in each good file."""

LOW = ("s2", "ternary", "ternary5")
"""Encodings of weights that a layer may compute in."""

WEIGHT, ROWS, COLUMNS = "fc.weight", 8, 96
NAMES = ("x", WEIGHT, "fc.bias", "tied.weight", "tied.bias", *(f"{WEIGHT}.{part}" for part in ("zeros", "scales")))
KEYS = (*NAMES, "group", "version", "axes", "patterns", "ranges", "images", "fc", "low_bits", "static", "inputs")
TEXTS = ["2:4", "1:2", "4:8", "2:4:8", "4:8-pairs", "2:4-transposable", "64:2:16", "float32", "tf32", "int4", "int8"]
TEXTS += ["bfloat16", "canonical", WEIGHT, [8], [8, 96], [96, 8], {"fc": [0.1, 3]}, {"fc": 1 << 20}, "compiled"]
TEXTS += [
    "dense",
    "s2",
    "b1",
    "u8",
    "ternary",
    "ternary5",
    "s9",
    {"fc": {"weights": "s2", "inputs": None, "static": False}},
]
TEXTS += ["block:4x16@0.5", "block:3x7@0.7/2", "block:1024x1024@0", "block:4x4@0.999999999", "block:8x2@0.5/64"]
CHOICES = WORDS + TEXTS
"""What a value of the JSON may be replaced by."""


class Model(nn.Module):
    """The model that the good files are of."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.tied = nn.Linear(COLUMNS, ROWS), nn.Linear(COLUMNS, ROWS)
        self.tied.weight, self.tied.bias = self.fc.weight, self.fc.bias


@cache
def good(kind: int) -> Draft:
    """Return a good file."""
    pattern, dtype, options = KINDS[kind]
    draw = torch.Generator().manual_seed(kind)
    weight = torch.randn(ROWS, COLUMNS, generator=draw)
    weight = weight * read_pattern(pattern).project(weight, absolute=True)
    if pattern == "4:8-pairs":
        weight = (weight * 2).clamp(-8, 7).to(torch.int8)
    packed: Packed = pack(weight, pattern, dtype, **options)
    plain = {"fc.bias": torch.randn(ROWS, generator=draw)}
    aliases = {"tied.weight": WEIGHT, "tied.bias": "fc.bias"}
    settings: dict[str, Any] = {"kind": "compiled", "dtype": "float32", "tokens": [1], "counts": {"fc": 1}}
    if dtype in LOW and not options:
        plain |= {"fc.input_step": torch.tensor(0.25), "fc.input_zero": torch.tensor(3.0)}
        settings["low_bits"] = {"fc": {"weights": dtype, "inputs": "u4", "static": True}}
    patterns = {WEIGHT: pattern} if packed.header.sparse else {}
    path = shelf() / "good.safetensors"
    write(path, Contents(plain, {WEIGHT: packed}, aliases, {**settings, "patterns": patterns}))
    draft = Draft.of(path.read_bytes())
    del draft.metadata[DIGEST]  # it would refuse every damage before the checks that are to be tried
    return draft


def damaged(cursor: Cursor) -> bytes:
    """Return the file that the choices describe; none describe a good one."""
    draft = good(cursor.number(len(KINDS))).copy()
    described = json.loads(draft.metadata["twofour"])
    for _ in range(6):
        if cursor.empty:
            break
        action = cursor.number(8)
        if action < 4:
            draft.edit(cursor, NAMES)
        elif action < 6 and isinstance(packed := described.get("packed"), dict) and packed:
            edit_json(cursor, packed, CHOICES, KEYS)
        elif action < 7:
            edit_json(cursor, described, CHOICES, KEYS)
        else:
            draft.metadata["twofour"] = json.dumps(described)
            return draft.broken(cursor)
    draft.metadata["twofour"] = json.dumps(described)
    return draft.to_bytes()
