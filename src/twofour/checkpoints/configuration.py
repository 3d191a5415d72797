"""config.json: the model class of a Hugging Face folder, and a model of it without values.

A folder is a stranger's: nothing of it is run, nothing is fetched for it, and what it asks for has limits.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from twofour.checkpoints.limits import limited, require_modest
from twofour.checkpoints.offline import Refused, offline
from twofour.errors import SourceError, absent, cut, explained
from twofour.files import json_or_none, read_json, require_plain

CONFIG = "config.json"

_ELSEWHERE = ("auto_map", "configuration_files", "use_kernels", "kernel_config", "fusion_config")
"""Entries of a config.json that choose code, other files, or kernels that are fetched."""
_CHOSEN = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
_BUILT_IN = ("eager", "sdpa")
"""Ways of attention that come with torch; others are packages, or repositories of the hub."""


def architectures(config: Path) -> tuple[str, ...] | None:
    """Return the class names in a config.json, or None where the file is not a model's config."""
    content = json_or_none(config)
    if not isinstance(content, dict) or "model_type" not in content:
        return None
    names = content.get("architectures")
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()


def transformers_for(folder: Path) -> ModuleType:
    """Import transformers, silent.

    Raises:
        SourceError: It is not installed, or cannot be imported.
    """
    try:
        import transformers  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        what = f"{folder} needs transformers to be loaded"
        raise absent(SourceError, what, error, "the package transformers", "hf") from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Let transformers read a folder inside: offline, and plain files alone.

    Raises:
        OSError: A pipe, a socket or a device stands beside the model, which transformers would wait for.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if os.path.exists(entry.path) and not (entry.is_dir() or entry.is_file()):
                require_plain(entry.path)
    with offline():
        yield


def described(transformers: ModuleType, folder: Path) -> tuple[Any, Any]:
    """Return the config that a folder's config.json means, and the class of the model; call it inside `reading`.

    Of the config is left out what would have transformers look elsewhere: weights of a backbone, kernels of the hub.

    Raises:
        ValueError: A number in it is larger than any model's, or a name in `architectures` is no model's.
    """
    content = read_json(folder / CONFIG)
    require_modest(content)
    with tempfile.TemporaryDirectory(prefix="twofour-") as copy:
        (Path(copy) / CONFIG).write_text(json.dumps(_alone(content)), encoding="utf-8")
        config = transformers.AutoConfig.from_pretrained(copy, local_files_only=True, trust_remote_code=False)
    config.name_or_path = os.fspath(folder)
    return config, _model_class(transformers, architectures(folder / CONFIG) or ())


def empty_model(folder: Path) -> nn.Module:
    """Make the model that a folder's config.json describes on the meta device, where weights take no memory.

    No code from the folder is run: a model that brings its own is refused. No connection is opened.

    Raises:
        SourceError: transformers is not installed, does not know the model, or cannot make it; or it is larger than
            any model: see `limits`.
    """
    transformers = transformers_for(folder)
    try:
        with reading(folder), limited():
            config, cls = described(transformers, folder)
            with torch.device("meta"):
                model = cls.from_config(config) if cls is transformers.AutoModel else cls(config)
    except Exception as error:  # every kind of trouble in a foreign folder ends in the same sentence
        raise unmade(transformers, folder, error) from error
    return model.eval()


def unmade(transformers: ModuleType, folder: Path, error: Exception) -> SourceError:
    """Build the error for a folder whose model cannot be made."""
    got = explained(error)
    remedy = "a model with code of its own is never run from a folder: load it in Python and use twofour.prune"
    if _wants_network(error):
        got = f"something that lies elsewhere is asked for: {got.partition(': offline mode')[0]}"
        remedy = "nothing is fetched for a folder: write what it names into its config.json, `backbone_config` for one"
    return SourceError(
        f"transformers cannot make the model that {folder / CONFIG} describes",
        got=got,
        wanted=f"the config.json of a model that transformers {transformers.__version__} has a class for",
        remedy=remedy,
    )


def _wants_network(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, Refused) or type(error).__name__ == "OfflineModeIsEnabled":
            return True
        error = error.__cause__ or error.__context__
    return False


def _model_class(transformers: ModuleType, names: tuple[str, ...]) -> Any:
    """Return the first class of a model that the config names, else AutoModel, for names that transformers has not."""
    for name in names:
        found = getattr(transformers, name, None) if name.isidentifier() else None
        if found is None:
            continue
        model = transformers.PreTrainedModel
        if isinstance(found, type) and issubclass(found, model) and found is not model:
            return found
        packages = ", ".join(getattr(found, "_backends", ()))
        raise ValueError(
            f"`{cut(name, 80)}` in `architectures` " + (f"needs {packages}" if packages else "is no class of a model")
        )
    return transformers.AutoModel


def _alone(content: Any) -> Any:
    """Return a config's content without what has transformers look elsewhere."""
    if isinstance(content, list):
        return [_alone(value) for value in content]
    if not isinstance(content, dict):
        return content
    kept = {
        key: _alone(value)
        for key, value in content.items()
        if key not in _ELSEWHERE and not (key in _CHOSEN and value not in _BUILT_IN)
    }
    if "use_pretrained_backbone" in kept:
        kept["use_pretrained_backbone"] = False
    if isinstance(options := kept.get("backbone_kwargs"), dict):
        kept["backbone_kwargs"] = {
            key: value for key, value in options.items() if not key.startswith(("pretrained", "checkpoint"))
        }
    return kept
