"""Hugging Face folders: found, loaded and written without the network and without unpickling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from twofour.checkpoints import CONFIG, Checkpoint, architectures, empty_model, transformers_for
from twofour.checkpoints.configuration import described, reading
from twofour.checkpoints.limits import size_of
from twofour.errors import SourceError, explained
from twofour.files import json_or_none

GROWTH, SLACK = 8, 1 << 30
"""A model may be eight times its files, 4 bits there and float32 here, and a gigabyte: a head that is not there."""


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

    No connection is opened, and no code of the folder is run.

    Raises:
        SourceError: transformers is not installed, it cannot load the folder, or the model is far larger than its
            files.
        FormatError: The files of weights are damaged.
    """
    transformers = transformers_for(folder)
    _require_filled(folder)
    try:
        with reading(folder):
            config, cls = described(transformers, folder)
            model = cls.from_pretrained(
                folder, config=config, local_files_only=True, use_safetensors=True, trust_remote_code=False
            )
    except Exception as error:  # every kind of trouble in a foreign folder ends in the same sentence
        raise SourceError(
            f"transformers cannot load {folder}",
            got=explained(error),
            wanted="config.json and safetensors weights of one model",
        ) from error
    return model.eval()


def _require_filled(folder: Path) -> None:
    """Refuse a config.json of a model far larger than its weights: what the files lack is made at random values."""
    stored, made = Checkpoint.open(folder).nbytes, size_of(empty_model(folder))
    if made > (most := GROWTH * stored + SLACK):
        raise SourceError(
            f"{folder / CONFIG} describes a far larger model than its weights are of",
            got=f"a model of {made} bytes, {stored} bytes in the files",
            wanted=f"at most {most} bytes: {GROWTH} times those of the files, and a gigabyte",
            remedy="put the config.json beside the weights that they were saved with",
        )


def pooling(folder: Path) -> str:
    """Return how a folder of sentence-transformers makes one embedding of those of the tokens: "mean" or "cls"."""
    for place in (folder, folder.parent):
        found = json_or_none(place / "1_Pooling" / CONFIG)
        if isinstance(found, dict):
            return "cls" if found.get("pooling_mode_cls_token") is True else "mean"
    return "mean"


def sentence_class(folder: Path) -> str:
    """Return the class of sentence-transformers that loads a folder, "" of a folder that it has not written."""
    if not (folder / "modules.json").is_file():
        return ""
    found = json_or_none(folder / "config_sentence_transformers.json")
    said = found.get("model_type") if isinstance(found, dict) else None
    return said if said in ("CrossEncoder", "SparseEncoder") else "SentenceTransformer"  # older ones do not say


def as_served(model: nn.Module, folder: Path) -> nn.Module:
    """Return a folder's model as sentence-transformers sets it, where it loads it: graphs hold for equal settings."""
    config: Any = getattr(model, "config", None)
    if sentence_class(folder) and hasattr(config, "use_cache"):
        config.use_cache = False
    return model


def tokenizer(folder: Path) -> Any:
    """Load the tokenizer beside the model.

    Raises:
        SourceError: transformers is not installed, or the folder holds no tokenizer; transformers makes one without any
            word for a folder that holds none.
    """
    transformers = transformers_for(folder)
    try:
        with reading(folder):
            found = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            if len(found) <= len(set(found.all_special_tokens)):
                raise ValueError(f"a tokenizer of {len(found)} special tokens and no word")
            return found
    except Exception as error:  # every kind of trouble in a foreign folder ends in the same sentence
        raise SourceError(
            f"{folder} has no tokenizer that can be loaded",
            got=explained(error),
            wanted="tokenizer.json or what the model's tokenizer needs",
            remedy="write inputs as arrays, .npz or .safetensors, or name a function that returns them",
        ) from error
