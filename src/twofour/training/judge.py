"""Which state of a training stands at its end: what judges them, and the data that are held back for it.

A training that repeats may leave a model worse than it was at the start, and its last state need not be its best. The
states before the first step and after each epoch are judged; the best is kept.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from twofour import calls
from twofour.calibration import Batch
from twofour.errors import TrainingError
from twofour.training import randomness
from twofour.training.batches import Loader, call, empty_loader, epoch_batches, pair, require_loader, to_device
from twofour.training.result import Evaluation

Loss = Callable[[Any, Any], Tensor]
Keep = Literal["loss", "highest", "lowest"]
"""What is best: the least loss on data held back, or the highest or lowest answer of `evaluate`."""

SHARE = 20
"""One sample, or batch, in so many is held back."""
LEAST, MOST = 128, 1024
"""Samples that are held back at least, where they are no more than a tenth, and at most."""
TENTH = 10
"""One in so many at most is held back where samples are few."""
_IN_ORDER = (list.__iter__, tuple.__iter__, Sequence.__iter__)
"""Ways of walking over a sequence that yield what its places hold."""


@dataclass(frozen=True)
class Held:
    """Batches that judge.

    Attributes:
        batches: Pairs (input, target), the same each time.
        samples: How many examples they hold.
        apart: Whether nothing is trained on them.
    """

    batches: tuple[tuple[Any, Any], ...]
    samples: int
    apart: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in the batches."""
        return sum(part.nbytes for _, part in _parts(self.batches) if isinstance(part, Tensor))

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What tells these data from others: how many samples, and a hash over the first batch."""
        return {"samples": self.samples, "first batch": digest(self.batches[0])}


class Places(Sequence[Any]):
    """Some places of a sequence, each read when it is asked for.

    Args:
        loader: The sequence.
        places: Which, in this order.
    """

    def __init__(self, loader: Sequence[Any], places: Sequence[int]) -> None:
        self.loader, self._places = loader, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return Places(self.loader, self._places[number])
        return self.loader[self._places[number]]


@dataclass(frozen=True)
class Judge:
    """Tells how good a state of a model is.

    Attributes:
        keep: What is best.
        loss: The training loss, for "loss".
        held: The data for "loss".
    """

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
            found = held_loss(model, self.loss, self.held)
        else:
            first = next(iter(evaluation.values()), None) if isinstance(evaluation, Mapping) else evaluation
            found = math.nan if first is None else -first if self.keep == "highest" else first
        return found if math.isfinite(found) else math.inf


def held_loss(model: nn.Module, loss: Loss, held: Held) -> float:
    """Return the mean of the loss over batches held back, by their samples; in evaluation mode, without gradients."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    total = weight = 0.0
    with calls.evaluating(model), torch.no_grad(), randomness.undisturbed():
        for inputs, target in held.batches:
            found = loss(call(model, to_device(inputs, device)), to_device(target, device))
            require_number(found)
            size = max(1, Batch(inputs).samples)
            total, weight = total + size * float(found), weight + size
    return total / weight


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
        found = _held(list(epoch_batches(held, randomness.derive(seed, 0, "held"), 0)), apart=True)
    if not found.batches:
        raise TrainingError(
            "there is nothing in `held`",
            got="no batch",
            wanted="at least one (input, target) pair, such as a validation loader yields",
            remedy="leave it out: a part of the loader is held back then",
        )
    return found


