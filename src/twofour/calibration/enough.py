"""How many samples calibration wants: rows in proportion to what a weight is multiplied with, not a number of samples.

A sum of squares over inputs, X^T X, has no more directions than X has rows: of 128 short sentences a weight of 1536
inputs sees fewer rows than it has inputs, and an update by that Hessian fits the sample.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from twofour.calibration.batches import Batch, some, to_device
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

CHEAP_SAMPLES, CHEAP_WORK, CHEAP_ROWS = 1024, 1e12, 1 << 20
"""Where asked for, so many samples are taken even if fewer show enough rows, as long as they are together no more
multiply-adds of a pass and of X^T X (half a minute of a core), nor rows of the layer that sees most."""

LOOK = 8
"""Samples that are run to see how many rows each weight gets of one."""


@dataclass(eq=False)
class Enough:
    """Tells how many samples give `PER_INPUT` rows for each input to weights with `SHARE` of the values they reach.

    It is called with each batch that is taken: the model is run once, on a few samples of the first, and where masks
    tell tokens from padding, longer batches behind it make the number smaller and shorter ones larger.

    Attributes:
        model: What is to be pruned.
        weights: Its weights to prune.
        least: No fewer samples are asked for.
        cheap: Whether more are where they cost little: what follows a gradient fits few samples by heart.
    """

    model: nn.Module
    weights: Sequence[PrunableWeight]
    least: int
    cheap: bool = False
    _by_first: float | None = field(default=None, init=False)
    _length: float | None = field(default=None, init=False)
    _samples: int = field(default=0, init=False)
    _tokens: int = field(default=0, init=False)

    def __call__(self, batch: Batch) -> int:
        """Return how many samples are enough, as far as the batches up to this one tell.

        Raises:
            DataError: The model does not run on the first batch.
        """
        tokens = batch.tokens
        if self._by_first is None:
            few = some(batch, min(LOOK, batch.samples))
            self._by_first, cheap = _enough(self.model, self.weights, few)
            self.least = max(self.least, cheap) if self.cheap else self.least
            self._length = None if few.tokens is None else int(few.tokens.sum()) / few.samples
        if self._length is None or tokens is None:
            self._length = None
            return max(self.least, math.ceil(self._by_first))
        self._samples, self._tokens = self._samples + batch.samples, self._tokens + int(tokens.sum())
        longer = self._tokens / max(self._samples * self._length, 1)
        return max(self.least, math.ceil(self._by_first / max(longer, 1e-9)))


@torch.no_grad()
def _enough(model: nn.Module, weights: Sequence[PrunableWeight], few: Batch) -> tuple[float, int]:
    """Return how many samples like these few, on which the model is run, are enough, and how many cost little."""
    seen = [weight for weight in weights if not unsupported(weight)]
    if not seen:
        return 0, 0
    collector = Collector(model, seen, "norms", share=False)
    collector.tokens = few.tokens
    with calibrating(model), collector.hooked(), explained():
        call(model, to_device(few.inputs, seen[0].parameter.device))
    all_found = [(weight.name, weight.parameter.numel(), collector.release(weight)) for weight in seen]
    _say_unseen([name for name, _, found in all_found if not found.rows], few.samples)
    reached = [
        (found.rows / few.samples, *found.squares.shape, values)
        for _, values, found in all_found
        if found.squares is not None and found.rows
    ]
    wanted, left = 0.0, SHARE * sum(values for *_, values in reached)
    for samples, values in sorted((PER_INPUT * inputs / rows, values) for rows, _, inputs, values in reached):
        if left <= 0:
            break
        wanted, left = samples, left - values
    most = max((rows for rows, *_ in reached), default=1.0)
    work = sum(rows * (values + groups * inputs**2) for rows, groups, inputs, values in reached)
    cheap = min(CHEAP_SAMPLES, CHEAP_ROWS / most, CHEAP_WORK / max(work, 1.0))
    return min(wanted, MOST_ROWS / most), int(cheap)


def _say_unseen(names: Sequence[str], samples: int) -> None:
    """Say which weights do not count: data may reach them later, as tokens do the experts of a mixture."""
    if names:
        several = f" and {len(names) - 1} more" if names[1:] else ""
        _log.warning(
            "the first %d samples bring no row to `%s`%s: how many samples are taken does not depend on what they "
            "want; `samples` takes another number",
            *(samples, names[0], several),
        )
