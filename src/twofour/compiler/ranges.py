"""Static ranges of layers for int8, from data: the least and greatest value of each layer's input and of each output.

By the ranges of inputs products round what they read; by those of outputs, attention in bytes what it reads.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from twofour import calls
from twofour.calibration.batches import items, read
from twofour.errors import CompileError
from twofour.kernels.quantization import Quantization
from twofour.patterns.base import is_finite

logger = logging.getLogger("twofour.compiler")


def observe(model: nn.Module, layers: Collection[str], data: Iterable[Any]) -> dict[str, Quantization]:
    """Return each layer's input range as a static quantization: see `observed`."""
    return observed(model, layers, data)[0]


def observed(
    model: nn.Module, layers: Collection[str], data: Iterable[Any]
) -> tuple[dict[str, Quantization], dict[str, Tensor]]:
    """Run `data` through the model; return each layer's input range as a static quantization, and its outputs' ranges.

    The latter are float32 (2, out): the least and the greatest value of each; none of a layer that answered anything
    that is not finite.

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
    answers: dict[str, Tensor] = {}

    def see(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = calls.first_input(args, kwargs)
        if isinstance(x, Tensor) and x.numel():
            ranges[name] = _widened(ranges.get(name, (0.0, 0.0)), x.detach(), name)

    def answered(name: str, _: nn.Module, __: tuple[Any, ...], ___: dict[str, Any], y: Any) -> None:
        if isinstance(y, Tensor) and y.numel():
            low, high = y.detach().float().reshape(-1, y.shape[-1]).aminmax(dim=0)
            known = answers.get(name, (low, high))
            answers[name] = torch.stack((torch.minimum(known[0], low), torch.maximum(known[1], high)))

    remedy, batches = "call the model on one batch yourself: `data` must hold what it takes", 0
    with calls.observing([(name, model.get_submodule(name)) for name in layers], see, answered):
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
    _say_zero(ranges)
    static = {name: Quantization.of_range(*found) for name, found in ranges.items() if found != (0.0, 0.0)}
    return static, {name: found for name, found in answers.items() if is_finite(found)}


def _say_zero(ranges: Mapping[str, tuple[float, float]]) -> None:
    """Log the layers that have no static range."""
    zero = [f"`{name}`" for name, found in ranges.items() if found == (0.0, 0.0)]
    if zero:
        listed = f"{', '.join(zero[:4])}{f' and {len(zero) - 4} more' if len(zero) > 4 else ''}"
        logger.warning("the data are zero throughout at %s: no static range; each token gets its own there", listed)


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
