"""Hugging Face folders: found, loaded and written without the network and without unpickling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from twofour.checkpoints import CONFIG, architectures, model_class, transformers_for
from twofour.errors import SourceError
from twofour.streaming.prune import copy_companions


def is_model(folder: Path) -> bool:
    """Tell whether a folder holds a model's config.json with safetensors beside it."""
    return architectures(folder / CONFIG) is not None and any(folder.glob("*.safetensors"))


def find(folder: Path) -> Path:
    """Return `folder`, or the only folder right inside it (as packages lay it out), that holds a model.

    Raises:
        SourceError: There is none, or several.
    """
    if is_model(folder):
        return folder
    inside = sorted(child for child in folder.iterdir() if child.is_dir() and is_model(child))
    if len(inside) == 1:
        return inside[0]
    raise SourceError(
        f"{folder} is not a Hugging Face model folder",
        got=f"{len(inside)} model folders inside it" if inside else _lacking(folder),
        wanted="config.json (with model_type) and model.safetensors",
        remedy="name one of the folders inside, or a .safetensors file",
    )


def _lacking(folder: Path) -> str:
    if (folder / CONFIG).is_file() and architectures(folder / CONFIG) is None:
        return f"a {CONFIG} that is no JSON object with model_type"
    return "no config.json with a .safetensors file beside it"


def load(folder: Path) -> nn.Module:
    """Load the model with transformers, in the class that its config names, on the CPU and in evaluation mode.

    Raises:
        SourceError: transformers is not installed, or it cannot load the folder.
    """
    transformers = transformers_for(folder)
    try:
        model = model_class(transformers, folder).from_pretrained(folder, local_files_only=True, use_safetensors=True)
    except Exception as error:  # every kind of trouble in a foreign folder ends in the same sentence
        raise SourceError(
            f"transformers cannot load {folder}",
            got=f"{type(error).__name__}: {error}",
            wanted="config.json and safetensors weights of one model",
        ) from error
    return model.eval()


def tokenizer(folder: Path) -> Any:
    """Load the tokenizer beside the model.

    Raises:
        SourceError: transformers is not installed, or the folder holds no tokenizer.
    """
    transformers = transformers_for(folder)
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # every kind of trouble in a foreign folder ends in the same sentence
        raise SourceError(
            f"{folder} has no tokenizer that can be loaded",
            got=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
            wanted="tokenizer.json or what the model's tokenizer needs",
            remedy="write inputs as arrays, .npz or .safetensors, or name a function that returns them",
        ) from error


def save(model: nn.Module, source: Path, target: Path) -> Path:
    """Write the model in Hugging Face form with the tokenizer files of `source`; return the weights' path."""
    copy_companions(source, target)
    # One file: the promise in its metadata is then in one place too.
    model.save_pretrained(target, max_shard_size="1000GB")  # pyright: ignore[reportCallIssue]
    return target / "model.safetensors"
