"""Embeddings: how those of tokens become one, and pairs of texts whose likeness is known as a judge of embedders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from twofour import calls
from twofour.calibration import Batch
from twofour.errors import OptimizeError


@dataclass(frozen=True)
class Pairs:
    """Judges an embedder as benchmarks of semantic likeness do: by Spearman's rank correlation of cosines and scores.

    A function for `twofour.optimize(evaluate=...)`; `twofour optimize --pairs FILE` makes it of a file.

    Attributes:
        first: Inputs of the model, a batch each: the first text of every pair.
        second: The second ones, as many in the same batches.
        scores: (pairs,) how alike the texts of a pair are, on any scale that rises.
        pooling: How token embeddings become one, "mean" or "cls".
    """

    first: Sequence[Any]
    second: Sequence[Any]
    scores: Tensor
    pooling: str = "mean"

    def __call__(self, model: nn.Module) -> float:
        """Return the correlation, from -1 to 1.

        Raises:
            OptimizeError: The model's answer has no `last_hidden_state`, or all its cosines are the same.
        """
        one, other = (torch.cat([self._embedded(model, batch) for batch in side]) for side in (self.first, self.second))
        return spearman(torch.cosine_similarity(one.double(), other.double()), self.scores)

    def _embedded(self, model: nn.Module, inputs: Any) -> Tensor:
        with calls.evaluating(model), calls.without_cache(model), torch.no_grad():
            output = calls.Example.of(inputs).run(model)
        hidden = getattr(output, "last_hidden_state", None)
        if not isinstance(hidden, Tensor) or hidden.ndim != 3:
            raise OptimizeError(
                "the model cannot be judged by pairs of texts",
                got=f"an answer without last_hidden_state: {type(output).__name__}",
                wanted="an encoder of transformers, which embeds tokens",
                remedy="--evaluate judges by a function of yours",
            )
        return embedding(hidden, Batch(inputs), self.pooling)


def embedding(hidden: Tensor, batch: Batch, pooling: str) -> Tensor:
    """Return (samples, width): the first token's embedding, or the mean over those that are no padding."""
    if pooling == "cls":
        return hidden[:, 0]
    tokens = batch.tokens
    weights = hidden.new_ones(hidden.shape[:2]) if tokens is None else tokens.to(hidden.dtype)
    return (hidden * weights[..., None]).sum(1) / weights.sum(1, keepdim=True).clamp_min(1.0)


def spearman(found: Tensor, want: Tensor) -> float:
    """Return Spearman's rank correlation: that of the ranks, equal values having the mean of theirs.

    Raises:
        OptimizeError: The values of one side are all the same, or not finite.
    """
    if not bool(found.isfinite().all()) or len(found.unique()) < 2 or len(want.unique()) < 2:
        raise OptimizeError(
            "there is no order to compare",
            got=f"cosines from {float(found.min()):.4g} to {float(found.max()):.4g}, "
            f"scores from {float(want.min()):.4g} to {float(want.max()):.4g}",
            wanted="finite values that differ, on both sides",
        )
    ranks = torch.stack([_ranks(found), _ranks(want)])
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(values: Tensor) -> Tensor:
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[place]
