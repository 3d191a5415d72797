"""Calibration data held back: the dense model's answers on them judge what was made of the model by the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from twofour.calibration.batches import Batch, part, to_device
from twofour.calibration.passes import calibrating, explained
from twofour.calls import call, output_leaves
from twofour.measure.distance import distance

EVERY = 5
"""One batch in so many is held back; of fewer batches one sample in so many of each; fewer samples serve both."""

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
    held = judged(model, judging)
    return used + judging[len(held.batches) :], held


def judged(model: nn.Module, batches: Sequence[Batch]) -> Held:
    """Run the dense model on batches that judge, the first ones where they are many.

    Args:
        model: The dense model; it runs in evaluation mode.
        batches: At least one.

    Raises:
        DataError: The model does not run on the data.
    """
    answers: list[list[Any]] = []
    size = samples = 0
    for batch in batches:
        if answers and (size > MOST_BYTES or samples >= MOST_SAMPLES):
            break
        answers.append(_answer(model, batch))
        size += sum(leaf.nbytes for leaf in answers[-1] if isinstance(leaf, Tensor))
        samples += batch.samples
    return Held(tuple(batches[: len(answers)]), tuple(answers))


def _parted(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    if len(batches) >= EVERY:
        judging = list(batches[EVERY - 1 :: EVERY])
        return [batch for number, batch in enumerate(batches, 1) if number % EVERY], judging
    used, judging = [], []
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
