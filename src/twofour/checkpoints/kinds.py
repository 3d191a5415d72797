"""Files that are no weights here, by their endings: what they are, and what to do with them."""

from __future__ import annotations

from pathlib import Path

PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".chkp", ".tar")
"""Endings of files that torch.save writes."""

_REMEDIES = {
    ".onnx": "ONNX is an output format, which only `check` reads: name the model that the file was exported from",
    ".json": "name the folder that holds it: an index and a config.json are read with the weights beside them",
    ".toml": "a recipe says how to prune, and is no model: name the model, or its folder",
    **dict.fromkeys(
        PICKLED,
        "a pickled checkpoint can run code when loaded: write it with safetensors.torch.save_file, "
        "or `twofour import` it if its weights are sparse",
    ),
}


def remedy_for(path: Path, accepted: str) -> str:
    """Say what to do with a file that is not of an accepted kind."""
    return _REMEDIES.get(path.suffix.lower(), f"name {accepted}")
