"""How many samples calibration wants: rows in proportion to what a weight is multiplied with, not a number of samples.

A sum of squares over inputs, X^T X, has no more directions than X has rows: of 128 short sentences a weight of 1536
inputs sees fewer rows than it has inputs, and an update by that Hessian fits the sample.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import nn

from twofour.calibration.batches import Batch, part, to_device
from twofour.calibration.collector import Collector
from twofour.calibration.inputs import unsupported
from twofour.calibration.passes import calibrating, explained
from twofour.calibration.statistics import PER_INPUT
from twofour.calls import call
from twofour.layers import PrunableWeight

_log = logging.getLogger("twofour.calibration")

SHARE = 0.95
"""Of the values to prune, how many are in weights that get so many rows; the others are of layers that see few, as a
pooler or a head that sees one row of a sentence, for whose sake all others would be given many times what they want."""

MOST_ROWS = 1 << 17
"""Rows of the layer that sees most beyond which no more samples are asked for."""

LOOK = 8
"""Samples that are run to see how many rows each weight gets of one."""


@torch.no_grad()
def enough(model: nn.Module, weights: Sequence[PrunableWeight], least: int, first: Batch) -> int:
    """Return how many samples give `PER_INPUT` rows for each input to weights with `SHARE` of the values they reach.

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
    all_found = [(weight, collector.release(weight)) for weight in seen]
    _say_unseen([weight.name for weight, found in all_found if not found.rows], few.samples)
    reached = [
        (
            math.ceil(PER_INPUT * found.squares.shape[-1] * few.samples / found.rows),
            weight.parameter.numel(),
            found.rows,
        )
        for weight, found in all_found
        if found.squares is not None and found.rows
    ]
    wanted, left = least, SHARE * sum(values for _, values, _ in reached)
    for samples, values, _ in sorted(reached):
        if left <= 0:
            break
        wanted, left = samples, left - values
    most = max((rows for *_, rows in reached), default=1)
    return max(least, min(wanted, MOST_ROWS * few.samples // most))


def _say_unseen(names: Sequence[str], samples: int) -> None:
    """Say which weights do not count: data may reach them later, as tokens do the experts of a mixture."""
    if names:
        several = f" and {len(names) - 1} more" if names[1:] else ""
        _log.warning(
            "the first %d samples bring no row to `%s`%s: how many samples are taken does not depend on what they "
            "want; `samples` takes another number",
            *(samples, names[0], several),
        )
