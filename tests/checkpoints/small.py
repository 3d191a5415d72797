"""Small checkpoints as Hugging Face writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor


def shards(folder: Path, *parts: dict[str, Tensor]) -> Path:
    """Write tensors into files of a folder, with the index of which tensor is where."""
    folder.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    write_index(folder, places)
    return folder


def write_index(folder: Path, places: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def random(folder: Path, family: str, cls: str, shard: str = "100KB", **sizes: Any) -> Path:
    """Write the folder of a random model of transformers; `family` names its config, `cls` its class."""
    transformers = pytest.importorskip("transformers", reason="needs the extra [text]")
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, family)(**sizes))
    model.save_pretrained(folder, max_shard_size=shard)
    return folder
