"""shown: whether calibration data show anything, and what they are too few for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.utils._pytree import tree_leaves

from twofour.calibration import Batch, not_finite, part
from twofour.errors import DataError
from twofour.shrinking.curves import Curve

PER_INPUT = 2
"""Rows for each input of a weight below which least squares follow the sample: of n rows and p inputs the error on
other data is that on these times about n / (n - p)."""

LEAST_SAMPLES = 5
"""Samples of few rows from which some are held back to judge what the others solved; of fewer nothing is solved."""


def require_shown(batches: Sequence[Batch]) -> None:
    """Refuse calibration data that hold NaN or infinity, or show nothing since all samples are the same or zero.

    Raises:
        DataError: They do.
    """
    if (error := not_finite(batches)) is not None:
        raise error
    if any(batch.whole for batch in batches):
        return  # samples cannot be told from what else the inputs hold
    samples = count(batches)
    first = _tensors(part(batches[0], 0, 1))
    blank = all(leaf.is_floating_point() and not bool(leaf.any()) for leaf in first)
    if (samples > 1 or blank) and all(_alike(batch, first) for batch in batches):
        raise nothing(f"{samples} samples, all {'zero' if blank else 'the same'}")


def nothing(got: str) -> DataError:
    """Return the error for data that show no difference."""
    return DataError(
        "the calibration data show nothing",
        got=got,
        wanted="samples that differ, some hundreds",
        remedy="data=loader over inputs of yours; without data channels go by magnitude",
    )


def count(batches: Sequence[Batch]) -> int:
    """Return how many samples batches have."""
    return sum(batch.samples for batch in batches)


def few(curves: Mapping[str, Curve], widths: Mapping[str, int], samples: int) -> str:
    """Return a sentence about data that are too few for what was cut, "" where they suffice."""
    cut = {name: curve for name, curve in curves.items() if curve.inputs and widths[name] < curve.widths[0]}
    if not cut:
        return ""
    name, least = min(cut.items(), key=lambda one: one[1].rows / one[1].inputs)
    if samples > 1 and least.rows >= PER_INPUT * least.inputs:
        return ""
    wanted = max(math.ceil(PER_INPUT * least.inputs * samples / least.rows), LEAST_SAMPLES)
    seen = f"{samples} samples" if samples > 1 else "one sample"
    return (
        f"{seen} for {least.inputs} inputs, of which {least.rows} rows were seen, of what reads `{name}`: what is "
        f"lost is underestimated; give {wanted} samples or more"
    )


def _tensors(batch: Batch) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch.inputs) if isinstance(leaf, Tensor)]


def _alike(batch: Batch, first: Sequence[Tensor]) -> bool:
    """Whether each sample of a batch equals the first one."""
    found = _tensors(batch)
    if len(found) != len(first):
        return False
    return all(
        leaf.shape[1:] == one.shape[1:] and leaf.ndim == one.ndim and bool((leaf == one.to(leaf.device)).all())
        for leaf, one in zip(found, first, strict=True)
    )
