"""How many samples calibration wants: rows in proportion to what a weight is multiplied with, not a number of samples.

A sum of squares over inputs, X^T X, has no more directions than X has rows: of 128 short sentences a weight of 1536
inputs sees fewer rows than it has inputs, and an update by that Hessian fits the sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from twofour.calibration.batches import Batch, part, to_device
from twofour.calibration.collector import Collector
from twofour.calibration.inputs import unsupported
from twofour.calibration.passes import calibrating, explained
from twofour.calls import call
from twofour.layers import PrunableWeight

PER_INPUT = 8
"""Rows wanted for each input of a weight: docs/criteria.md has what more and fewer of them brought."""

MOST_ROWS = 1 << 17
"""Rows of the layer that sees most beyond which no more samples are asked for."""

LOOK = 8
"""Samples that are run to see how many rows each weight gets of one."""


@torch.no_grad()
def enough(model: nn.Module, weights: Sequence[PrunableWeight], least: int, first: Batch) -> int:
    """Return how many samples give every weight that they reach `PER_INPUT` rows for each of its inputs.

    Args:
        model: It is run once, on the first samples.
        weights: What is to be pruned.
        least: No fewer samples are asked for.
        first: The first batch of the data.

    Raises:
        DataError: The model does not run on the batch.
    """
    seen = [weight for weight in weights if not unsupported(weight)]
    if not seen:
        return least
    few = part(first, 0, LOOK)
    collector = Collector(model, seen, "norms", share=False)
    collector.tokens = few.tokens
    with calibrating(model), collector.hooked(), explained():
        call(model, to_device(few.inputs, seen[0].parameter.device))
    statistics = [(weight, collector.release(weight)) for weight in seen]
    reached = [
        (found.squares.shape[-1], found.rows / few.samples) for _, found in statistics if found.squares is not None
    ]
    if not reached:
        return least
    wanted = max(math.ceil(PER_INPUT * inputs / rows) for inputs, rows in reached)
    return max(least, min(wanted, int(MOST_ROWS / max(rows for _, rows in reached))))
