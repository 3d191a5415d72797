"""Checkpoints of other libraries in safetensors: compressed-tensors, torch's parts, apex, plain zeros."""

from __future__ import annotations

import json
import zlib
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

from tests.fuzz.cursor import WORDS, Cursor, edit_json
from tests.fuzz.draft import Draft
from tests.fuzz.imported import require_sound
from tests.fuzz.shelf import put, shelf
from tests.importing.small import bitmask_parts, sparse
from twofour import importing
from twofour.checkpoints import describe

TRACED = ("twofour.importing", "twofour.checkpoints", "twofour.packing", "twofour.patterns", "twofour.files")

DATA = Path(__file__).parents[2] / "data" / "importing"
LAYERS = {"bitmask_int8": "fc1", "bitmask_float8": "fc1", "sparse_bitmask": "fc1"}
MARLIN = ("channel", "bytes", "short")
KINDS = ("bitmask", *LAYERS, *MARLIN, "cutlass", "asp", "zeros", "promise")
SEEDS = (*(bytes([kind]) for kind in range(len(KINDS))), b"\x80", b"\x81")
"""The first byte chooses a kind, and from 128 on that it lies in a folder with a config.json."""

NAMES = ("fc.weight", "fc.bitmask", "fc.shape", "fc.meta", "fc.packed", "fc.weight_scale", "fc.row_offsets", "fc.bias")
NAMES += ("fc.weight.packed", "fc.weight.meta", "fc.weight.packed_t", "fc.weight.meta_t", "fc.__weight_mma_mask")
NAMES += ("fc.weight.compressed_swizzled_bitmask", "fc.weight_zero_point", "fc.weight_g_idx", "module.fc.weight")


@cache
def good(kind: str) -> Draft:
    """Return a checkpoint of each kind."""
    torch.manual_seed(1)
    return Draft.of(save(tensors(kind), describe({"fc.weight": "2:4"}, {}) if kind == "promise" else None))


def tensors(kind: str) -> dict[str, Tensor]:
    """Return what a checkpoint of a kind holds."""
    if kind in LAYERS or kind in MARLIN:
        stored = load_file(DATA / (kind if kind in LAYERS else "marlin_24") / "model.safetensors")
        layer = LAYERS.get(kind, kind)
        return {f"fc{name.removeprefix(layer)}": of for name, of in stored.items() if name.startswith(f"{layer}.")}
    weight = sparse(8, 16, torch.float16)
    if kind == "bitmask":
        return {f"fc.{name}": part for name, part in bitmask_parts(weight).items()} | {"fc.bias": torch.ones(8)}
    if kind == "cutlass":
        packed, meta = sparse_semi_structured_from_dense_cutlass(sparse(32, 64, torch.float16))
        return {"fc.weight.packed": packed, "fc.weight.meta": meta}
    if kind == "asp":
        keep = weight.ne(0)
        return {"fc.weight": weight, "fc.__weight_mma_mask": keep, "fc.__weight_mma_pruned_p": torch.ones(8, 16)}
    return {"fc.weight": weight, "fc.bias": torch.ones(8), "conv.weight": torch.ones(8, 8, 3)}


@cache
def hub() -> Path:
    """Return the folder for files with a config.json."""
    (shelf() / "hub").mkdir()
    return shelf() / "hub"


def build(data: bytes) -> tuple[bytes, bytes | None]:
    """Return the file, and the config.json beside it if there is one."""
    cursor = Cursor(data)
    first = cursor.number(256)
    draft, config = good(KINDS[first % 128 % len(KINDS)]).copy(), None
    if first > 127:
        described = {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}
        content = {"model_type": "x", "quantization_config": {**described, "transform_config": {}}}
        while not cursor.empty and cursor.number(2):
            edit_json(cursor, content, WORDS, ("transform_config", "x"))
        config = json.dumps(content).encode()
    for _ in range(6):
        if cursor.empty:
            break
        if cursor.number(8) == 0:
            return draft.broken(cursor), config
        draft.edit(cursor, NAMES)
    return draft.to_bytes(), config


def run(built: tuple[bytes, bytes | None]) -> str:
    """Decode it; what comes back is what it is said to be."""
    content, config = built
    if config is None:
        path = put("bare.safetensors", content)
    else:
        path = hub()
        put("hub/model.safetensors", content)
        put("hub/config.json", config)
    return require_sound(importing.decode(path), zlib.crc32(content))
