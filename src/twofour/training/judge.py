"""Which state of a training stands at its end: what judges them, and the data it is judged on.

A training that repeats may leave a model worse than it was at the start, and its last state need not be its best. The
states before the first step and after each epoch are judged; the best is kept.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from twofour import calls
from twofour.calibration import Batch
from twofour.errors import TrainingError
from twofour.training import listed, randomness
from twofour.training.batches import Loader, call, empty_loader, epoch_batches, length, require_loader, to_device
from twofour.training.result import Evaluation

Loss = Callable[[Any, Any], Tensor]
Keep = Literal["loss", "highest", "lowest"]
"""What is best: the least loss on the data that judge, or the highest or lowest answer of `evaluate`."""

SHARE = 20
"""One batch of the training in so many judges."""
LEAST, MOST = 128, 1024
"""Samples that judge at least, where the training has so many, and at most, but for the rest of a batch."""


@dataclass(frozen=True)
class Held:
    """Pairs (input, target) that judge, the same each time; `apart` tells whether nothing is trained on them.

    `places` are those of their batches in a list, none where the first ones of a loader judge.
    """

    batches: tuple[tuple[Any, Any], ...]
    samples: int
    apart: bool
    places: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in the batches."""
        return sum(part.nbytes for _, part in _parts(self.batches) if isinstance(part, Tensor))

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What tells these data from others: how many samples, and a hash over the first batch."""
        return {"samples": self.samples, "first batch": digest(self.batches[0])}


@dataclass(frozen=True)
class Judge:
    """Tells how good a state of a model is: by the training loss on held data for "loss", else by `evaluate`."""

    keep: Keep
    loss: Loss | None = None
    held: Held | None = None

    def score(self, model: nn.Module, evaluation: Evaluation | None) -> float:
        """Return a number that is smaller for a better state; infinity where it is none.

        Args:
            model: It runs in evaluation mode, for "loss".
            evaluation: What `evaluate` answered; of several numbers the first counts.
        """
        if self.keep == "loss":
            assert self.loss is not None and self.held is not None
            return self.score_of(held_loss(model, self.loss, self.held), evaluation)
        return self.score_of(None, evaluation)

    def score_of(self, held: float | None, evaluation: Evaluation | None) -> float:
        """Return the number of a state whose loss on held data, for "loss", or evaluation is known."""
        if self.keep == "loss":
            found = math.nan if held is None else held
        else:
            first = next(iter(evaluation.values()), None) if isinstance(evaluation, Mapping) else evaluation
            found = math.nan if first is None else -first if self.keep == "highest" else first
        return found if math.isfinite(found) else math.inf


def held_loss(model: nn.Module, loss: Loss, held: Held) -> float:
    """Return the mean of the loss over batches that judge, by their samples; in evaluation mode, without gradients."""
    sizes = [max(1, Batch(inputs).samples) for inputs, _ in held.batches]
    return sum(map(operator.mul, sizes, held_losses(model, loss, held))) / sum(sizes)


def held_losses(model: nn.Module, loss: Loss, held: Held) -> list[float]:
    """Return the loss of each batch that judges."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    losses = list[float]()
    with calls.evaluating(model), torch.no_grad(), randomness.undisturbed():
        for inputs, target in held.batches:
            found = loss(call(model, to_device(inputs, device)), to_device(target, device))
            require_number(found)
            losses.append(float(found))
    return losses


def require_finite(model: nn.Module, loss: Loss, held: Held) -> None:
    """Refuse data on which a model has no finite loss before the first step: they could tell no state from another.

    Raises:
        TrainingError: It has none, or the loss is no tensor with one element.
    """
    for number, batch in enumerate(held.batches, 1):
        found = held_loss(model, loss, Held((batch,), 1, held.apart))
        if not math.isfinite(found):
            raise TrainingError(
                "the data that judge cannot tell which state is best: their loss is not finite before the first step",
                got=f"{found} in batch {number} of {'`held`' if held.apart else 'the loader'}",
                wanted="a finite number",
                remedy="look for bad values in this batch, or in the model",
            )


def require_number(loss: object) -> None:
    """Refuse what a loss function returned unless it is a tensor with one element.

    Raises:
        TrainingError: It is not.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise TrainingError(
            "`loss(output, target)` must return one number to minimise",
            got=str(got),
            wanted="a tensor with one element",
            remedy="reduce it, for example with .mean()",
        )


def digest(value: Any) -> str:
    """Return a hash over the tensors, numbers and strings in containers, and their names."""
    found = hashlib.sha256()
    for name, part in _parts(value):
        found.update(name.encode())
        if isinstance(part, Tensor) and part.layout == torch.strided:
            found.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(part, str | int | float):
            found.update(repr(part).encode())
    return found.hexdigest()[:32]


def _parts(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what stands in nested containers, each with its name."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _parts(part, str(key))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _parts(part, name)
    else:
        yield name, value


def given(held: Loader, seed: int) -> Held:
    """Return the batches of a loader that a caller holds back; random numbers that it draws follow from the seed.

    Raises:
        TrainingError: It yields none, or no pairs.
    """
    require_loader(held)
    with randomness.undisturbed(held):
        found = tuple(epoch_batches(held, randomness.derive(seed, 0, "held"), 0))
    if not found:
        raise TrainingError(
            "there is nothing in `held`",
            got="no batch",
            wanted="at least one (input, target) pair, such as a validation loader yields",
            remedy="leave it out: batches of the training judge then",
        )
    return Held(found, sum(Batch(inputs).samples for inputs, _ in found), apart=True)


def trained_on(loader: Loader, seed: int) -> Held:
    """Return batches of the training itself: the first of its first epoch, about a twentieth of them.

    Of a list of batches, which may be sorted, they are parts of batches that are spread over it.

    The dense model that a state was pruned from has been trained on such data, and each later state is trained on them
    too, so that they favour none. Data kept from the training alone would favour the start, which has seen them.

    Raises:
        TrainingError: The loader is empty, or yields no pairs.
    """
    found, samples, steps = list[tuple[Any, Any]](), 0, length(loader) or math.inf
    with randomness.undisturbed(loader):
        if listed.is_list(loader) and 1 < steps < math.inf:
            parts = listed.judging(loader, seed, SHARE, LEAST, MOST)
            found = [(batch.inputs, batch.target) for batch in parts.values()]
            return Held(tuple(found), sum(batch.samples for batch in parts.values()), False, tuple(parts))
        for batch in epoch_batches(loader, seed, 0):
            found.append(batch)
            samples += Batch(batch[0]).samples
            if samples >= (LEAST if SHARE * len(found) >= steps else MOST):
                break
    if not found:
        raise empty_loader()
    return Held(tuple(found), samples, apart=False)


def of_training(batches: tuple[tuple[Any, Any], ...]) -> Held:
    """Return some batches of a training as what judges."""
    return Held(batches, sum(Batch(inputs).samples for inputs, _ in batches), apart=False)


def first_batch(loader: Loader, seed: int) -> tuple[Any, Any]:
    """Return the first pair of the first epoch, as it will come again.

    Raises:
        TrainingError: The loader is empty, or yields no pairs.
    """
    with randomness.undisturbed(loader):
        for first in epoch_batches(loader, seed, 0):
            return first
    raise empty_loader()
