"""The model with compiled layers as one graph: captured, rewritten and, where it is faster, run so."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from twofour.calls import Example
from twofour.capture import Graph, Guard, arguments, capture, without_torchs_log
from twofour.compiler.agreement import agreement, amount, difference, on_exact_activations
from twofour.compiler.attention_bytes import hand_bytes_to_attention
from twofour.compiler.attention_int8 import IN_INT8, choose_attention, keep_faster
from twofour.compiler.features import saying_nothing
from twofour.compiler.graph_conv import kept_convs
from twofour.compiler.graph_low_bits import axes_of, kept_low_bits
from twofour.compiler.graph_report import GraphReport, by_operator
from twofour.compiler.graph_rewrites import Rewrites, compiled_layers, rewrite_graph
from twofour.compiler.left_out import let_out
from twofour.compiler.plan import Plan, with_products
from twofour.compiler.ragged import choose_ragged
from twofour.compiler.terms import Terms
from twofour.compiler.timed import held_by_model
from twofour.compiler.whole_model import WholeModel, by_layers, hooked
from twofour.errors import CompileError, cut
from twofour.generation.names import NAMES
from twofour.graph import EXACT, Executor, Program, outline, require_rules
from twofour.graph.base import FailedRuleError
from twofour.graph.stored import UnfitError, describe, fingerprint, settings
from twofour.measure.chooser import race
from twofour.measure.distance import distance

logger = logging.getLogger("twofour.compiler")

ENGINES = ("layers", "graph")
"""What a whole model is timed as."""

NATIVE = "native"
"""`graph=` for a graph that calls kernels of this package alone, whatever the times of others."""

TIE = 1.05
"""The layers' time over which the graph's must be for it to be given up: it computes the same with fewer calls, so that
a smaller difference is the noise of a busy machine."""


def require_graph(graph: bool | str, example: Any, rules: str = EXACT) -> None:
    """Refuse engines and rules that do not exist, and those without an input to capture the model on.

    Raises:
        CompileError: As above.
    """
    if not isinstance(graph, bool) and graph not in ("auto", "inductor", NATIVE):
        raise CompileError(
            "the graph is not known",
            got=repr(graph),
            wanted="'auto', False, True, 'native' or 'inductor'",
            remedy="leave it out: with an example the model is captured, and run as a graph where that is faster",
        )
    if graph and graph != "auto" and example is None:
        raise CompileError(
            f"graph={graph!r} needs an example",
            got="none",
            wanted="an input for one forward pass",
            remedy="pass example=: a tensor, a tuple of positional or a dict of keyword arguments",
        )
    require_rules(rules)
    if rules != EXACT and (example is None or not graph):
        raise CompileError(
            f"rules={rules!r} needs a graph",
            got=f"graph={graph!r} {'without' if example is None else 'with'} an example",
            wanted="an input for one forward pass, and graph='auto', True or 'inductor'",
            remedy="pass example=: a tensor, a tuple of positional or a dict of keyword arguments",
        )


def capture_model(
    fast: nn.Module,
    plan: Plan,
    example: Example,
    terms: Terms,
    original: nn.Module | None = None,
    *,
    asked: bool = True,
    stored: Graph | None = None,
) -> Plan:
    """Let `fast` run as one rewritten graph, where it can be captured and that is faster; returns the plan with why.

    Args:
        fast: The model with compiled layers; its instance gets a `forward` of its own.
        plan: What was decided for the layers.
        example: That of `compile`.
        terms: What held for every layer.
        original: The model with plain layers, for the account of the time before; None: it has no weights.
        asked: Whether the caller asked for a graph: without, that there is none is not worth a warning.
        stored: The graph out of a file, which the plan has as it stands there; it is taken where it holds for the
            example.
    """
    given = arguments(fast, example.args, example.kwargs)
    refused = impossible(fast, given)
    try:
        if refused:
            raise _RefusedError(refused)
        return _without_failing(fast, plan, given, terms, original or fast, stored)
    except _RefusedError as error:
        reason, account = str(error), error.account
    except Exception as error:  # a rewrite that fails on a model never seen must not cost the layers
        reason = f"{type(error).__name__}: {cut(' '.join(str(error).split()), 200)}, please report it"
        account, asked = None, True
        logger.debug("the graph failed", exc_info=error)
    logger.log(
        logging.WARNING if asked or stored is not None else logging.INFO, "each layer is compiled by itself: %s", reason
    )
    account = replace(account or GraphReport("layers", ""), reason=reason)
    return replace(plan, account=account, graph=None)  # what does not hold here is not handed on


def _without_failing(
    fast: nn.Module, plan: Plan, given: Mapping[str, Any], terms: Terms, original: nn.Module, stored: Graph | None
) -> Plan:
    """Rewrite the graph; where a rule raises, take the graph anew and leave that rule out."""
    left_out: dict[str, str] = {}
    while True:
        leaves = tree_flatten(dict(given))[0]
        if stored is not None and (found := Guard(stored).leaves(given)) is not None:
            graph, leaves = stored, found
        else:
            graph = _captured(fast, given)
            plan = replace(plan, graph=_described(fast, graph, leaves))
        try:
            with torch.inference_mode(), without_torchs_log():
                return _rewritten(fast, plan, graph, leaves, terms, original, left_out)
        except FailedRuleError as error:  # the rule changed the graph, of a file too: it is captured
            if error.rule in left_out:
                raise
            logger.warning("a graph is rewritten without one rule: %s, please report it", error)
            logger.debug("the rule failed", exc_info=error)
            stored, left_out[error.rule] = None, error.reason


class _RefusedError(Exception):
    """A model stays layer by layer for a reason that the plan states, with the account as far as it went."""

    def __init__(self, reason: str, account: GraphReport | None = None) -> None:
        super().__init__(reason)
        self.account = account


def _captured(fast: nn.Module, given: Mapping[str, Any]) -> Graph:
    layers, convs = compiled_layers(fast)
    if "" in layers or "" in convs:
        raise _RefusedError("the model is a single layer: a model with operators around its layers gains from a graph")
    if why := _cache_in(fast, given):
        raise _RefusedError(f"the model cannot be captured as a graph: {why}")
    try:
        return capture(fast, given, kept_layers(fast))
    except CompileError as error:
        raise _RefusedError(f"{str(error).splitlines()[0]}: {next(iter(error.reasons), error.wanted)}") from error


def kept_layers(fast: nn.Module, *, floats: bool = False) -> dict[str, tuple[int, ...]]:
    """Return outputs and axes of the compiled layers, which are single nodes of a graph, as `capture` takes them.

    `floats` as in `kept_low_bits`.
    """
    layers, convs = compiled_layers(fast)
    low_bits = {name: axes_of(layer) for name, layer in kept_low_bits(fast, floats=floats).items()}
    return {name: (layer.out_features,) for name, layer in layers.items()} | kept_convs(convs) | low_bits


def _described(fast: nn.Module, graph: Graph, leaves: Sequence[Any]) -> dict[str, Any] | None:
    """Return the graph as a file has it, None where a file has no words for it."""
    held = (*fast.named_parameters(remove_duplicate=False), *fast.named_buffers(remove_duplicate=False))
    try:
        return describe(graph, leaves, frozenset(name for name, _ in held), fingerprint(fast), settings(fast))
    except UnfitError as error:
        logger.info("a file of this model will hold no graph: %s", error)
        return None


def _rewritten(
    fast: nn.Module,
    plan: Plan,
    graph: Graph,
    leaves: Sequence[Any],
    terms: Terms,
    original: nn.Module,
    left_out: Mapping[str, str],
) -> Plan:
    guard = Guard(graph)
    plain = {name: original.get_submodule(name) for kind in compiled_layers(fast) for name in kind}
    plain |= kept_low_bits(fast, floats=True)
    held = held_by_model(fast)
    case = terms.cache.key(_case(graph, leaves, held, terms.rules, plan.graph))
    outlines = {"before": outline(graph.module)}
    between = [node.meta.get("val") for node in graph.module.graph.nodes]
    carried = terms.cache.carries(case, ENGINES)  # then nothing is timed, the operators neither
    before = () if carried else by_operator(Program(graph.module, plain, timed=True).seconds(leaves))
    found = rewrite_graph(fast, graph, plan, leaves, terms, left_out)
    _in_int8(found, plan, fast, guard, graph, leaves, terms)
    outlines["after"] = outline(graph.module)
    program = Executor(Program(graph.module))
    after = () if carried else by_operator(Program(graph.module, timed=True).seconds(leaves))
    runner = WholeModel(fast, guard, program, graph)
    runner.written, runner.beside = _written(fast, guard, leaves)
    runner.agreement = agreement(fast, plan.dtype, leaves, lambda: _answers(fast, guard, leaves), between)
    account = GraphReport("layers", "", {}, found.counts, before, after, outlines, None, **found.said)
    if not (error := _probe(runner, graph, leaves)) <= runner.agreement.allowed:
        raise _RefusedError(_unlike(runner, leaves, error), account)
    account = replace(account, calls=program.prepare(leaves))
    ragged = choose_ragged(graph.module, program, guard, leaves, runner.agreement, terms, held)
    runner.ragged, served = ragged.program, _sizes(guard, graph) + runner.agreement.said(error)
    times = {n: 1e3 * s for n, s in terms.cache.times(case, ENGINES, lambda: _engines(runner, leaves)).items()}
    engine, reason = _faster(times, served, terms.cache.origin([case]), asked=terms.native)
    if engine == "graph":
        reason += let_out(runner, leaves)
        object.__setattr__(fast, "forward", runner)
        layers = (replace(layer, reason=layer.reason + found.handed.reason(layer.name)) for layer in plan.layers)
        plan = replace(plan, layers=with_products(tuple(layers), found.added))
    return replace(plan, account=replace(account, engine=engine, reason=reason, engine_ms=times, ragged=ragged.said))


def _in_int8(
    found: Rewrites, plan: Plan, fast: nn.Module, guard: Guard, graph: Graph, leaves: Sequence[Any], terms: Terms
) -> None:
    """Let attention of an int8 model compute in int8 where that is faster and as near."""

    def exact() -> Sequence[Any]:
        with on_exact_activations(fast):
            return _answers(fast, guard, leaves)

    def chosen() -> int:
        layers = compiled_layers(fast)[0]
        handed = terms.memory == "fast" and any(layer.answers is not None for layer in layers.values())
        found.attention = choose_attention(graph.module, leaves, terms, exact, handed=handed)
        if terms.memory == "fast":  # a product that answers in bytes has a weight of its own
            given = hand_bytes_to_attention(graph.module, layers, leaves, exact, found.attention)
            found.attention = keep_faster(graph.module, terms, given) if handed else given
        return found.attention.count

    if plan.dtype == "int8":
        found.step(IN_INT8, chosen)


def _answers(model: nn.Module, guard: Guard, leaves: Sequence[Any]) -> list[Any]:
    """Return the leaves of what the model answers layer by layer."""
    return tree_flatten(by_layers(model, guard.inputs.value(leaves)))[0]


def _unlike(runner: WholeModel, leaves: Sequence[Any], error: float) -> str:
    """Say why a graph differs from the layers: they may differ from call to call, as a forward that draws numbers."""
    one, other = (_answers(runner.model, runner.guard, leaves) for _ in range(2))
    if distance(one, other) <= runner.agreement.floats:
        if not math.isfinite(error):
            error = runner.agreement.unrounded(*_both(runner, leaves))
        return f"the rewritten graph differs from the layers {amount(error)} on the example, please report it"
    return "the model answers one example differently from call to call, so that no graph can be compared with it"


def _sizes(guard: Guard, graph: Graph) -> str:
    """Say which sizes a graph serves."""
    if not guard.dynamic:
        return f"the example's sizes alone: {graph.reason or 'they differ'}"
    ones, only = ", ".join(guard.ones()), guard.served()
    where = (f" on {only}" if only else "") + guard.limits()
    return f"other sizes too{where}" + (f", but for those of 1 on {ones}, which torch takes as fixed" if ones else "")


def _faster(times: Mapping[str, float], served: str, origin: str, *, asked: bool = False) -> tuple[str, str]:
    """Return the engine to run and why; `served`: which sizes a graph holds for; `origin`: of times of a file."""
    whence = f" ({origin})" if origin else ""
    if asked:
        return "graph", f"asked for by graph='native'; {served}"
    if times["graph"] > TIE * times["layers"]:
        return "layers", f"layer by layer is faster on the example{whence}"
    better = "faster than" if times["graph"] < times["layers"] else "within 5 % of"
    return "graph", f"{better} layer by layer, in fewer calls{whence}; {served}"


def _written(fast: nn.Module, guard: Guard, leaves: Sequence[Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the argument, a mapping, that a model writes its outputs into and answers with, as a tuple, or none.

    And the entries that it may have besides (`features`). SentenceTransformer's modules hand on one dict of features.
    """
    given = guard.inputs.value(leaves)
    answer = by_layers(fast, given)
    written = tuple(name for name, value in given.items() if isinstance(value, dict) and answer is value)
    rest = guard.inputs.value(leaves)
    changed = [name for name, value in rest.items() if tree_flatten(value)[1] != tree_flatten(given[name])[1]]
    if other := [name for name in changed if name not in written]:
        raise _RefusedError(f"the forward changes `{other[0]}`, which it is given, and answers with something else")
    return written, next((saying_nothing(fast, name, guard.inputs.value(leaves)) for name in written), {})


