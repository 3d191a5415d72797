"""DATA: text on the command line to calibration data: of a function, arrays in a file, or texts to be tokenised."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from twofour.calibration import Batch, take
from twofour.cli import huggingface
from twofour.cli import source as sources
from twofour.cli.options import require_room, shape_of
from twofour.criteria import SAMPLES
from twofour.errors import SourceError, cut
from twofour.files import kind_of
from twofour.optimizing import Pairs

ARRAYS, TEXTS = (".safetensors", ".npz", ".npy"), (".txt", ".jsonl")
FORMS = "package.module:function that returns calibration data, or a file: " + ", ".join((*ARRAYS, *TEXTS))
MADE = (
    "of texts a .txt file with one a line (the model's tokenizer is taken); arrays by numpy.savez or "
    "safetensors.torch.save_file; or the name of a function"
)
"""How such data are made."""
BATCH = 8
MOST_TEXTS = 1 << 13
"""Texts that are read where nobody says how many samples are used."""
PAIRS = 'text<TAB>text<TAB>score a line (.tsv), or JSON objects with "text", "other" and "score" (.jsonl)'
MOST_PAIRS = 512
"""Pairs that judge; of more in a file so many are drawn by a fixed seed."""
UNKNOWN = 0.9
"""Share of a text's tokens that may be the one for unknown words."""


@dataclass(frozen=True)
class FromFile:
    """Batches read from a file: tensors, or dicts of them; and how many texts more it holds."""

    batches: list[Any]
    rest: int = 0


def read(text: str, source: sources.Source, samples: int, length: int, batch: int = BATCH) -> Any:
    """Return calibration data as `twofour.prune` takes them.

    Arrays of a file go to the arguments of the model's forward that have their names; a single array goes to the first
    argument. Their leading axis counts samples. Texts, one a line (plain, or JSON: a text or an object with "text"), go
    through the tokenizer of a Hugging Face folder.

    Args:
        text: "package.module:function" or the path of a file.
        source: The model's.
        samples: No more texts are read.
        length: Tokens of a text at most.
        batch: Samples of a batch of a file's.

    Raises:
        SourceError: It is neither, the file cannot be read, or the model has no tokenizer for texts.
    """
    path = Path(text).expanduser()
    if path.suffix in ARRAYS and path.is_file():
        return FromFile(_batches(_arrays(path), batch))
    if path.suffix in TEXTS and path.is_file():
        return FromFile(*_tokens(path, source, samples, length, batch))
    if ":" in text and not path.exists():
        return sources.returned(text, FORMS)
    raise SourceError(
        f"--data {text} cannot be used",
        got=kind_of(path) if path.exists() else "no such file",
        wanted=FORMS,
        remedy=MADE,
    )


def fitted(
    data: Any,
    model: nn.Module,
    samples: int | Callable[[Batch], int],
    *,
    tell: Callable[[str], object] | None = None,
) -> list[Any]:
    """Return the samples to use as a list, in which files' floating values have the model's dtype.

    Arrays of NumPy are float64 unless somebody cared. What a function returned is left as it is. `tell` is called with
    a sentence about data that are not used.

    Raises:
        DataError: There is no batch, or one that is no tensor, tuple, dict or pair of them.
    """
    rest = 0
    if isinstance(data, FromFile):
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        data, rest = [_cast(batch, dtype) for batch in data.batches], data.rest
    taken = take(model, data, samples, tell=tell)
    if rest and tell is not None:
        count = sum(batch.samples for batch in taken)
        tell(f"calibrated on {count} texts; not used: {rest} more. --samples takes another number")
    return [batch.inputs if batch.target is None else (batch.inputs, batch.target) for batch in taken]


