"""The task as one number: what a loss says over data, or what the user's function answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twofour import calibration
from twofour.calibration import Batch
from twofour.calibration.gradients import computed
from twofour.calibration.passes import explained
from twofour.errors import DataError

Score = Callable[[], float]
"""Tells how bad the model is at its task; more is worse."""


def task(
    model: nn.Module,
    batches: Sequence[Batch],
    loss: Callable[[Any, Any], Tensor] | None,
    evaluate: Callable[[nn.Module], float] | None,
) -> Score | None:
    """Return what tells how bad the model is: minus what `evaluate` answers, or the mean loss over the batches.

    None where there is neither.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

    def mean() -> float:
        assert loss is not None
        total, count = 0.0, 0
        for batch in batches:
            with explained():
                output = calibration.call(model, calibration.to_device(batch.inputs, device))
            size = len(batch.target) if isinstance(batch.target, Tensor) and batch.target.ndim else 1
            total, count = total + size * _finite(computed(loss, output, batch, device), "loss"), count + size
        return total / count

    if evaluate is not None:
        return lambda: -_finite(evaluate(model), "evaluate")
    return None if loss is None else mean


def _finite(answer: Any, what: str) -> float:
    try:
        number = float(answer)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if math.isfinite(number):
        return number
    raise DataError(
        f"what `{what}` answers cannot be compared",
        got=f"a tensor of shape {tuple(answer.shape)}"
        if isinstance(answer, Tensor) and answer.numel() != 1
        else repr(answer),
        wanted="one finite number",
        remedy="return a single figure, for instance the accuracy"
        if what == "evaluate"
        else "return a mean over the batch, and look for infinite values in the data",
    )
