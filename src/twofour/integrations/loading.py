"""A model that transformers has loaded with its dense weights: pruned where that is asked for, and compiled."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from transformers.utils.logging import is_progress_bar_enabled

import twofour
from twofour import masks
from twofour.compiler import CompiledConv, CompiledLinear
from twofour.compiler.computing import Computing
from twofour.compiler.recurrent import RecurrentLayer
from twofour.integrations.config import TwoFourConfig
from twofour.integrations.example import batches, example_of, runs
from twofour.layers import PrunableWeight, walk
from twofour.patterns.base import is_finite

logger = logging.getLogger("twofour.integrations")


DENSE = (
    "%s is dense and stays so, since weights are never changed unasked: it runs on the dense kernels that are fastest "
    'here, in %s. 2:4 is faster still and costs quality: TwoFourConfig(prune="2:4", data=[hundreds of sentences]) '
    "prunes once while it loads; `twofour optimize %s --data FILE --within 1 --out DIR` makes both, judges them on "
    "sentences held back and keeps the fastest that loses at most 1 point (docs/huggingface.md#quality)"
)
"""Said of a folder without zeros: model, computing type, and the model again."""

PRUNED = (
    "%s was pruned %s in one shot %s, which changes its answers: compare them on your task with those of the model "
    "without prune=, or let `twofour optimize` judge it; training wins back most of what is lost "
    "(docs/huggingface.md#quality)"
)
"""Said of a model that is pruned while it is loaded: model, pattern, and by what."""


def compiled(model: Any, config: TwoFourConfig) -> nn.Module:
    """Return a compiled copy of a loaded model; with `config.prune` the model is pruned before.

    Both show their progress, unless transformers' own bars are switched off.

    Raises:
        TwofourError: As `twofour.prune` and `twofour.compile` do.
    """
    if model.dtype == torch.float16:
        logger.info("float16 is computed in float32: CPUs have no products for it")
        nn.Module.float(model)
    if config.prune is not None:
        _prune(model, config, config.prune)
    example = example_of(model, config.batch, config.length) if config.graph else None
    example = example if example is not None and runs(model, example) else None
    graph = config.graph if example is not None else "auto"
    dtype, shown = config.dtype or own_dtype(model), None if is_progress_bar_enabled() else False
    options: dict[str, Any] = {"memory": config.memory or "fast", "embeddings": config.embeddings, "graph": graph}
    fast = twofour.compile(model, example, dtype, **options, progress=shown)
    if not _is_sparse(fast):
        name = _name(model)
        logger.warning(DENSE, name, dtype, name)
    return fast


def _prune(model: Any, config: TwoFourConfig, pattern: str) -> None:
    given, samples = (None, None) if config.data is None else batches(model, config.data)
    options: dict[str, Any] = {"criterion": config.criterion, "skip": config.skip, "data": given, "samples": samples}
    twofour.prune(model, pattern, **options, progress=is_progress_bar_enabled())
    logger.warning(PRUNED, _name(model), pattern, "by magnitude, without data" if given is None else "on the data")


def _name(model: Any) -> str:
    return model.config.name_or_path or type(model).__name__


def own_dtype(model: nn.Module) -> str:
    """Return the computing type of the model's own weights."""
    found = {module.weight.dtype for module in model.modules() if isinstance(module, nn.Linear)}
    return "bfloat16" if found == {torch.bfloat16} else "float32"


def _is_sparse(fast: nn.Module) -> bool:
    """Tell whether a compiled model has a weight that obeys a pattern, also one that runs dense here."""
    held = [module for module in fast.modules() if isinstance(module, CompiledLinear | CompiledConv | RecurrentLayer)]
    if masks.of(fast) or any(getattr(module, "pattern", None) is not None for module in held):
        return True
    return any(map(_obeys, walk(fast, eligibility="any", tied="*").weights))


def _obeys(weight: PrunableWeight) -> bool:
    last = weight.reduction_last(weight.parameter.detach())
    return is_finite(last) and Computing().find(last)[0] is not None
