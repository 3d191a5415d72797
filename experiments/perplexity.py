"""Perplexity of a causal language model, dense and pruned once, by the protocol of the SparseGPT and Wanda papers.

`python experiments/perplexity.py FOLDER` measures a Hugging Face folder. Published for Llama-2-7B at 2:4 on WikiText-2:
dense 5.12, Wanda 11.02, SparseGPT 10.17 (Sun et al. 2023, table 3). Not run here: the 7B weights are under a licence of
their own. `python experiments/perplexity.py stories` takes the same path with a published Llama of 231k parameters.

The protocol: calibration on 128 windows of C4; the test split's rows joined by empty lines and cut into windows that do
not overlap, each from an empty context. A window is the model's whole context, 4096 tokens for Llama-2 (the published
code's choice; with 2048 the dense model has 5.47). The embedding and the head stay dense.
"""

from __future__ import annotations

import gzip
import json as json_text
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import twofour
from records import SCRATCH
from twofour import criteria, masks, measure, pruning
from twofour.errors import DataError, SourceError, TwofourError

console = Console(stderr=True)
STORIES = "stories"
DATASETS = {
    "wikitext2": ("Salesforce/wikitext", {"name": "wikitext-2-raw-v1", "split": "test"}),
    # The one shard that the published figures were calibrated on.
    "c4": ("allenai/c4", {"data_files": {"train": "en/c4-train.00000-of-01024.json.gz"}, "split": "train"}),
}


@dataclass(frozen=True)
class Row:
    """One model: its criterion ("dense" for none), perplexity, weights pruned, mean error of their outputs, seconds."""

    criterion: str
    perplexity: float
    pruned: int
    error: float | None
    seconds: float


def documents(source: str) -> list[str]:
    """Return the texts of a source: a name in `DATASETS`, lines of JSON with "text", or one plain text; .gz as well.

    Raises:
        SourceError: There is no such file, its kind is not known, or `datasets` is not installed.
    """
    if source in DATASETS:
        return [str(text) for text in _downloaded(source)["text"]]
    path = Path(source)
    kinds = [suffix for suffix in path.suffixes if suffix != ".gz"]
    if not path.is_file():
        raise SourceError(f"there is no text {source}", got=source, wanted=f"a file, or {' or '.join(DATASETS)}")
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        if kinds[-1:] in ([".jsonl"], [".json"]):
            return [_text(source, number, line) for number, line in enumerate(lines, 1) if line.strip()]
        # As the published protocol joins WikiText's rows: an empty row is "", any other keeps the end of its line.
        return ["\n\n".join(line if line.strip() else "" for line in lines)]


def _text(source: str, number: int, line: str) -> str:
    try:
        return str(json_text.loads(line)["text"])
    except (ValueError, TypeError, KeyError) as error:
        raise SourceError(
            f"line {number} of {source} cannot be read", got=line[:80], wanted='{"text": "..."} on every line'
        ) from error


def _downloaded(name: str) -> Any:
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise SourceError(
            f"{name} is downloaded with the package datasets",
            got=str(error),
            wanted="pip install datasets, and a network",
            remedy="or pass a file: --text wiki.test.raw --calibration c4-train.00000-of-01024.json.gz",
        ) from error
    repository, options = DATASETS[name]
    return load_dataset(repository, **options)


def drawn(texts: Sequence[str], tokenizer: Any, samples: int, length: int, seed: int) -> list[Tensor]:
    """Draw windows at random places of random texts, those of the published code for the same texts and seed.

    Returns:
        `samples` int64 tensors (1, length).

    Raises:
        DataError: No text is longer than `length` tokens.
    """
    chance = random.Random(seed)
    windows: list[Tensor] = []
    known: dict[int, Tensor] = {}
    for _ in range(samples):
        while True:
            index = chance.randint(0, len(texts) - 1)
            if index not in known:
                known[index] = encoded(tokenizer, texts[index])
            if known[index].shape[1] > length:
                break
            if len(known) == len(texts) and all(tokens.shape[1] <= length for tokens in known.values()):
                raise DataError(
                    "no text of the calibration data is long enough",
                    got=f"{len(texts)} texts, {max(tokens.shape[1] for tokens in known.values())} tokens at most",
                    wanted=f"one of more than {length} tokens",
                    remedy="a smaller --length, or one long text in place of many short ones",
                )
        start = chance.randint(0, known[index].shape[1] - length - 1)
        windows.append(known[index][:, start : start + length])
    return windows


def encoded(tokenizer: Any, text: str) -> Tensor:
    """int64 (1, tokens), with whatever the tokenizer puts in front."""
    return tokenizer(text, return_tensors="pt").input_ids


def cut(tokens: Tensor, length: int) -> list[Tensor]:
    """Cut (1, tokens) into windows (1, length) that do not overlap; what is left over at the end is not used.

    Raises:
        DataError: There is not one window.
    """
    count = tokens.shape[1] // length
    if not count:
        raise DataError("the text is too short", got=f"{tokens.shape[1]} tokens", wanted=f"at least {length}")
    return list(tokens[:, : count * length].split(length, dim=1))


