"""Subject: one model with the inputs it is timed on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Subject:
    """A model in evaluation mode, float32, and positional inputs for one call.

    Attributes:
        name: Name of the model.
        note: Where its weights come from: real, or random and why that serves.
        model: Answers with a tensor, or a tuple whose first entry is compared.
        inputs: Positional arguments of one call.
        batch: Sequences or images of one call.
        tokens: Tokens or images of one call in all: their number over the time is the throughput.
        skip: Globs of layers that stay dense.
    """

    name: str
    note: str
    model: nn.Module
    inputs: tuple[Tensor, ...]
    batch: int
    tokens: int
    skip: tuple[str, ...] = ()
