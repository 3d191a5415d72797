"""A masked transformer to a folder of Hugging Face: weights, config with a note, model card, tokenizer files."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_model
from torch import nn

from twofour import masks
from twofour.checkpoints import CONFIG, WEIGHTS, Checkpoint
from twofour.compiler.replaceable import require_plain
from twofour.errors import ExportError
from twofour.export.card import Accuracy, card
from twofour.export.kept import require_kept
from twofour.export.plain import write_plain
from twofour.files import LARGEST_LIST, as_new, json_or_none, making, named, read_json, writing
from twofour.layers import full_tensor, walk
from twofour.recipe import Recipe
from twofour.streaming.companions import companions, copy_companions
from twofour.streaming.prune import earlier_criterion, write_note

logger = logging.getLogger("twofour.export")

CARD, BASE_CARD, RECIPE, REPORT = "README.md", "README.base.md", "recipe.toml", "report.json"
MAX_SHARD_BYTES = 5_000_000_000


def to_huggingface(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    recipe: Recipe | None = None,
    accuracy: Accuracy | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[str]:
    """Write a masked model of transformers as a folder that `from_pretrained` and `twofour check` read.

    The weights are plain, zeros included; their files' metadata says which are sparse, config.json has a note `twofour`
    with the patterns, and the model card states pattern, recipe and accuracy. The folder appears whole or not at all.

    Args:
        model: A model of transformers with masks.
        folder: New or empty.
        source: Folder of the dense model: its tokenizer and other files are copied, its card becomes README.base.md.
        recipe: How the model was made sparse, for the card and recipe.toml.
        accuracy: What was measured, for the card.
        max_shard_bytes: Bytes of tensors in a file at most.

    Returns:
        The names of the sparse weights in the files.

    Raises:
        ExportError: The model is none of transformers, a weight does not keep its mask's pattern, or the folder holds
            something or cannot be written.
        SourceError: Something in `source` cannot be copied, such as a link out of it.
        CompileError: The model is compiled already.
    """
    require_plain(model)
    target = named(folder, ExportError, "the path of the folder")
    require_kept(model)
    save = _saver(model)
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise ExportError(
            f"{target} holds something",
            got="a file, or a folder with entries",
            wanted="a new or empty folder",
            remedy="name another folder",
        )
    beside = companions(Path(source)) if source is not None else {}
    with writing(target, ExportError, "the folder"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with making(target, lambda made: os.replace(made, target)) as made:  # takes the place of an empty folder
            names = _write(model, made, save, beside, recipe, accuracy, max_shard_bytes)
    return names


def write_pruned(model: nn.Module, target: Path, source: Path | None, criterion: str | None) -> None:
    """Write a masked model's plain weights, zeros included, into a folder, with the promise in their metadata.

    Args:
        model: With masks.
        target: The folder; it exists.
        source: The folder of Hugging Face that the model is of, whose other files are copied; None for another model.
        criterion: Name of the criterion, for config.json; None where no weight was pruned: an earlier one stays.
    """
    if source is None:
        save_model(model, str(target / WEIGHTS))
    else:
        copy_companions(companions(source), target)
        # One file: the promise in its metadata is then in one place too.
        model.save_pretrained(target, max_shard_size="1000GB")  # pyright: ignore[reportCallIssue]
    patterns, axes, _ = _promised(model, Checkpoint.open(target / WEIGHTS))
    as_new(target / WEIGHTS)
    _promise(target / WEIGHTS, patterns, axes)
    if source is not None:
        write_note(target / CONFIG, patterns, criterion or earlier_criterion(source))


def _saver(model: nn.Module) -> Any:
    save: Any = getattr(model, "save_pretrained", None)
    if save is None:
        raise ExportError(
            "only models of transformers are written as a folder of Hugging Face",
            got=type(model).__name__,
            wanted="a model with save_pretrained",
            remedy="twofour.save(model, path, packed=False), or twofour.export.to_safetensors(model, path)",
        )
    return save


def _write(
    model: nn.Module,
    made: Path,
    save: Any,
    beside: Mapping[str, Path],
    recipe: Recipe | None,
    accuracy: Accuracy | None,
    max_shard_bytes: int,
) -> list[str]:
    copy_companions(beside, made)
    if (made / CARD).exists():
        (made / CARD).rename(made / BASE_CARD)
    _drop_report(made / REPORT)
    save(made, max_shard_size=max_shard_bytes)
    patterns, axes, zeros = _promised(model, Checkpoint.open(made))
    for file in sorted(made.glob("*.safetensors")):
        as_new(file)
        _promise(file, patterns, axes)
    if recipe is not None:
        recipe.save(made / RECIPE)
    write_note(made / CONFIG, patterns, recipe.criterion.name if recipe else None)
    dense = sum(parameter.ndim > 1 for _, parameter in model.named_parameters()) - len(zeros)
    name = read_json(made / CONFIG).get("_name_or_path") or type(model).__name__
    text = card(Path(name).name, _loader(model), patterns, zeros, dense, recipe, accuracy)
    (made / CARD).write_text(text, encoding="utf-8")
    return list(patterns)


def _loader(model: nn.Module) -> str:
    """Return the class of transformers that reads the folder; AutoModel would drop a head."""
    kind = type(model)
    return kind.__name__ if kind.__module__.startswith("transformers.") else "AutoModel"


def _drop_report(path: Path) -> None:
    """Remove what `twofour prune` reported: it names folders of the machine that it ran on."""
    said = json_or_none(path, LARGEST_LIST)
    if isinstance(said, dict) and {"source", "out", "files"} <= said.keys():
        path.unlink()


def _promised(model: nn.Module, written: Checkpoint) -> tuple[dict[str, str], dict[str, int], dict[str, float]]:
    """Return patterns, axes and shares of zeros by the names that the weights have in the files."""
    attached = masks.of(model)
    patterns, axes, zeros = dict[str, str](), dict[str, int](), dict[str, float]()
    for weight in walk(model, eligibility="any", tied="*").weights:
        mask = next((attached[name] for name in weight.names if name in attached), None)
        if mask is None:
            continue
        stored = next((name for name in weight.names if name in written.entries), None)
        if stored is None:
            logger.warning(
                "layer `%s`: transformers stored it under another name; nothing is promised of it", mask.name
            )
            continue
        patterns[stored], axes[stored] = mask.pattern.name, mask.axis.axis
        values = full_tensor(mask.module.get_parameter(mask.attribute).detach())
        zeros[stored] = float((values == 0).double().mean())
    return patterns, axes, zeros


def _promise(file: Path, patterns: dict[str, str], axes: dict[str, int]) -> None:
    """Write a file again with the promise for its own tensors in the metadata."""
    found, read = Checkpoint.open_all(file)
    tensors = read[file]
    own = {name: pattern for name, pattern in patterns.items() if name in tensors}
    write_plain(file, tensors, own, {name: axes[name] for name in own}, found.metadata[file])
