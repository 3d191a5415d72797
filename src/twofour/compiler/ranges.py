"""Static input ranges of the layers for int8, from data: the least and greatest value each layer's input takes."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from twofour import calls
from twofour.errors import CompileError
from twofour.kernels.nm_matmul import Quantization
from twofour.patterns.base import is_finite


def observe(model: nn.Module, layers: Collection[str], data: Iterable[Any]) -> dict[str, Quantization]:
    """Run `data` through the model and return each layer's input range as a static quantization.

    Args:
        model: In evaluation mode.
        layers: Names of the Linear layers to watch; one that no batch reaches has no entry.
        data: Inputs (a tensor, a tuple of positional or a dict of keyword arguments), or pairs (input, target): a pair
            is taken for arguments where the model's forward can be called with both.

    Raises:
        CompileError: There is no batch, the model does not run on one, or an input holds NaN or infinity.
    """
    ranges: dict[str, tuple[float, float]] = {}
    handles = []
    for name in layers:

        def see(_: nn.Module, inputs: tuple[Any, ...], name: str = name) -> None:
            x = inputs[0] if inputs else None
            if isinstance(x, Tensor) and x.numel():
                ranges[name] = _widened(ranges.get(name, (0.0, 0.0)), x.detach(), name)

        handles.append(model.get_submodule(name).register_forward_pre_hook(see))
    try:
        batches = sum(1 for batch in data if _call(model, batch) is not None)
    finally:
        for handle in handles:
            handle.remove()
    if not batches:
        raise CompileError(
            "there is no data to take ranges from",
            got="no batch",
            wanted="at least one input",
            remedy="pass a list or a fresh iterator (one that was used up is empty), or leave `data` out",
        )
    return {name: Quantization.of_range(low, high) for name, (low, high) in ranges.items()}


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


def _call(model: nn.Module, batch: Any) -> Any:
    remedy = "call the model on one batch yourself: `data` must hold what it takes"
    with calls.explaining(CompileError, "the data", wanted=calls.PAIRS, remedy=remedy):
        if isinstance(batch, Mapping):
            return model(**batch)
        if isinstance(batch, tuple | list) and not (len(batch) == 2 and not _takes(model, batch)):
            return model(*batch)
        return _call(model, batch[0]) if isinstance(batch, tuple | list) else model(batch)


def _takes(model: nn.Module, arguments: tuple[Any, ...] | list[Any]) -> bool:
    try:
        inspect.signature(model.forward).bind(*arguments)
    except TypeError:
        return False
    return True