def impossible(fast: nn.Module, given: Mapping[str, Any]) -> str:
    """Return why no engine but the layers can be tried, "" where one can."""
    if names := hooked(fast):
        listed = f"{', '.join(names[:4])}{' and more' if len(names) > 4 else ''}"
        return f"forward hooks on {listed} would not run in a graph"
    empty = [name for name, value in given.items() if any(_is_empty(leaf) for leaf in tree_flatten(value)[0])]
    if empty:
        return f"`{empty[0]}` of the example is empty: nothing can be compared or timed on it"
    if packed := [name for name, value in given.items() if isinstance(value, PackedSequence)]:
        return f"`{packed[0]}` is a packed sequence, whose lengths no graph can follow"
    return ""


def _is_empty(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.numel()


def _cache_in(fast: nn.Module, given: Mapping[str, Any]) -> str:
    """Return what to do where a Hugging Face model answers with a cache, which no graph can hold, "" elsewhere.

    One run of the layers shows it; torch.export traces the whole model, for each kind of sizes, before it says so.
    """
    asked = getattr(getattr(fast, "config", None), "use_cache", False) and given.get("use_cache") is not False
    answer = by_layers(fast, tree_map(lambda leaf: leaf, dict(given))) if asked else None
    if not any(type(leaf).__name__.endswith("Cache") for leaf in tree_leaves(answer)):
        return ""
    names = ", ".join(f'"{name}": {name}' for name in given if name not in ("use_cache", *NAMES))
    example = f'example={{{names}, "use_cache": False}}'
    return (
        "it answers with a cache, which no graph holds: the calls of `generate` get graphs of their own where that can "
        f"be done; for single calls pass {example}: those with use_cache=False are then a graph"
    )


def _probe(runner: WholeModel, graph: Graph, leaves: Sequence[Any]) -> float:
    """Compare graph and layers on the example and on other sizes; narrow the guard where they differ.

    torch captures no size of 1 as free, and a branch of the model on a size is frozen: only running it shows that.

    Returns:
        The relative difference on the example itself; infinite where one of them does not run it.
    """
    found = _difference(runner, leaves)
    if found is None or not found <= runner.agreement.allowed:
        return math.inf if found is None else found
    guard = runner.guard
    for axis in guard.free_axes():
        sizes = {size for index, a in guard.free if a == axis for size in [graph.example[index].size(axis)]}
        for small in (1, max(2, max(sizes, default=0) // 2)):
            shrunk = [
                leaf.narrow(axis, 0, min(small, leaf.size(axis))) if (index, axis) in guard.free else leaf
                for index, leaf in enumerate(graph.example)
            ]
            error = _difference(runner, shrunk)
            if error is not None and not error <= runner.agreement.allowed:
                logger.info("the graph does not hold for a size of %d on axis %d: error %.1e", small, axis, error)
                guard.refuse_ones(axis) if small == 1 else guard.freeze(leaves)
    return found


def _difference(runner: WholeModel, leaves: Sequence[Any]) -> float | None:
    """Return the relative difference of graph and layers, or None where the model itself takes no such sizes."""
    value = runner.guard.inputs.value
    try:
        want = _answers(runner.model, runner.guard, leaves)
    except Exception:  # a model may refuse sizes in any way it likes
        return None
    if runner.guard.leaves(value(leaves)) is None:
        return None
    try:
        found = runner.program(*leaves)
    except Exception:
        return float("inf")
    return runner.agreement.judged(difference(found, want), *_both(runner, leaves))


def _both(runner: WholeModel, leaves: Sequence[Any]) -> tuple[Callable[[], Sequence[Any]], ...]:
    """Return what runs the graph by calls of its modules, and what runs the layers."""
    return lambda: runner.program.python(*leaves), lambda: _answers(runner.model, runner.guard, leaves)


def _case(
    graph: Graph, leaves: Sequence[Any], held: Sequence[str], rules: str, stored: Mapping[str, Any] | None
) -> str:
    """Name what the engines are timed on: the captured graph, the example's sizes, what the model holds, the rules."""
    calls = json.dumps([stored["nodes"], stored["answer"]]) if stored else graph.module.code
    sizes = [(tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves if isinstance(leaf, Tensor)]
    return f"engines/{hashlib.sha256(repr((calls, held, sizes, rules)).encode()).hexdigest()[:16]}"


def _engines(runner: WholeModel, leaves: Sequence[Any]) -> tuple[dict[str, float], float]:
    """Race the engines on the example."""
    value = runner.guard.inputs.value  # a forward may write into the containers it is given
    calls: dict[str, Callable[[], object]] = {
        "layers": lambda: by_layers(runner.model, value(leaves)),
        "graph": lambda: runner.outputs.value(runner.run(runner.guard.leaves(value(leaves)) or ())),
    }
    return race(calls, repeats=9, seconds=0.5)