@torch.inference_mode()
def perplexity(model: nn.Module, windows: Sequence[Tensor]) -> float:
    """Return exp of the mean over windows of the mean cross entropy of each next token; one window at a time."""
    device = next(model.parameters()).device
    total = 0.0
    for tokens in windows:
        logits = model(input_ids=tokens.to(device), use_cache=False).logits[0, :-1]
        total += float(F.cross_entropy(logits.float(), tokens[0, 1:].to(device)))
    return math.exp(total / len(windows))


def loaded(folder: Path, dtype: str, device: str) -> nn.Module:
    """The causal model of a Hugging Face folder, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, dtype=dtype if dtype == "auto" else getattr(torch, dtype)
    )
    return nn.Module.to(model.eval(), device)


def context(folder: Path) -> int:
    """Tokens that the model of a folder was made for, 4096 at most."""
    from transformers import AutoConfig

    return min(4096, AutoConfig.from_pretrained(folder, local_files_only=True).max_position_embeddings)


def head_of(model: Any) -> list[str]:
    """Name of the layer that answers with logits: it stays dense, as in the papers."""
    head = model.get_output_embeddings()
    return [name for name, module in model.named_modules() if module is head]


def measured(model: nn.Module, criterion: str, data: Sequence[Tensor], windows: Sequence[Tensor], **rule: Any) -> Row:
    """Prune the model by the criterion ("dense": not at all) and take its perplexity."""
    begin = time.perf_counter()
    if criterion == "dense":
        return Row(criterion, perplexity(model, windows), 0, None, time.perf_counter() - begin)
    given: dict[str, Any] = {}
    if criteria.parse(criterion).need is not None:
        given = {"data": [{"input_ids": tokens, "use_cache": False} for tokens in data], "samples": len(data)}
    twofour.prune(model, rule["pattern"], criterion=criterion, eligibility=rule["eligibility"], skip=head_of(model),
                  **given)  # fmt: skip
    errors = [outcome.error for outcome in pruning.outcomes(model) if outcome.error is not None]
    mean = sum(errors) / len(errors) if errors else None
    return Row(criterion, perplexity(model, windows), len(masks.of(model)), mean, time.perf_counter() - begin)


def rows(
    folder: Path, names: Sequence[str], text: Sequence[str], calibration: Sequence[str], **rule: Any
) -> Iterator[Row]:
    """Measure the dense model and one freshly loaded model for each criterion."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    windows = cut(encoded(tokenizer, "\n\n".join(text)), rule["length"])
    data = drawn(calibration, tokenizer, rule["samples"], rule["length"], rule["seed"])
    for name in ("dense", *names):
        # No name here for the model, so that the one before is gone when the next is loaded.
        yield measured(loaded(folder, rule["dtype"], rule["device"]), name, data, windows, **rule)


def main(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"A Hugging Face folder, or {STORIES!r}.")],
    criterion: Annotated[list[str] | None, typer.Option(help="Several times; default wanda, sparsegpt.")] = None,
    pattern: Annotated[str, typer.Option(help="2:4 or another N:M.")] = "2:4",
    samples: Annotated[int, typer.Option(help="Windows of calibration text.")] = 128,
    length: Annotated[
        int | None, typer.Option(help="Tokens of a window, in calibration and test; default the model's context.")
    ] = None,
    text: Annotated[str, typer.Option(help="What perplexity is measured on: a file, or wikitext2.")] = "wikitext2",
    calibration: Annotated[str, typer.Option(help="A file (.txt, .jsonl, .json.gz), or c4.")] = "c4",
    seed: Annotated[int, typer.Option(help="Of the calibration windows.")] = 0,
    eligibility: Annotated[str, typer.Option(help='As in twofour.prune; "any" where widths are odd.')] = "asp",
    dtype: Annotated[str, typer.Option(help='"auto": as stored; or float32, bfloat16, float16.')] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda ...; the whole model must fit there twice.")] = "cpu",
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the rows here.")] = None,
) -> None:
    """Print the perplexity of MODEL, dense and pruned by each criterion."""
    folder = _stories() if model == STORIES else Path(model)
    length, names = context(folder) if length is None else length, criterion or ["wanda", "sparsegpt"]
    rule = {"pattern": pattern, "samples": samples, "length": length, "seed": seed, "eligibility": eligibility}
    print("| criterion | perplexity | weights pruned | mean error | seconds |\n| --- | ---: | ---: | ---: | ---: |")
    found: list[Row] = []
    for row in rows(folder, names, documents(text), documents(calibration), dtype=dtype, device=device, **rule):
        error = "" if row.error is None else f"{row.error:.3f}"
        print(f"| {row.criterion} | {row.perplexity:.2f} | {row.pruned} | {error} | {row.seconds:.0f} |", flush=True)
        found.append(row)
    if json is not None:
        content = {"model": model, "text": text, "calibration": calibration, **rule, "machine": measure.machine()}
        measure.write_json(json, {**content, "rows": [asdict(row) for row in found]})


def _stories() -> Path:
    """The 231k-parameter Llama of the data folder as a Hugging Face folder."""
    from tasks.stories import save

    folder = SCRATCH / "stories-llama"
    if not (folder / "config.json").exists():
        save(folder)
    return folder


if __name__ == "__main__":
    try:
        typer.run(main)
    except TwofourError as error:
        console.print(f"[red]error:[/red] {error}")
        sys.exit(1)
