"""config.json: the model class of a Hugging Face folder, and a model of it without values."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from twofour.errors import SourceError

CONFIG = "config.json"


def architectures(config: Path) -> tuple[str, ...] | None:
    """Return the class names in a config.json, or None where the file is not a model's config."""
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or "model_type" not in content:
        return None
    names = content.get("architectures")
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()


def transformers_for(folder: Path) -> ModuleType:
    """Import transformers, silent.

    Raises:
        SourceError: It is not installed.
    """
    try:
        import transformers  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise SourceError(
            f"{folder} needs transformers to be loaded",
            got=str(error),
            wanted="the package transformers",
            remedy='`pip install ".[text]"` in a checkout of twofour',
        ) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def model_class(transformers: ModuleType, folder: Path) -> Any:
    """Return the first class of transformers that the config names, else AutoModel."""
    names = architectures(folder / CONFIG) or ()
    return next((found for name in names if (found := getattr(transformers, name, None))), transformers.AutoModel)


def empty_model(folder: Path) -> nn.Module:
    """Make the model that a folder's config.json describes on the meta device, where weights take no memory.

    No code from the folder is run: a model that brings its own is refused.

    Raises:
        SourceError: transformers is not installed, does not know the model, or cannot make it.
    """
    transformers = transformers_for(folder)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        cls = model_class(transformers, folder)
        with torch.device("meta"):
            model = cls.from_config(config) if cls is transformers.AutoModel else cls(config)
    except Exception as error:  # every kind of trouble in a foreign folder ends in the same sentence
        raise SourceError(
            f"transformers cannot make the model that {folder / CONFIG} describes",
            got=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
            wanted=f"the config.json of a model that transformers {transformers.__version__} has a class for",
            remedy="a model with code of its own is never run from a folder: load it in Python and use twofour.prune",
        ) from error
    return model.eval()
