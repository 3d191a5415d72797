"""From loader to model call: one epoch's batches in fixed order, and the three forms an input may have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from twofour import calls
from twofour.calibration.batches import LABELS, accepted, to_device
from twofour.calls import evaluating
from twofour.errors import TrainingError
from twofour.training import randomness

Loader = Iterable[Any]
_END = object()


def length(loader: Loader) -> int | None:
    """Number of batches in an epoch, None when the loader does not know."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:  # no __len__, or an IterableDataset without one
        return None


def device_of(model: nn.Module) -> torch.device:
    """Return where a model's inputs go."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def call(model: nn.Module, inputs: Any) -> Any:
    """Return what a model answers to inputs of a batch, without their `labels` where its forward takes none."""
    return calls.call(model, accepted(model, inputs))


def answered(model: nn.Module, inputs: Any) -> Any:
    """Return what a model answers in evaluation mode, without gradients; its random numbers touch nothing."""
    with evaluating(model), torch.no_grad(), randomness.undisturbed():
        return call(model, to_device(inputs, device_of(model)))


def require_loader(loader: object) -> None:
    """Refuse what cannot be walked over.

    Raises:
        TrainingError: `loader` yields nothing.
    """
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise TrainingError(
            "there is no loader",
            got=type(loader).__name__,
            wanted="something that yields (input, target) pairs, anew each epoch",
            remedy="pass a DataLoader or a list of batches",
        )


def empty_loader() -> TrainingError:
    """The error for an epoch without a single batch."""
    return TrainingError(
        "the loader is empty",
        got="no batch",
        wanted="at least one (input, target) pair per epoch",
        remedy="look at the dataset's length, and at `drop_last` with a batch size beyond it",
    )


def epoch_batches(loader: Loader, seed: int, epoch: int, skip: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yield one epoch's (input, target) pairs, leaving out the first `skip`.

    The order follows from (seed, epoch) alone: the loader draws from a stream of its own, and generators it
    holds are seeded for the epoch. Skipped batches are still loaded, since augmentation may draw random
    numbers.

    Raises:
        TrainingError: A batch is not an (input, target) pair, or the epoch is shorter than `skip`.
    """
    randomness.seed_loader(loader, seed, epoch)
    stream = randomness.Stream(randomness.derive(seed, epoch, "data"))
    with stream:
        iterator = iter(loader)
    number = 0
    while True:
        with stream:
            batch = next(iterator, _END)
        if batch is _END:
            break
        number += 1
        if number > skip:
            yield pair(batch)
    if number < skip:
        raise TrainingError(
            "the loader ends before the point where the checkpoint was written",
            got=f"{number} batches in epoch {epoch + 1}",
            wanted=f"at least {skip}",
            remedy="pass the loader of the interrupted run, or start anew with another checkpoint folder",
        )


def pair(batch: Any) -> tuple[Any, Any]:
    """Return the batch as (input, target).

    A dict with `labels`, as transformers' collators yield it, is the input as it is, since such a model computes its
    own loss from them, and `labels` are the target of a loss that asks for one. `call` leaves them out for a model that
    takes none.

    Raises:
        TrainingError: It is neither a pair nor such a dict.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, Mapping) and batch.get(LABELS) is not None:
        return batch, batch[LABELS]
    size = f" of {len(batch)}" if isinstance(batch, tuple | list | Mapping) else ""
    remedy = "wrap the loader in a class whose __iter__ yields such pairs"
    if isinstance(batch, Mapping):
        size = f" with {', '.join(map(str, batch))}"
        named = [str(name) for name, value in batch.items() if value is not None]
        target = next((name for name in named if name.startswith(("label", "target"))), "<target>")
        remedy = f'yield ({{k: v for k, v in b.items() if k != "{target}"}}, b["{target}"]) for each batch b'
    raise TrainingError(
        "the loader's batches cannot be used",
        got=f"{type(batch).__name__}{size}",
        wanted="pairs (input, target); input: a tensor, a tuple of arguments or a dict of keyword arguments; or dicts "
        f"of keyword arguments with `{LABELS}`",
        remedy=remedy,
    )