def hold_back(loader: Loader, seed: int) -> tuple[Loader, Held]:
    """Part a loader into one to train with, and batches that judge.

    Of a DataLoader over a dataset that is read in order or shuffled, samples are held back; of a list, batches, and of
    another sequence, which is read as it is asked for. Another loader, or one with a sampler of its own, does not say
    which samples it yields: the first batches of its first epoch judge, and are trained on too.

    Args:
        loader: Yields (input, target) pairs, anew each epoch.
        seed: Which samples are held back follows from it alone.

    Raises:
        TrainingError: The loader is empty, or yields no pairs.
    """
    if isinstance(loader, Sequence) and len(loader) >= TENTH and type(loader).__iter__ in _IN_ORDER:
        return _places(loader, seed)
    if (parts := _parted(loader, seed)) is not None:
        used, judging = parts
        with randomness.undisturbed(loader):
            randomness.seed_everything(randomness.derive(seed, 0, "held back"))
            return used, _held([pair(batch) for batch in judging], apart=True)
    with randomness.undisturbed(loader):
        first = list[tuple[Any, Any]]()
        for batch in epoch_batches(loader, seed, 0):
            first.append(batch)
            if sum(Batch(inputs).samples for inputs, _ in first) >= LEAST:
                break
    if not first:
        raise empty_loader()
    return loader, _held(first, apart=False)


def _held(batches: list[tuple[Any, Any]], *, apart: bool) -> Held:
    return Held(tuple(batches), sum(Batch(inputs).samples for inputs, _ in batches), apart)


def _places(loader: Sequence[Any], seed: int) -> tuple[Loader, Held]:
    """Part a sequence: a twentieth of its batches is held back, up to a tenth for `LEAST` samples, until `MOST`."""
    candidates = range(TENTH - 1, len(loader), TENTH)
    order = torch.randperm(len(candidates), generator=_choosing(seed), device="cpu").tolist()
    taken, samples, stream = dict[int, Any](), 0, randomness.Stream(randomness.derive(seed, 0, "held"))
    with randomness.undisturbed(loader):
        for place in (candidates[number] for number in order):
            if samples >= (LEAST if len(taken) * SHARE >= len(loader) else MOST):
                break
            with stream:
                taken[place] = pair(loader[place])
            samples += Batch(taken[place][0]).samples
    left = [place for place in range(len(loader)) if place not in taken]
    used = [loader[place] for place in left] if type(loader) in (list, tuple) else Places(loader, left)
    return used, _held([taken[place] for place in sorted(taken)], apart=True)


def _choosing(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(randomness.derive(seed, 0, "held back"))


def _parted(loader: Loader, seed: int) -> tuple[DataLoader[Any], DataLoader[Any]] | None:
    """Return loaders of two parts of a dataset, as the given one but for that; None where it is not that simple."""
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return None
    sampler, batched = loader.sampler, loader.batch_sampler
    if type(batched) is not BatchSampler or loader.batch_size is None or batched.sampler is not sampler:
        return None
    plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None
    )
    if not plain or sampler.data_source is not loader.dataset:  # samples that a sampler leaves out are not trained on
        return None
    size = len(loader.dataset)  # pyright: ignore[reportArgumentType]
    count = min(MOST, max(size // SHARE, min(LEAST, size // TENTH)))
    if not loader.drop_last and (size - count) % loader.batch_size == 1 and size % loader.batch_size != 1:
        count += 1  # a last batch of one, which there was not: batch norm cannot be trained on it
    if count == 0 or size - count < loader.batch_size:
        return None
    order = torch.randperm(size, generator=_choosing(seed), device="cpu")
    same: dict[str, Any] = {
        name: getattr(loader, name)
        for name in ("batch_size", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "in_order")
        if hasattr(loader, name)
    }
    same |= {"multiprocessing_context": loader.multiprocessing_context, "prefetch_factor": loader.prefetch_factor}
    used, judging = (Subset(loader.dataset, part.sort().values.tolist()) for part in (order[count:], order[:count]))
    way = RandomSampler(used, generator=sampler.generator) if type(sampler) is RandomSampler else None
    training = DataLoader(used, sampler=way, drop_last=loader.drop_last, generator=loader.generator, **same)
    return training, DataLoader(judging, **same)


def first_batch(loader: Loader, seed: int) -> tuple[Any, Any]:
    """Return the first pair of the first epoch, as it will come again.

    Raises:
        TrainingError: The loader is empty, or yields no pairs.
    """
    with randomness.undisturbed(loader):
        for first in epoch_batches(loader, seed, 0):
            return first
    raise empty_loader()
