"""Quality: how a model's answers agree with the dense model's on data held back, or what the user's function says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from twofour import calls
from twofour.calibration import Batch
from twofour.errors import OptimizeError, TwofourError, cut
from twofour.optimizing.pairs import Pairs, embedding
from twofour.report import Score

Evaluate = Callable[[nn.Module], Any]

AGREEMENT, COSINE, ERROR = "top-1 agreement", "cosine of embeddings", "relative error of the outputs"
SPEARMAN, OWN = "rank correlation", "evaluate"
TITLES = {
    AGREEMENT: "Answers that agree with the dense model's, top 1",
    COSINE: "Cosine of embeddings with the dense model's, times 100",
    ERROR: "100 minus the relative error of the outputs, in per cent",
    SPEARMAN: "Spearman's rank correlation of cosines with the scores of the pairs, times 100",
    OWN: "The given function",
}


AGREE = "Each model's outputs beside the dense model's, on samples that no other step has seen."
"""What figures of agreement rest on."""


def kind_of(evaluate: Evaluate) -> str:
    """Return the kind of a function that judges."""
    return SPEARMAN if isinstance(evaluate, Pairs) else OWN


def said_of(evaluate: Evaluate) -> str:
    """Return what a function's figures rest on."""
    if isinstance(evaluate, Pairs):
        return f"{len(evaluate.scores)} labelled pairs of texts, which no other step has seen."
    return "What the function answers for each model; the samples are its own."


@dataclass(frozen=True)
class Judge:
    """What judges models.

    Attributes:
        kind: One of `TITLES`.
        held: Batches that are judged on.
        pooling: How token embeddings become one, "mean" or "cls".
        want: The dense model's answers, a leaf or an embedding a batch.
        evaluate: The user's function, for the kinds `OWN` and `SPEARMAN`.
        scale: What its figures are multiplied with: 100 where the dense model's is a fraction.
    """

    kind: str
    held: tuple[Batch, ...] = ()
    pooling: str = "mean"
    want: tuple[Tensor, ...] = ()
    evaluate: Evaluate | None = None
    scale: float = 1.0

    @classmethod
    def by_agreement(cls, model: nn.Module, held: Sequence[Batch], pooling: str) -> Judge:
        """Return what compares a model's answers with those of `model`, in the way that its outputs suggest.

        Raises:
            OptimizeError: The model answers with no tensor of real numbers, or with NaN.
        """
        kind = _kind(_run(model, held[0]), held[0])
        judge = cls(kind, tuple(held), pooling)
        want = tuple(judge.answer(model, batch) for batch in held)
        if not all(bool(leaf.isfinite().all()) for leaf in want):
            raise OptimizeError(
                "the dense model's answers cannot be compared with",
                got="NaN or infinity in its outputs on the data held back",
                wanted="finite outputs",
                remedy="look at the data; --evaluate judges by a function of yours",
            )
        return cls(kind, tuple(held), pooling, want)

    @classmethod
    def by_function(cls, model: nn.Module, evaluate: Evaluate) -> tuple[Judge, Score]:
        """Return what asks the user's function, and its answer for the dense model.

        Raises:
            OptimizeError: It raises, or answers with no finite number.
        """
        first = _asked(evaluate, model)
        judge = cls(kind_of(evaluate), evaluate=evaluate, scale=100.0 if abs(first) <= 1 else 1.0)
        return judge, Score("dense", judge.scale * first)

    def score(self, name: str, model: nn.Module) -> Score:
        """Judge a model.

        Raises:
            OptimizeError: It does not run, or the function answers with no number.
        """
        if self.evaluate is not None:
            return Score(name, self.scale * _asked(self.evaluate, model), ours=True)
        values = torch.cat(
            [self.values(self.answer(model, batch), want) for batch, want in zip(self.held, self.want, strict=True)]
        )
        values = values.double().nan_to_num(nan=0.0)
        deviation = float(values.std()) if len(values) > 1 else 0.0
        return Score(name, float(values.mean()), deviation / math.sqrt(len(values)), ours=True)

    def answer(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return what is compared of a model's answer: samples or tokens along the first axis."""
        output = _run(model, batch)
        if self.kind == COSINE:
            return embedding(output.last_hidden_state, batch, self.pooling)
        leaf = _leaf(output)
        if self.kind == AGREEMENT and leaf.ndim == 3:  # a token a row; those that padding fills do not count
            leaf = leaf.flatten(0, 1)
            tokens = batch.tokens
            return leaf if tokens is None or tokens.numel() != len(leaf) else leaf[tokens.flatten()]
        return leaf if leaf.ndim else leaf[None]

    def values(self, found: Tensor, want: Tensor) -> Tensor:
        """Return a figure from 0 to 100 a sample."""
        if found.shape != want.shape:
            return torch.zeros(len(want), dtype=torch.float32, device="cpu")
        if self.kind == AGREEMENT:
            return 100.0 * (found.argmax(-1) == want.argmax(-1)).float()
        found, want = found.float().flatten(1), want.float().flatten(1)
        if self.kind == COSINE:
            return 100.0 * torch.cosine_similarity(found, want)
        return 100.0 * (1.0 - (found - want).norm(dim=1) / want.norm(dim=1).clamp_min(1e-12)).clamp_min(0.0)


def _kind(output: Any, batch: Batch) -> str:
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor) and logits.ndim in (2, 3) and logits.shape[-1] > 1:
        return AGREEMENT
    if isinstance(getattr(output, "last_hidden_state", None), Tensor) and output.last_hidden_state.ndim == 3:
        return COSINE
    leaf, target = _leaf(output), batch.target
    classes = isinstance(target, Tensor) and not target.is_floating_point() and target.ndim == 1
    return AGREEMENT if classes and leaf.ndim == 2 and leaf.shape[1] > 1 else ERROR


def _run(model: nn.Module, batch: Batch) -> Any:
    wanted, remedy = calls.PAIRS, "check that the data are what the model takes in one forward pass"
    explained = calls.explaining(OptimizeError, "the data held back", wanted=wanted, remedy=remedy)
    with calls.evaluating(model), calls.without_cache(model), torch.no_grad(), explained:
        return calls.Example.of(batch.inputs).run(model)


def _leaf(output: Any) -> Tensor:
    """Return the first tensor of real numbers of an output."""
    leaves = calls.output_leaves(output)
    logits = getattr(output, "logits", None)
    found = logits if isinstance(logits, Tensor) else next((one for one in leaves if _is_real(one)), None)
    if found is None:
        raise OptimizeError(
            "the model's answers cannot be compared",
            got=", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "nothing",
            wanted="a tensor of real numbers among its outputs",
            remedy="--evaluate judges by a function of yours",
        )
    return found


def _is_real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _asked(evaluate: Evaluate, model: nn.Module) -> float:
    try:
        with calls.evaluating(model), torch.no_grad():
            answer = evaluate(model)
        value = float(answer)
    except TwofourError:
        raise
    except Exception as error:
        raise OptimizeError(
            "the function that judges the model failed",
            got=cut(f"{type(error).__name__}: {error}", 300),
            wanted="evaluate(model) -> one number, the higher the better",
            remedy="try it on the dense model by itself",
        ) from error
    if not math.isfinite(value):
        raise OptimizeError(
            "the function that judges the model answers with no finite number", got=repr(answer), wanted="a number"
        )
    return value