def pairs(text: str, source: sources.Source, length: int, pooling: str, batch: int = BATCH) -> Pairs:
    """Return labelled pairs of texts as a judge: "text<TAB>text<TAB>score" or JSON objects a line.

    Args:
        text: Path of a .tsv or .jsonl file.
        source: The model's, whose tokenizer cuts the texts.
        length: Tokens of a text at most.
        pooling: How token embeddings become one.
        batch: Texts of one call.

    Raises:
        SourceError: The file cannot be read, a line is no pair, there are fewer than three, or there is no tokenizer.
    """
    path = Path(text).expanduser()
    rows = list(_pairs(path))
    if len(rows) < 3:
        raise SourceError(f"--pairs {path} holds too few pairs", got=f"{len(rows)}", wanted=f"at least 3; {PAIRS}")
    if len(rows) > MOST_PAIRS:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0), device="cpu")[:MOST_PAIRS]
        rows = [rows[index] for index in order.sort().values.tolist()]
    first, second, scores = zip(*rows, strict=True)
    one, other = (tokenized(path, source, list(side), length, batch) for side in (first, second))
    return Pairs(one, other, torch.tensor(scores, dtype=torch.float64, device="cpu"), pooling)


def _pairs(path: Path) -> Iterator[tuple[str, str, float]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _pair(path, number, line)
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"--pairs {path} cannot be read", got=str(error), wanted=PAIRS) from error


def _pair(path: Path, number: int, line: str) -> tuple[str, str, float]:
    try:
        if path.suffix == ".jsonl":
            content = json.loads(line)
            one, other, score = (content[name] for name in ("text", "other", "score"))
        else:
            one, other, score = line.rstrip("\n").split("\t")
        value = float(score)
        if not (isinstance(one, str) and isinstance(other, str) and math.isfinite(value)):
            raise ValueError
        return one, other, value
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise SourceError(
            f"line {number} of --pairs {path} is no labelled pair", got=cut(line.strip(), 80), wanted=PAIRS
        ) from error


def example(model: nn.Module, data: list[Any]) -> Any:
    """Return two samples to trace the model with."""
    return take(model, data, 2)[0].inputs


def traced(
    model: nn.Module,
    found: sources.Source,
    given: str | None,
    length: int,
    data: str | None,
    *,
    what: str,
    batch: int = 2,
) -> tuple[Any, Any]:
    """Return the input that a model is traced with, and batches of data where they are given.

    Args:
        model: Its forward's parameters say whether it takes token ids.
        found: The model's source: its tokenizer reads texts.
        given: Text of --input, the shape of a sample of real numbers.
        length: Tokens of a sample of ids.
        data: Text of --data; two samples of it are the input.
        what: What the input is for, as an error begins.
        batch: Samples, but of data.

    Raises:
        SourceError: No shape is given, and the model takes no token ids.
    """
    if data is not None:
        batches = fitted(read(data, found, SAMPLES, length), model, SAMPLES)
        return example(model, batches), batches
    draw = torch.Generator().manual_seed(0)
    if (size := shape_of(given)) is not None:
        require_room(batch, *size, item=4)
        return torch.randn(batch, *size, generator=draw, dtype=torch.float32, device="cpu"), None
    names = inspect.signature(model.forward).parameters
    if "input_ids" in names:
        require_room(batch, length, item=2 * 8)  # the ids and their mask
        words = int(getattr(getattr(model, "config", None), "vocab_size", 100))
        ids = torch.randint(0, words, (batch, length), generator=draw, device="cpu")
        mask = {"attention_mask": torch.ones_like(ids)} if "attention_mask" in names else {}
        return {"input_ids": ids, **mask}, None
    raise SourceError(
        f"{what}, and the shape of its input is not known",
        got=f"forward({', '.join(names)})",
        wanted="--input SHAPE or --data DATA",
        remedy="--input 3x224x224 for a model of images",
    )


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    if isinstance(batch, dict):
        return {name: _cast(value, dtype) for name, value in batch.items()}
    return batch.to(dtype) if batch.is_floating_point() else batch


