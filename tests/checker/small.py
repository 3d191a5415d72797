"""Weights and files for the tests of check."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from twofour import checker, patterns


def pruned(weight: Tensor, axis: int, pattern: str = "2:4") -> Tensor:
    """Prune along any axis, to make legal weights and wrong ones."""
    last = weight.detach().movedim(axis, -1)
    keep = patterns.parse(pattern).project(last.contiguous(), absolute=True)
    return torch.where(keep, last, 0.0).movedim(-1, axis).contiguous()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def finding(report: checker.Report, name: str) -> checker.Finding:
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


def damages(longest: int) -> st.SearchStrategy[Callable[[bytes], bytes]]:
    """Ways to damage a file: a few bytes put in or taken out anywhere, and perhaps all behind some place cut off."""
    edits = st.lists(st.tuples(st.integers(0, 5000), st.binary(max_size=4), st.integers(0, 4)), min_size=1, max_size=4)
    cuts = st.one_of(st.none(), st.integers(0, longest))
    return st.builds(lambda edited, cut: lambda content: _damaged(content, edited, cut), edits, cuts)


def _damaged(content: bytes, edits: list[tuple[int, bytes, int]], cut: int | None) -> bytes:
    damaged = bytearray(content)
    for at, put, drop in edits:
        at %= len(damaged) + 1
        damaged[at : at + drop] = put
    return bytes(damaged[:cut])
