"""Calibration data that hold NaN or infinity: which batch and which input, where a layer's input is not finite."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from twofour.calibration.batches import Batch, named_leaves
from twofour.errors import DataError

_MASK = re.compile(r"(?:(?<![A-Za-z])m|M)asks?(?![a-z])")
"""The word in a name: `attention_mask` and `attentionMask`, not `unmasked_pixels`."""


def not_finite(batches: Sequence[Batch]) -> DataError | None:
    """Return the error for the first batch whose inputs hold NaN or infinity, None where none do.

    What a mask hides by -infinity is meant.
    """
    for place, batch in enumerate(batches, 1):
        leaves = list(named_leaves("", batch.inputs))
        for number, (name, leaf) in enumerate(leaves, 1):
            if not leaf.is_floating_point():
                continue
            found = {"NaN": int(leaf.isnan().sum()), "infinity": int(leaf.isposinf().sum())}
            if not _hides(name, leaf, first=number == 1):
                found["infinity"] += int(leaf.isneginf().sum())
            kind = next((kind for kind, count in found.items() if count), None)
            if kind is None:
                continue
            which = f", `{name}`" if name else f", input {number} of {len(leaves)}" if len(leaves) > 1 else ""
            several = "values that are" if found[kind] > 1 else "value that is"
            return DataError(
                f"the calibration data hold {kind}",
                got=f"batch {batch.number or place}{which}: {found[kind]} {several} {kind}",
                wanted="finite numbers",
                remedy="leave those samples out, or fill what is missing as in training",
            )
    return None


def _hides(name: str, leaf: Tensor, *, first: bool) -> bool:
    """Whether -infinity in an input stands for what is hidden: in a mask by its name, or by its values.

    What is added to scores is 0, -infinity or the least number of its type; logarithms of shares or of spectra, which
    are below 0 too, have other values. The first input is none.
    """
    if _MASK.search(name):
        return True
    return not first and bool(((leaf == 0) | (leaf <= torch.finfo(leaf.dtype).min)).all())