def _arrays(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file; the name of an .npy file's only one is ""."""
    try:
        if path.suffix == ".safetensors":
            arrays = load_file(path)
        else:
            with path.open("rb") as file:
                found = np.load(file, allow_pickle=False)
                named = {"": found} if isinstance(found, np.ndarray) else dict(found)
            arrays = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in named.items()}
    except Exception as error:  # each of the three formats has errors of its own
        raise SourceError(
            f"--data {path} cannot be read",
            got=f"{type(error).__name__}: {error}",
            wanted="arrays of numbers, as numpy.savez or safetensors.torch.save_file write them",
        ) from error
    sizes = {name: tuple(array.shape) for name, array in arrays.items()}
    if not sizes or any(not shape for shape in sizes.values()) or len({shape[0] for shape in sizes.values()}) > 1:
        raise SourceError(
            f"the arrays of --data {path} do not hold the same number of samples",
            got=", ".join(f"{name} {shape}" for name, shape in sizes.items()) or "no array",
            wanted="one array, or several named as the arguments of forward, each with samples along its first axis",
        )
    return arrays


def _batches(arrays: dict[str, Tensor], batch: int) -> list[Any]:
    parts = {name: array.split(batch) for name, array in arrays.items()}
    if len(parts) == 1:
        return list(next(iter(parts.values())))
    return [dict(zip(parts, group, strict=True)) for group in zip(*parts.values(), strict=True)]


def _tokens(path: Path, source: sources.Source, samples: int, length: int, batch: int) -> tuple[list[Any], int]:
    texts, rest = _texts(path, samples) if source.kind == "folder" else ([], 0)
    return tokenized(path, source, texts, length, batch), rest


def tokenized(path: Path, source: sources.Source, texts: list[str], length: int, batch: int) -> list[dict[str, Tensor]]:
    """Return texts of a file as the model's tokenizer cuts them, in batches.

    Raises:
        SourceError: The model has none that knows their words.
    """
    if source.kind != "folder" or source.path is None:
        raise SourceError(
            f"the texts of {path} need a tokenizer",
            got=f"SOURCE {source.text}, which has none",
            wanted="a Hugging Face folder as SOURCE",
            remedy="write its inputs as arrays, .npz or .safetensors, or name a function that returns them",
        )
    tokenizer = huggingface.tokenizer(source.path)
    # A tokenizer that cannot pad takes one text at a time.
    size = batch if tokenizer.pad_token is not None else 1
    options = {"padding": size > 1, "truncation": True, "max_length": length, "return_tensors": "pt"}
    batches = [dict(tokenizer(texts[at : at + size], **options)) for at in range(0, len(texts), size)]
    _require_known_words(path, tokenizer, batches)
    return batches


def _require_known_words(path: Path, tokenizer: Any, batches: list[dict[str, Tensor]]) -> None:
    """Refuse texts of which a tokenizer knows hardly a word: statistics of its token for unknown words say nothing."""
    ids = torch.cat([batch["input_ids"].flatten() for batch in batches])
    unknown = tokenizer.unk_token_id
    special = torch.tensor(
        [number for number in tokenizer.all_special_ids if number != unknown], dtype=ids.dtype, device="cpu"
    )
    words = ids[~torch.isin(ids, special)]
    share = float((words == unknown).float().mean()) if len(words) and unknown is not None else 0.0
    if share > UNKNOWN:
        raise SourceError(
            f"the tokenizer of the model does not know the words of {path}",
            got=f"{tokenizer.unk_token} for {share:.0%} of the tokens",
            wanted=f"at most {UNKNOWN:.0%}",
            remedy="texts in the model's language, and the tokenizer that belongs to the model in its folder",
        )


def _texts(path: Path, samples: int) -> tuple[list[str], int]:
    texts: list[str] = []
    rest = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip() and len(texts) >= samples:
                    rest += 1
                elif line.strip():
                    texts.append(line.rstrip("\n") if path.suffix == ".txt" else _text(path, number, line))
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"--data {path} cannot be read", got=str(error), wanted="a text file in UTF-8") from error
    if not texts:
        raise SourceError(f"--data {path} holds no text", got="an empty file", wanted="one text a line")
    return texts, rest


def _text(path: Path, number: int, line: str) -> str:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        content = None
    text = content.get("text") if isinstance(content, dict) else content
    if not isinstance(text, str):
        raise SourceError(
            f"line {number} of --data {path} is no text",
            got=cut(line.strip(), 80),
            wanted='a JSON text, or an object with one under "text", on every line',
        )
    return text
