"""Calibration data held back: the dense model's answers on them judge what was made of the model by the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from twofour.calibration.batches import Batch, part, spread, to_device
from twofour.calibration.passes import calibrating, explained
from twofour.calls import call, output_leaves
from twofour.measure.distance import distance

EVERY = 5
"""One batch in so many is held back; of fewer batches one sample in so many of each; fewer samples serve both."""

SPREAD = 16
"""Of so many batches, spread over those that are held back, a part judges, where they are more than enough."""
MOST_SAMPLES = 64
MOST_BYTES = 1 << 28
"""Samples, and bytes of answers, beyond which no further batch judges."""


@dataclass(frozen=True, eq=False)
class Held:
    """Batches and what the dense model answered.

    Attributes:
        batches: What was held back.
        answers: The leaves of the dense model's output for each.
    """

    batches: tuple[Batch, ...]
    answers: tuple[list[Any], ...]

    @property
    def samples(self) -> int:
        """How many samples judge."""
        return sum(batch.samples for batch in self.batches)

    def lost(self, model: nn.Module) -> float:
        """Return the mean over the batches of how far the model's output is from the dense one's, relative to its size.

        Raises:
            DataError: The model does not run on the data.
        """
        found = zip(self.batches, self.answers, strict=True)
        return sum(distance(_answer(model, batch), wanted) for batch, wanted in found) / len(self.batches)


def hold_back(model: nn.Module, batches: Sequence[Batch]) -> tuple[list[Batch], Held]:
    """Part the data into those that are used and those that judge, and run the dense model on the latter.

    Args:
        model: The dense model; it runs in evaluation mode.
        batches: What `take` returned.

    Raises:
        DataError: The model does not run on the data.
    """
    used, judging = _parted(batches)
    answers = _answers(model, judging)
    rest = [batch for place, batch in enumerate(judging) if place not in answers]
    return used + rest, _held(judging, answers)


def judged(model: nn.Module, batches: Sequence[Batch]) -> Held:
    """Run the dense model on batches that judge, some that are spread over them where they are many.

    Args:
        model: The dense model; it runs in evaluation mode.
        batches: At least one.

    Raises:
        DataError: The model does not run on the data.
    """
    return _held(batches, _answers(model, batches))


def _held(batches: Sequence[Batch], answers: Mapping[int, list[Any]]) -> Held:
    places = sorted(answers)
    return Held(tuple(batches[place] for place in places), tuple(answers[place] for place in places))


def _answers(model: nn.Module, batches: Sequence[Batch]) -> dict[int, list[Any]]:
    """Return the dense model's answers by the places of those batches that judge."""
    answers: dict[int, list[Any]] = {}
    size = samples = 0
    for place in spread(len(batches)):
        if answers and (size > MOST_BYTES or samples >= MOST_SAMPLES):
            break
        answers[place] = _answer(model, batches[place])
        size += sum(leaf.nbytes for leaf in answers[place] if isinstance(leaf, Tensor))
        samples += batches[place].samples
    return answers


def _parted(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    if len(batches) < EVERY:
        return _parted_each(batches)
    fifth = range(EVERY - 1, len(batches), EVERY)
    enough = math.ceil(MOST_SAMPLES * len(batches) / max(sum(batch.samples for batch in batches), 1))
    count = min(len(fifth), max(enough, SPREAD))
    chosen = [fifth[(2 * number + 1) * len(fifth) // (2 * count)] for number in range(count)]
    share = math.ceil(MOST_SAMPLES / count)
    used = [batch for number, batch in enumerate(batches) if number not in chosen]
    judging = list[Batch]()
    for batch in (batches[number] for number in chosen):
        if (cut := batch.samples - share) > 0 and not batch.whole:
            used.append(part(batch, 0, cut))
            batch = part(batch, cut, batch.samples)
        judging.append(batch)
    return used, judging


def _parted_each(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    used, judging = list[Batch](), list[Batch]()
    for batch in batches:
        size = batch.samples
        cut = size - size // EVERY
        used.append(part(batch, 0, cut))
        judging.append(part(batch, cut, size) if cut < size else batch)
    return used, judging


@torch.no_grad()
def _answer(model: nn.Module, batch: Batch) -> list[Any]:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with calibrating(model), explained():
        output = call(model, to_device(batch.inputs, device))
    return [leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf for leaf in output_leaves(output)]
