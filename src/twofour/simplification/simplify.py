"""simplify: products that algebra makes unnecessary leave a dense model before it is pruned."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, fx, nn

from twofour import calls, masks
from twofour.calls import Example
from twofour.capture import TRACING, arguments, capture
from twofour.errors import LayerError
from twofour.graph import EXACT, Outcome, require_rules, rewrite
from twofour.graph.base import value
from twofour.graph.rules.cut_projections import CUT_PROJECTIONS
from twofour.graph.rules.remove_identities import IDENTITIES
from twofour.layers import compiled_parts, require_module, require_unwrapped
from twofour.measure.distance import distance
from twofour.simplification.module import Simplified, simplified

_log = logging.getLogger("twofour.simplification")

LARGEST_ERROR = 1e-4
"""Relative difference from the model on the example beyond which something is broken, where all is float32."""

UNFIT_EXAMPLE = "call the model on it yourself: an example is what one forward pass takes"

HALVES = (torch.float16, torch.bfloat16)
HALVES_ERROR = 8
"""The same where a graph computes in one of them too, in units of its last place: other rewrites round differently."""


def simplify(model: nn.Module, example: Any, *, rules: str = EXACT) -> nn.Module:
    """Return a dense model that computes the same with fewer products: weights that algebra merges are one weight.

    Merging 2:4 weights makes them dense, so this is done before `prune`: adapters go into the weight that they stand
    beside, layers in a row become one, sums of products one product (docs/rewriting.md). The answer is the captured
    forward as a module: merged weights are `nn.Linear` under the name of the first of them, every other parameter keeps
    its name, and linear layers and convolutions are layers that `prune` sees. `simplified.simplification` says what was
    done, with error bounds.

    It is captured in evaluation mode and stays so: dropout is gone, and normalisation over a batch uses its running
    statistics, also in training. It holds for calls of the example's structure, any sizes that torch can express.

    Args:
        model: A dense model on the CPU; it is not changed.
        example: Input for one forward pass: a tensor, a tuple of positional or a dict of keyword arguments.
        rules: "exact" or "close": docs/rewriting.md.

    Returns:
        A new module with copies of the parameters; `model` itself where nothing can be merged, as with weights of 16
        bits, which would be rounded twice, or where it has forward hooks, which would not run. The log says why.

    Raises:
        LayerError: The model carries masks or is compiled, does not run on the example, or the simplified one answers
            otherwise.
        CompileError: The model cannot be captured, or the rules are not known.
    """
    _require_dense(model)
    require_rules(rules)
    if names := _hooked(model):
        _log.info("the model stays as it is: forward hooks on %s would not run in a graph", ", ".join(names[:4]))
        return model
    example, training = Example.of(example), model.training
    runs = calls.explaining(LayerError, "the example", wanted=calls.FORMS, remedy=UNFIT_EXAMPLE)
    with TRACING, calls.evaluating(model), calls.keeping_buffers(model), torch.no_grad():
        with runs:
            example.run(model)
        given = arguments(model, example.args, example.kwargs)
        graph = capture(model, given)
        for rule in (IDENTITIES, CUT_PROJECTIONS):
            rule.rewrite(graph.module)
        largest = _seal_halves(graph.module.graph)
        outcome = rewrite(graph.module, kind=rules)
        if not any(entry.merges for entry in outcome.done):
            _log.info("nothing can be merged; the model stays as it is%s", _why_not(outcome))
            return model
        made, lost = simplified(model, graph, outcome)
        if lost:
            _log.info("the model stays as it is: no layer of a simplified one would hold `%s`", "`, `".join(lost[:4]))
            return model
        made.eval()
        _compare(model, made, example, largest)
    _log.info("simplified: %s", ", ".join(f"{name} {count}" for name, count in outcome.counts.items()))
    return made.train(training)


def _hooked(model: nn.Module) -> list[str]:
    """Return the modules with forward hooks, which tracing would run once."""
    named = ((name or type(model).__name__, module) for name, module in model.named_modules())
    return [f"`{name}`" for name, module in named if module._forward_hooks or module._forward_pre_hooks]


def _seal_halves(graph: fx.Graph) -> float:
    """Leave weights of 16 bits as they are; returns the error that the graph's types allow."""
    held_as = {value(node).dtype for node in graph.nodes if isinstance(value(node), Tensor)}
    for node in graph.nodes:
        if node.op == "get_attr" and isinstance(held := value(node), Tensor) and held.dtype in HALVES:
            name, dtype = node.meta["weight"], str(held.dtype).removeprefix("torch.")
            node.meta["sealed"] = f"`{name}` is held in {dtype}: merging would round it twice"
    return max([LARGEST_ERROR, *(HALVES_ERROR * torch.finfo(dtype).eps for dtype in held_as & {*HALVES})])


def _why_not(outcome: Outcome) -> str:
    return "".join(f"; {line}" for line in outcome.not_done)


def _compare(model: nn.Module, made: Simplified, example: Example, largest: float) -> None:
    error = distance(calls.output_leaves(example.run(made)), calls.output_leaves(example.run(model)))
    if not error <= largest:
        raise LayerError(
            "the simplified model does not compute what the model does",
            got=f"a relative error of {error:.2e} on the example",
            wanted=f"at most {largest:g}",
            remedy="if the model is random in evaluation mode it cannot be simplified; else please report it",
        )


def _require_dense(model: nn.Module) -> None:
    require_module(model)
    require_unwrapped(model)
    found = compiled_parts(model) or ", ".join(f"the mask of `{name}`" for name in list(masks.of(model))[:3])
    if found:
        raise LayerError(
            "only a dense model can be simplified: merged weights are dense",
            got=found,
            wanted="the model before it was pruned or compiled",
            remedy="simplify first: twofour.prune(model, pattern, simplify=True, example=x)",
        )
