"""`save_pretrained` of a compiled model: plain weights with zeros, which need nothing of ours, or our packed form."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import twofour
from twofour.checkpoints import CONFIG, Checkpoint, describe
from twofour.errors import ExportError
from twofour.export.save_load import contents_of
from twofour.files import as_new, named, read_json, replacing
from twofour.integrations.config import TwoFourConfig
from twofour.streaming.prune import write_note

KEY = "quantization_config"
"""What transformers reads in a config.json, before the weights."""


def save_pretrained(
    model: Any,
    save_directory: str | os.PathLike[str],
    *,
    packed: bool | None = None,
    config_key: bool | None = None,
    **kwargs: Any,
) -> None:
    """Write a compiled model as a folder that `from_pretrained` reads.

    Plain weights have their zeros, in the model's own dtype, and files and config.json say which are sparse; of int8
    and int4 they are the rounded ones. Our packed form keeps what was compiled, to the bit, with the graph and the
    times of this machine.

    Args:
        model: From `from_pretrained` with a TwoFourConfig.
        save_directory: Made where it is missing.
        packed: As in TwoFourConfig, whose value is the default.
        config_key: As in TwoFourConfig, whose value is the default.
        **kwargs: As transformers' `save_pretrained` takes them; of a packed folder `max_shard_size` in bytes alone.

    Raises:
        ExportError: An argument means nothing for a packed folder, or config_key=False is asked for one.
        FormatError: The packed folder cannot be written, or holds another program's weights.
    """
    config = model.hf_quantizer.quantization_config
    packed = bool(config.packed if packed is None else packed)
    if packed and config_key is False:
        raise ExportError(
            "a packed folder needs its key",
            got="packed=True, config_key=False",
            wanted="`quantization_config` in its config.json: without it transformers reads no packed weight",
            remedy="leave config_key out, or save plain weights",
        )
    key = packed or (config.config_key if config_key is None else config_key)
    folder = named(save_directory, ExportError, "the path of the folder")
    if packed:
        _save_packed(model, folder, kwargs)
    else:
        type(model).save_pretrained(model, folder, **kwargs)
        for file in folder.glob("*.safetensors"):
            as_new(file)
        if (folder / CONFIG).exists():  # not in a process of several that leaves the writing to another
            write_note(folder / CONFIG, Checkpoint.open(folder).promise.patterns, config.criterion)
    if key and (folder / CONFIG).exists():
        write_key(folder / CONFIG, config, packed)


def plain(model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the state dict of the model that was compiled, zeros included, and what its files say of it."""
    contents = contents_of(model, packed=False)
    own = model.state_dict().keys()
    found = {name: tensor if name in own else _cast(tensor, model.dtype) for name, tensor in contents.plain.items()}
    said = describe(contents.settings.get("patterns", {}), contents.settings.get("axes", {}))
    return found | {alias: found[name] for alias, name in contents.aliases.items()}, said


def write_key(file: Path, config: TwoFourConfig, packed: bool) -> None:
    """Let a config.json name our quantizer."""
    said = {**config.to_dict(), "packed": packed, "version": twofour.__version__}
    with replacing(file) as temporary:
        text = json.dumps({**read_json(file), KEY: said}, indent=2, ensure_ascii=False)
        temporary.write_text(text + "\n", encoding="utf-8")


def _save_packed(model: Any, folder: Path, given: Mapping[str, Any]) -> None:
    most = given.get("max_shard_size")
    passed = {"safe_serialization", "is_main_process", "max_shard_size"}
    if others := sorted(given.keys() - passed):
        raise ExportError(
            "the argument means nothing for a packed folder",
            got=", ".join(others),
            wanted="max_shard_size alone",
            remedy="save plain weights, or the packed folder without it",
        )
    folder.mkdir(parents=True, exist_ok=True)
    twofour.save(model, folder, max_shard_bytes=most)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
