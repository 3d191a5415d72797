"""The compiled model's own call against the dense model's: where it ends slower, dense layers come back."""

from __future__ import annotations

import copy
import logging
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from twofour.calls import observing
from twofour.compiler.build import masked_sizes
from twofour.compiler.embeddings import TableEmbedding
from twofour.compiler.graph import TIE
from twofour.compiler.plan import LayerPlan, Plan
from twofour.compiler.recurrent import RecurrentLayer
from twofour.compiler.unpacked import WeightedLayer
from twofour.measure.chooser import clock, milliseconds
from twofour.measure.timing import CLOCKS

logger = logging.getLogger("twofour.compiler")

Replaced = WeightedLayer | RecurrentLayer

Call = Callable[[nn.Module], object]
"""Runs the example through a model."""


def never_slower(fast: nn.Module, plan: Plan, layers: Plan, model: nn.Module, call: Call) -> Plan:
    """Time the whole compiled model against the dense one; returns the plan with both times and what came back.

    Kernels are chosen by the product alone, and a model may do more with a layer than call it: read its weight, which
    is unpacked then, or call it in a way that costs more around the kernel. Where the whole call is over `TIE` times as
    slow as the dense model's, the graph goes, then the layers that cause it become the dense ones again, at last all.

    Args:
        fast: The compiled model; layers of it may be replaced.
        plan: What was decided.
        layers: The same before there was a graph.
        model: The model that was compiled.
        call: Runs the example.
    """
    times = _times(fast, model, call)
    if isinstance(fast, Replaced) or times["compiled"] <= TIE * times["dense"]:
        return replace(plan, whole_ms=times)
    if fast.__dict__.pop("forward", None) is not None and plan.account is not None:
        reason = f"the dense model is faster than the {plan.account.engine} on the example: {_shown(times)}"
        logger.warning("each layer is compiled by itself: %s", reason)
        plan = replace(layers, account=replace(plan.account, engine="layers", reason=reason))
        times = _times(fast, model, call)
    for names, cause in ((_causes, "its call in the model, or reading its weight, takes longer"), (_all, "")):
        if times["compiled"] <= TIE * times["dense"]:
            break
        found = names(fast, model, call)
        because = f"dense: the whole model is faster so ({_shown(times)})" + (f": {cause}" if cause else "")
        plan = _put_back(fast, plan, model, found, because)
        times = _times(fast, model, call) if found else times
    return replace(plan, whole_ms=times)


def _times(fast: nn.Module, model: nn.Module, call: Call) -> dict[str, float]:
    return milliseconds({"dense": lambda: call(model), "compiled": lambda: call(fast)})


def _shown(times: Mapping[str, float]) -> str:
    return f"dense {times['dense']:.3f} ms, compiled {times['compiled']:.3f} ms"


def _places(fast: nn.Module) -> dict[str, Replaced]:
    """Return the compiled layers under every name they have."""
    modules = fast.named_modules(remove_duplicate=False)
    return {
        n: module for n, module in modules if isinstance(module, Replaced) and not isinstance(module, TableEmbedding)
    }


def _all(fast: nn.Module, model: nn.Module, call: Call) -> list[str]:
    return list(_places(fast))


def _causes(fast: nn.Module, model: nn.Module, call: Call) -> list[str]:
    """Return the layers whose weight the model unpacks, or whose real call takes longer than the dense layer's."""
    places = _places(fast)
    for layer in places.values():
        layer.weight_reads.layers.clear()
    ours, dense = _seconds(fast, places, call), _seconds(model, places, call)
    read = {layer.name for layer in places.values() if layer.name in layer.weight_reads.layers}
    return [
        name for name, layer in places.items() if layer.name in read or ours.get(name, 0) > TIE * dense.get(name, 0)
    ]


def _seconds(model: nn.Module, names: Mapping[str, object], call: Call, repeats: int = 5) -> dict[str, float]:
    """Return the median seconds that each named module's calls take in one run of the example."""
    runs: list[dict[str, float]] = []
    for _ in range(repeats):
        with _timing(model, names) as spent:
            call(model)
        runs.append(spent)
    return {name: statistics.median(run.get(name, 0.0) for run in runs) for name in names}


@contextmanager
def _timing(model: nn.Module, names: Mapping[str, object]) -> Iterator[dict[str, float]]:
    """Add up the time in each named module's calls inside."""
    now = CLOCKS[clock()]
    spent: dict[str, float] = {}
    begun: dict[str, float] = {}

    def before(name: str, *_: Any) -> None:
        begun[name] = now()

    def after(name: str, *_: Any) -> None:
        spent[name] = spent.get(name, 0.0) + now() - begun[name]

    with observing([(name, model.get_submodule(name)) for name in names], before, after):
        yield spent


def _kept(fast: nn.Module, model: nn.Module) -> dict[int, Any]:
    """Return the parameters of layers that stayed as they were, by the ids of the model's own."""
    stayed = dict(fast.named_modules(remove_duplicate=False))
    return {
        id(parameter): own
        for name, module in model.named_modules(remove_duplicate=False)
        if (found := stayed.get(name)) is not None and type(found) is type(module)
        for part, parameter in module._parameters.items()
        if parameter is not None and (own := found._parameters.get(part)) is not None
    }


def _put_back(fast: nn.Module, plan: Plan, model: nn.Module, names: Sequence[str], reason: str) -> Plan:
    """Replace compiled layers by copies of the model's own; returns the plan that says so."""
    if not names:
        return plan
    memo = _kept(fast, model)  # tied layers stay tied
    for name in names:
        owner, _, attribute = name.rpartition(".")
        dense = copy.deepcopy(model.get_submodule(name), memo).eval().requires_grad_(False)
        setattr(fast.get_submodule(owner), attribute, dense)
    shown = ", ".join(f"`{name}`" for name in names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")
    logger.warning("%s: %s", shown, reason)

    def kept(layer: LayerPlan) -> LayerPlan:
        if layer.name not in names:
            return layer
        sizes = {"bytes_after": layer.bytes_before, "bytes_in_file": layer.bytes_before}
        return replace(layer, kernel="torch", dispatch="", reason=reason, **sizes)

    entries = masked_sizes(fast, [kept(layer) for layer in plan.layers])
    return replace(plan, layers=tuple(entries), kept_dense=(*plan.kept_dense, *names))
