"""Static input ranges of the layers for int8, from data: the least and greatest value each layer's input takes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn

from twofour import calls
from twofour.calibration.batches import items, read
from twofour.errors import CompileError
from twofour.kernels.nm_matmul import Quantization
from twofour.patterns.base import is_finite

logger = logging.getLogger("twofour.compiler")


def observe(model: nn.Module, layers: Collection[str], data: Iterable[Any]) -> dict[str, Quantization]:
    """Run `data` through the model and return each layer's input range as a static quantization.

    A layer whose input was zero throughout has none: any other value would lie outside it. It is logged.

    Args:
        model: In evaluation mode.
        layers: Names of the Linear layers to watch; one that no batch reaches has no entry.
        data: Inputs (a tensor, a tuple of positional or a dict of keyword arguments), or pairs (input, target), told
            apart as in `prune`; one tensor or dict is one batch.

    Raises:
        CompileError: There is no batch, the model does not run on one, or an input holds NaN or infinity.
    """
    if not isinstance(data, Iterable):
        raise CompileError(
            "the data cannot be read batch by batch",
            got=f"a {type(data).__name__}",
            wanted=f"an iterable of {calls.PAIRS}",
            remedy="pass a list of batches or a DataLoader: data=[x]",
        )
    ranges: dict[str, tuple[float, float]] = {}

    def see(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = calls.first_input(args, kwargs)
        if isinstance(x, Tensor) and x.numel():
            ranges[name] = _widened(ranges.get(name, (0.0, 0.0)), x.detach(), name)

    remedy = "call the model on one batch yourself: `data` must hold what it takes"
    batches = 0
    with calls.observing([(name, model.get_submodule(name)) for name in layers], see):
        for item in items(data):
            with calls.explaining(CompileError, "the data", wanted=calls.PAIRS, remedy=remedy):
                calls.call(model, read(model, item).inputs)
            batches += 1
    if not batches:
        raise CompileError(
            "there is no data to take ranges from",
            got="no batch",
            wanted="at least one input",
            remedy="pass a list or a fresh iterator (one that was used up is empty), or leave `data` out",
        )
    zero = [f"`{name}`" for name, found in ranges.items() if found == (0.0, 0.0)]
    if zero:
        listed = f"{', '.join(zero[:4])}{f' and {len(zero) - 4} more' if len(zero) > 4 else ''}"
        logger.warning("the data are zero throughout at %s: no static range; each token gets its own there", listed)
    return {name: Quantization.of_range(*found) for name, found in ranges.items() if found != (0.0, 0.0)}


def _widened(known: tuple[float, float], x: Tensor, name: str) -> tuple[float, float]:
    if not is_finite(x):
        raise CompileError(
            "the data make a layer's input infinite",
            got="NaN or infinity",
            wanted="finite inputs: the range of each layer is that of its least and greatest",
            remedy="take such samples out of `data`, or leave `data` out: each token then gets its own range",
            layer=name,
        )
    low, high = (extreme.item() for extreme in x.aminmax())
    return min(known[0], low), max(known[1], high)
