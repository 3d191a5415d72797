"""What calibration data say of each layer's inputs: their extremes, and a sample that a step is fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from twofour import calls
from twofour.calibration import Batch, to_device
from twofour.errors import DataError
from twofour.patterns.base import is_finite

SAMPLE = 1 << 16
"""Inputs of a layer that a step is fitted to."""


@dataclass
class Seen:
    """Inputs of a layer.

    Attributes:
        low: Their least value, or zero.
        high: Their greatest value, or zero.
        sample: Values evenly spaced over each batch, float32 of one axis on the CPU.
    """

    low: float
    high: float
    sample: Tensor


def observe(model: nn.Module, layers: Sequence[str], batches: Sequence[Batch]) -> dict[str, Seen]:
    """Run batches through a model in evaluation mode; return what each layer saw, of those that were called.

    Raises:
        DataError: The model does not run on a batch, or makes a layer's input infinite.
    """
    seen: dict[str, Seen] = {}
    each = max(SAMPLE // max(len(batches), 1), 1)

    def see(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = calls.first_input(args, kwargs)
        if not isinstance(x, Tensor) or not x.numel():
            return
        if not is_finite(x):
            raise DataError(
                "the calibration data make a layer's input infinite",
                got="NaN or infinity",
                wanted="finite inputs",
                remedy="take such samples out of `data`, or leave `data` out: each token then has its own range",
                layer=name,
            )
        low, high = (extreme.item() for extreme in x.aminmax())
        flat = x.detach().flatten()
        part = flat[:: max(len(flat) // each, 1)][:each].float().cpu()
        known = seen.get(name)
        if known is None:
            seen[name] = Seen(min(low, 0.0), max(high, 0.0), part)
        else:
            seen[name] = Seen(min(known.low, low), max(known.high, high), torch.cat([known.sample, part]))

    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    watched = [(name, model.get_submodule(name)) for name in layers]
    remedy = "call the model on one batch yourself: `data` must hold what it takes"
    with calls.evaluating(model), calls.keeping_buffers(model), torch.no_grad(), calls.observing(watched, see):
        for batch in batches:
            with calls.explaining(DataError, "the calibration data", wanted=calls.PAIRS, remedy=remedy):
                calls.call(model, to_device(batch.inputs, device))
    return seen
