"""A call of a Hugging Face model like those of its users: what it is captured and timed on, and calibrated by."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twofour.calls import Example
from twofour.errors import DataError, cut, explained

logger = logging.getLogger("twofour.integrations")

BATCH = 32
"""Texts of one calibration batch."""


def example_of(model: Any, batch: int, length: int, names: Sequence[str] | None = None) -> dict[str, Tensor] | None:
    """Return the keyword arguments of one call, None where none can be made up.

    Sequences hold random tokens and are of different lengths, so that the mask hides some; a graph holds for calls
    with the same arguments.

    Args:
        model: Of transformers; it may be on the meta device.
        batch: Sequences or images.
        length: Tokens of the longest sequence.
        names: Of the arguments; default: those that the tokenizer beside the model gives.
    """
    made = _images(model, batch) if model.main_input_name == "pixel_values" else _sequences(model, batch, length, names)
    if made is None:
        logger.info("layer by layer: no call of %s with `%s` is known", type(model).__name__, model.main_input_name)
    return made


def runs(model: nn.Module, example: Any) -> bool:
    """Tell whether a model runs on an example that was made up; where it does not, say why."""
    try:
        with torch.no_grad():
            Example.of(example).run(model)
    except Exception as error:  # a model refuses inputs in any way it likes
        said = cut(explained(error), 200)
        logger.warning("layer by layer: the model does not run on %s: %s", ", ".join(example), said)
        return False
    return True


def batches(model: nn.Module, data: Iterable[Any]) -> tuple[Any, int | None]:
    """Return calibration data as `twofour.prune` takes them, and how many samples they are if they are texts.

    Texts of like length share a batch, so that little of it is padding, which costs as much as text.

    Args:
        model: Loaded, of transformers; its tokenizer lies beside it.
        data: Sentences or pairs of them; everything else is returned as it is.

    Raises:
        DataError: There is no text, or no tokenizer beside the model.
    """
    listed = data if isinstance(data, Sequence) and not isinstance(data, str) else None
    if isinstance(data, str) or (listed is not None and not len(listed)):
        raise DataError("the calibration data hold no sentences", got=cut(repr(data), 60), wanted="a list of sentences")
    if listed is None or not all(map(_is_text, listed)):
        return data, None
    tokenizer = _tokenizer(model)
    if isinstance(tokenizer, Exception):
        raise DataError(
            "there is no tokenizer for the sentences",
            got=explained(tokenizer),
            wanted="a tokenizer beside the model's weights",
            remedy="pass batches: data=[tokenizer(texts, padding=True, return_tensors='pt')]",
        ) from tokenizer
    alike = sorted(listed, key=lambda entry: len(entry) if isinstance(entry, str) else sum(map(len, entry)))
    return list(_tokenized(tokenizer, alike, _longest(model))), len(listed)


def _is_text(entry: Any) -> bool:
    return isinstance(entry, str) or (isinstance(entry, tuple | list) and [*map(type, entry)] == [str, str])


def _tokenized(tokenizer: Any, texts: Sequence[Any], longest: int | None) -> Iterator[dict[str, Tensor]]:
    options = {"padding": True, "return_tensors": "pt", "truncation": True, "max_length": longest}
    for start in range(0, len(texts), BATCH):
        part = texts[start : start + BATCH]
        given = [part] if isinstance(part[0], str) else [list(column) for column in zip(*part, strict=True)]
        yield dict(tokenizer(*given, **options))


def _sequences(model: Any, batch: int, length: int, names: Sequence[str] | None) -> dict[str, Tensor] | None:
    table = model.get_input_embeddings()
    if model.main_input_name != "input_ids" or not isinstance(table, nn.Embedding):
        return None
    rows, longest = table.num_embeddings, _longest(model)
    length = length if longest is None else max(2, min(length, longest))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(rows // 2, rows, (batch, length), generator=generator, device="cpu")
    lengths = torch.linspace(max(1, length // 2), length, batch, dtype=torch.float32, device="cpu").long()
    mask = (torch.arange(length, device="cpu") < lengths[:, None]).long()
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    ids = ids if padding is None else ids.where(mask.bool(), padding)
    known = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    made = {name: known[name] for name in (_names(model) if names is None else names) if name in known}
    return made | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder and _decodes(model) else {})


def _images(model: Any, batch: int) -> dict[str, Tensor] | None:
    size, channels = (getattr(model.config, name, None) for name in ("image_size", "num_channels"))
    sides = list(size) if isinstance(size, tuple | list) else [size, size]
    shape = [size for size in (batch, channels, *sides) if isinstance(size, int)]
    if len(shape) < 4:
        return None
    generator = torch.Generator().manual_seed(0)
    return {"pixel_values": torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(model.dtype)}


def _names(model: Any) -> list[str]:
    """Return the names that the tokenizer gives to what it makes of a text."""
    tokenizer = _tokenizer(model)
    if isinstance(tokenizer, Exception):
        logger.info("input_ids and attention_mask alone: no tokenizer beside the model (%s)", explained(tokenizer))
        return ["input_ids", "attention_mask"]
    return [*tokenizer.model_input_names]


def _tokenizer(model: Any) -> Any:
    """Return the tokenizer beside a model, or why there is none; nothing is fetched, no code of the folder is run."""
    from transformers import AutoTokenizer

    try:
        where = {"revision": model.config._commit_hash} if getattr(model.config, "_commit_hash", None) else {}
        return AutoTokenizer.from_pretrained(model.config.name_or_path, local_files_only=True, **where)
    except Exception as error:  # OSError, ValueError, and what its own dependencies raise
        return error


def _longest(model: Any) -> int | None:
    """Return how many tokens a sequence may have; RoBERTa's positions begin behind the padding's."""
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    return positions - 2 if type(positions) is int and positions > 4 else None


def _decodes(model: Any) -> bool:
    return "decoder_input_ids" in inspect.signature(type(model).forward).parameters
