"""Opens a foreign checkpoint: a safetensors file, a Hugging Face folder, or a state dict that torch.save wrote."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.sparse import (
    SparseSemiStructuredTensor,
    SparseSemiStructuredTensorCUSPARSELT,
    SparseSemiStructuredTensorCUTLASS,
)

from twofour.checkpoints import Checkpoint
from twofour.checkpoints.checkpoint import PICKLED
from twofour.errors import FormatError, cut
from twofour.files import is_archive, named, read_json, require_sound, unreadable
from twofour.importing.base import Source, shown

INSIDE = ("model_state_dict", "state_dict", "model", "module", "net", "weights")
"""Names under which training scripts store the model's state dict, the first one found being taken."""

OURS = "twofour"


class Inert:
    """What a class named in a pickled file becomes: apex's own test stores `[torch.nn.Linear]` beside the weights."""

    def __init__(self, *_: object, **__: object) -> None:
        raise FormatError(
            "a checkpoint that makes objects of classes is not read", wanted="tensors, numbers and strings"
        )


_INERT = tuple(f"torch.nn.modules.{place}" for place in ("linear.Linear", "conv.Conv1d", "conv.Conv2d", "conv.Conv3d"))


def opened(path: str | os.PathLike[str]) -> Source:
    """Read the names and tensors of a checkpoint; nothing in it is executed.

    Raises:
        FormatError: There is nothing that can be read, or it is a file of ours.
    """
    path = named(path, FormatError)
    if not path.is_dir() and (path.suffix.lower() in PICKLED or is_archive(path)):
        return Source(path, _without_module(_state(path, _unpickled(path))))
    checkpoint = Checkpoint.open(path)
    metadata = {key: text for found in checkpoint.metadata.values() for key, text in found.items()}
    if OURS in metadata:
        raise FormatError(
            "the checkpoint is one of ours",
            got=f"{path}: what twofour.save wrote",
            wanted="the checkpoint of another library",
            remedy="twofour.load(path, model) reads it; masked=True for plain weights",
        )
    tensors = {name: checkpoint.read(name) for name in checkpoint.entries}
    config = {} if checkpoint.config is None else _config(checkpoint.config)
    return Source(path, _without_module(tensors), config, checkpoint.promise.patterns)


def _config(path: Path) -> Mapping[str, Any]:
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise FormatError(
            "the folder's config.json cannot be read", got=f"{path}: {error}", wanted="a JSON object"
        ) from error
    return found if isinstance(found, dict) else {}


def _unpickled(path: Path) -> Any:
    """Load a file of torch.save as tensors and plain containers, by torch's unpickler that calls nothing else."""
    names: Any = [SparseSemiStructuredTensorCUTLASS, SparseSemiStructuredTensorCUSPARSELT]
    names += [(Inert, name) for name in _INERT]
    try:
        require_sound(path)
        with torch.serialization.safe_globals(names):
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise unreadable(path, error, "checkpoint") from error
    except Exception as error:  # torch.load raises a dozen kinds for broken files
        raise FormatError(
            "the file cannot be read as a state dict",
            got=f"{path}: {type(error).__name__}: {cut(str(error).strip().partition(chr(10))[0], 200)}",
            wanted="tensors in plain containers, as torch.save(model.state_dict(), path) writes them",
            remedy="where you trust the file, load it in Python and save its state dict alone",
        ) from error


def _state(path: Path, content: Any) -> dict[str, Any]:
    """Find the state dict: the whole content, or what stands under one of `INSIDE`."""
    candidates = [content]
    if isinstance(content, Mapping):
        candidates += [content[name] for name in INSIDE if name in content]
    for candidate in candidates:
        if isinstance(candidate, Mapping) and any(isinstance(value, Tensor) for value in candidate.values()):
            found = {name: value for name, value in candidate.items() if isinstance(name, str)}
            return {name: _sound(path, name, value) for name, value in found.items() if isinstance(value, Tensor)}
    held = cut(", ".join(map(str, content)), 120) if isinstance(content, Mapping) else type(content).__name__
    raise FormatError(
        "the file holds no state dict",
        got=f"{path}: {held}",
        wanted=f"names and tensors, or a dict that has them under {', '.join(INSIDE)}",
        remedy="save the state dict alone: torch.save(model.state_dict(), path)",
    )


def _sound(path: Path, name: str, tensor: Tensor) -> Any:
    """Refuse tensors without memory of their own: strides of 0 make a byte look like terabytes."""
    if isinstance(tensor, SparseSemiStructuredTensor):
        for part in SparseSemiStructuredTensor.__slots__:
            inner = getattr(tensor, part, None)
            if isinstance(inner, Tensor):
                _sound(path, f"{name}.{part}", inner)
        return tensor
    held = (
        type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and tensor.device.type == "cpu"
    )
    if not held or tensor.is_quantized or tensor.untyped_storage().nbytes() < tensor.nbytes:
        raise FormatError(
            "a tensor of the checkpoint cannot be read",
            got=f"{path}: `{name}` {shown(tensor)}, {tensor.layout}, on {tensor.device}",
            wanted="dense tensors with all their values",
        )
    return tensor.detach()


def _without_module(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Take off the `module.` that DataParallel puts before every name."""
    if tensors and all(name.startswith("module.") for name in tensors):
        return {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    return dict(tensors)
