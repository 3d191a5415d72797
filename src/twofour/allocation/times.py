"""timed: the measured milliseconds of every layer, dense and on sparse kernels, put beside its sensitivity."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from glob import escape
from typing import Any

import torch
from torch import nn

from twofour import native
from twofour.allocation.records import Candidate, LayerSensitivity, Sensitivities
from twofour.compiler import compile
from twofour.compiler.computing import FLOAT32, Computing, dtype_name
from twofour.compiler.plan import LayerPlan, Plan
from twofour.errors import CompileError
from twofour.patterns import parse
from twofour.pruning import prune
from twofour.recipe import DENSE, Recipe

TWO_FOUR = "2:4"


def timed(
    sensitivities: Sensitivities,
    model: nn.Module,
    example: Any,
    *,
    dtype: str | torch.dtype = "float32",
    progress: Callable[[int, int, str], None] | None = None,
) -> Sensitivities:
    """Return the sensitivities with the time of each layer and candidate on this machine; the model stays as it is.

    A copy of the model is pruned to 2:4 by magnitude (what counts for time is the pattern) and compiled in `dtype`:
    each layer is measured on the example's own sizes with the best dense and the best 2:4 kernel. A candidate that is
    2:4-legal takes the faster of the two. The same is done with each candidate that has kernels of its own: blocks, and
    2:4 with dense groups. Every other candidate takes the dense time. A layer that compile does not replace has no
    time, and takes the same with every pattern.

    Args:
        sensitivities: From `sensitivity`.
        model: The same dense model, in float32 on the CPU.
        example: Input for one forward pass, as `compile` takes it; the times are those at its batch size.
        dtype: Computing type, as `compile` takes it; int8 rounds each token by a range of its own.
        progress: Called with layers done, layers in all and the next layer's name.

    Raises:
        CompileError: The model does not run on the example, cannot be compiled, or the dtype is unknown.
        RecipeError: The sensitivities are those of another model.
    """
    computing = Computing.of(dtype_name(dtype))
    plans = {
        name: _plans(sensitivities, model, example, name, computing, progress)
        for name in (TWO_FOUR, *_with_kernels(sensitivities, computing))
    }
    timing = f"{native.threads()} threads, torch {torch.get_num_threads()}, {native.isa()}"
    timing += "" if computing == FLOAT32 else f", {computing.dtype}"
    return replace(sensitivities, layers=tuple(_with(layer, plans) for layer in sensitivities.layers), timing=timing)


def _with_kernels(sensitivities: Sensitivities, computing: Computing) -> list[str]:
    """Return the candidates that kernels of their own run, and not those of 2:4."""
    forms = {name: computing.form_of(parse(name)) for name in sensitivities.patterns if name != DENSE}
    return [name for name, form in forms.items() if form not in (None, parse(TWO_FOUR))]


def _plans(
    sensitivities: Sensitivities,
    model: nn.Module,
    example: Any,
    pattern: str,
    computing: Computing,
    progress: Callable[[int, int, str], None] | None,
) -> dict[str, LayerPlan]:
    """Return what compile measures where all layers that can carry a pattern do, by their names."""
    having = [layer for layer in sensitivities.layers if any(_runs(entry, pattern) for entry in layer.candidates)]
    pruned = copy.deepcopy(model)
    if having:
        ordered = sorted((layer.layer for layer in having), key=lambda name: -name.count("."))
        rules = tuple((escape(name) or "*", parse(pattern)) for name in ordered)
        prune(pruned, Recipe(rules, eligibility=sensitivities.eligibility), progress=False)
    plan = getattr(compile(pruned, example, dtype=computing.dtype, tokens=(1,), progress=progress), "plan", None)
    if not isinstance(plan, Plan):
        raise CompileError(
            "the times cannot be read",
            got="a model with an attribute `plan` of its own, which hides compile's",
            wanted="a model without one",
            remedy="rename the model's attribute `plan`",
        )
    return {entry.name: entry for entry in plan.layers}


def _runs(entry: Candidate, pattern: str) -> bool:
    """Tell whether kernels of `pattern` can run a candidate."""
    return entry.sparse if pattern == TWO_FOUR else entry.pattern == pattern


def _with(layer: LayerSensitivity, plans: dict[str, dict[str, LayerPlan]]) -> LayerSensitivity:
    def found(pattern: str) -> list[LayerPlan]:
        listed = [plans[pattern][name] for name in layer.layers if name in plans[pattern]]
        return [plan for plan in listed if plan.dense_ms is not None]

    if not found(TWO_FOUR):
        return replace(layer, candidates=tuple(replace(entry, ms=None) for entry in layer.candidates))
    dense = sum(plan.dense_ms or 0.0 for plan in found(TWO_FOUR))

    def ms(entry: Candidate) -> float:
        times = [
            sum(min(plan.dense_ms or 0.0, plan.sparse_ms or plan.dense_ms or 0.0) for plan in found(pattern))
            for pattern in plans
            if _runs(entry, pattern) and found(pattern)
        ]
        return min([dense, *times])

    return replace(layer, candidates=tuple(replace(entry, ms=ms(entry)) for entry in layer.candidates))
