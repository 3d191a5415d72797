"""Weights and files for the tests of check."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from twofour import legality, patterns


def pruned(weight: Tensor, axis: int, pattern: str = "2:4") -> Tensor:
    """Prune along any axis, to make legal weights and wrong ones."""
    last = weight.detach().movedim(axis, -1)
    keep = patterns.parse(pattern).project(last.contiguous(), absolute=True)
    return torch.where(keep, last, 0.0).movedim(-1, axis).contiguous()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def finding(report: legality.Report, name: str) -> legality.Finding:
    return next(found for found in report.layers if found.name == name)


def write_shards(folder: Path, shards: Mapping[str, Mapping[str, Tensor]], config: object = None) -> Path:
    """Write a sharded checkpoint, with a config.json where one is given."""
    folder.mkdir(exist_ok=True)
    places = {}
    for file, tensors in shards.items():
        save_file(dict(tensors), folder / file)
        places |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder
