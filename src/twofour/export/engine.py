"""What a loaded model runs on: the graph that its file carries, one captured on an example, or its layers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from twofour.calls import Example
from twofour.capture import Graph, Structure
from twofour.checkpoints.limits import limited
from twofour.compiler.decoding import prompt_like, with_decoding, without_decoding
from twofour.compiler.graph import kept_layers, require_graph
from twofour.compiler.graph_report import GraphReport
from twofour.compiler.inductor import fastest_engine
from twofour.compiler.plan import Plan
from twofour.compiler.runs import require_runs
from twofour.compiler.terms import Terms
from twofour.compiler.whole_model import by_layers
from twofour.errors import cut
from twofour.graph.stored import Rebuilt, UnfitError, differences, fingerprint, rebuild

logger = logging.getLogger("twofour.export")

NO_EXAMPLE = "the file holds no graph; load(..., example=...) looks for one again"


def choose_engine(fast: nn.Module, plan: Plan, example: Any, terms: Terms, graph: bool | str) -> Plan:
    """Let a loaded model run as a whole where that is asked for and can be; return the plan with what became of it.

    Args:
        fast: The model with compiled layers and the file's weights.
        plan: Of its layers, with the graph of the file.
        example: The caller's, or None: then one like that of the file is made up.
        terms: What held for every layer.
        graph: As in `twofour.load`.

    Raises:
        CompileError: The model does not run on the caller's example, or there is neither an example nor a graph.
    """
    if not graph:
        return plan
    if plan.graph is None and example is None and (prompt := prompt_like(fast, plan)) is not None:
        return with_decoding(fast, replace(plan, account=GraphReport("layers", NO_EXAMPLE)), prompt, terms)
    if plan.graph is None:
        require_graph(graph, example)
    if example is not None:
        with torch.no_grad():
            require_runs(fast, Example.of(example))
    if plan.graph is None and example is None:
        logger.info("each layer is compiled by itself: %s", NO_EXAMPLE)
        return without_decoding(fast, replace(plan, account=GraphReport("layers", NO_EXAMPLE)))
    try:
        stored, made_up = (None, None) if plan.graph is None else _from_file(fast, plan.graph)
    except (UnfitError, ValueError, RecursionError, MemoryError) as error:
        reason = f"the graph of the file is not used: {error or type(error).__name__}"
        if example is None:
            reason += "; load(..., example=...) captures the model again"
            logger.warning("each layer is compiled by itself: %s", reason)
            return without_decoding(fast, replace(plan, account=GraphReport("layers", reason), graph=None))
        logger.warning("the model is captured again: %s", reason)
        stored, made_up = None, None
    given = Example.of(example) if example is not None else made_up
    assert given is not None
    plan = fastest_engine(fast, plan, given, terms, graph, stored=stored)
    return plan if terms.native else with_decoding(fast, plan, given, terms)


def _from_file(fast: nn.Module, found: Mapping[str, Any]) -> tuple[Graph, Example]:
    """Return the graph of a file and an example for it, within the time that a file may ask for.

    Raises:
        ValueError: It does not fit the model, or takes too long.
    """
    with limited(), torch.no_grad():
        rebuilt = rebuild(found, fast, kept_layers(fast, floats=True))
        if found["code"] not in (fingerprint(fast), fingerprint(fast, dtypes=True)):
            where = differences(found.get("settings"), fast)
            raise UnfitError(
                "the model's code or settings are not those of the model that was compiled"
                + (f" ({where})" if where else "")
                + ", and answers are those of the model given here"
            )
        given = rebuilt.graph.inputs.value(rebuilt.leaves)
        return replace(rebuilt.graph, outputs=_structure(fast, rebuilt)), Example((), given)


def _structure(fast: nn.Module, rebuilt: Rebuilt) -> Structure:
    """Return how the model builds its answer, which no file says: classes of strangers are not made."""
    try:
        answer = by_layers(fast, rebuilt.graph.inputs.value(rebuilt.leaves))
    except Exception as error:  # a model refuses inputs in any way it likes
        said = cut(" ".join(str(error).split()), 200)
        raise UnfitError(
            f"the model does not run on inputs like its example: {type(error).__name__}: {said}"
        ) from error
    leaves, spec = tree_flatten(answer)
    if len(leaves) != rebuilt.answers:
        raise UnfitError(f"it answers with {rebuilt.answers} values, and the model with {len(leaves)}")
    return Structure(spec)
