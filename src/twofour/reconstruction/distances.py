"""How far answers are apart, as a tensor that has a gradient; tokens that an attention mask hides are left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from twofour import calls


def answers_apart(found: Any, wanted: Any, tokens: Tensor | None = None) -> Tensor:
    """Return how far answers are apart: of `logits` the divergence of their softmax, else the distance of each leaf."""
    scores = getattr(found, "logits", None)
    if isinstance(scores, Tensor) and scores.ndim >= 2 and scores.shape[-1] > 1:
        ours, dense = (counted(answer.float(), tokens).log_softmax(-1) for answer in (scores, wanted.logits))
        return F.kl_div(ours.flatten(0, -2), dense.flatten(0, -2), reduction="batchmean", log_target=True)
    return leaves_apart(calls.output_leaves(found), calls.output_leaves(wanted), tokens)


def leaves_apart(found: Sequence[Any], wanted: Sequence[Any], tokens: Tensor | None) -> Tensor:
    """Return the mean over the leaves that can be compared of their relative squared distance."""
    pairs = zip(found, wanted, strict=True)
    terms = [relative(one, other, tokens) for one, other in pairs if compared(one) and compared(other)]
    return torch.stack(terms).mean()


def compared(leaf: Any) -> bool:
    """Tell whether a leaf of an answer has real numbers along an axis: no loss, no count."""
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.is_floating_point()


def relative(found: Any, wanted: Any, tokens: Tensor | None = None) -> Tensor:
    """Return the squared distance of two tensors of one shape, relative to the square of the second.

    Args:
        found: Real numbers; (batch, tokens, ...) where `tokens` says which count.
        wanted: The same.
        tokens: bool (batch, tokens), True for those that count; None for all.
    """
    found, wanted = counted(found.float(), tokens), counted(wanted.float(), tokens)
    return (found - wanted).square().sum() / wanted.square().sum().clamp_min(1e-12)


def counted(answer: Tensor, tokens: Tensor | None) -> Tensor:
    """Return the vectors that count, (those, ...), where the answer has one for each entry of the mask; else all of it.

    Args:
        answer: (batch, tokens, ...), or of other axes, which then all count.
        tokens: bool (batch, tokens), or more axes, True for what counts; None for all.
    """
    if tokens is None or answer.ndim <= tokens.ndim or answer.shape[: tokens.ndim] != tokens.shape:
        return answer
    return answer[tokens.to(answer.device)]
