"""A Hugging Face decoder's calls with a cache as two graphs: a prompt into an empty one, and one token behind its keys.

`generate` makes these calls. No graph can hold a cache object; here the keys and values are inputs, those of the new
token outputs, and the cache is written in place around the graph.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from twofour.calls import Example
from twofour.capture import TRACING, Guard, arguments, capture, without_torchs_log
from twofour.compiler.agreement import agreement, amount, difference
from twofour.compiler.behind import Behind, refused
from twofour.compiler.cache_calls import Call, Prompt, RefusedError, Step, stacked
from twofour.compiler.cross_behind import CrossBehind, refused_crossed
from twofour.compiler.cross_calls import CrossStep
from twofour.compiler.cross_decoder import CrossDecoding
from twofour.compiler.decoder import Decoding
from twofour.compiler.graph import ENGINES, TIE, kept_layers
from twofour.compiler.graph_rewrites import rewrite_graph
from twofour.compiler.plan import Plan
from twofour.compiler.terms import Terms
from twofour.compiler.timed import held_by_model, held_by_program
from twofour.compiler.whole_model import WholeModel
from twofour.errors import cut
from twofour.generation import LEFT, SERVED, Generation, left_out
from twofour.generation.caches import ROOM
from twofour.generation.names import argument_of
from twofour.graph import JOIN_QKV, Executor, Program
from twofour.graph.base import FailedRuleError, aten
from twofour.graph.executor.recorder import tensors_in
from twofour.measure.chooser import race

logger = logging.getLogger("twofour.compiler")

AnyDecoding = TypeVar("AnyDecoding", bound=Decoding)

LONGEST = 256
"""Tokens of a prompt that is made up."""

TAKEN = ("input_ids", "attention_mask", "position_ids", "use_cache")
TAKEN_CROSSED = ("decoder_input_ids", "decoder_attention_mask", "encoder_outputs", "use_cache")
"""What graphs of calls with a cache are given besides, of decoders and of encoder-decoders."""


def _generates(model: Any) -> bool:
    """Tell whether a model has a `generate` that uses a cache."""
    config, generates = getattr(model, "config", None), getattr(model, "can_generate", None)
    return config is not None and callable(generates) and bool(generates()) and getattr(config, "use_cache", True)


def _crosses(model: Any) -> bool:
    """Tell whether a model that generates has a cache of its encoder's keys too."""
    return getattr(model.config, "is_encoder_decoder", False)


def _lacking(model: nn.Module) -> list[str]:
    """Return what a graph of a call is given and the model's forward does not take."""
    named = inspect.signature(type(model).forward).parameters
    return [
        f"`{name}`"
        for name in (*(TAKEN_CROSSED if _crosses(model) else TAKEN), argument_of(model))
        if name not in named
    ]


def prompt_like(model: nn.Module, plan: Plan) -> Example | None:
    """Return a prompt of random tokens, as many as the layers of a decoder saw in its example; None of other models."""
    words = getattr(getattr(model, "config", None), "vocab_size", None)
    count = max(plan.counts.values(), default=0)
    if not _generates(model) or _crosses(model) or _lacking(model) or not isinstance(words, int) or count < 2:
        return None
    draw = torch.Generator().manual_seed(0)
    return Example((), {"input_ids": torch.randint(words, (1, min(count, LONGEST)), generator=draw, device="cpu")})


def without_decoding(fast: nn.Module, plan: Plan) -> Plan:
    """Return the plan of a model that was loaded without example or graph, with what its decoding lacks."""
    if not _generates(fast):
        return plan
    try:
        _require_graphs(fast)
        given = "load(..., example=...)" + (" with `decoder_input_ids`" if _crosses(fast) else "")
        said = f"the file holds none of its graphs; {given} captures them"
    except RefusedError as error:
        said = str(error)
    return plan.with_note(f"decoding runs layer by layer: {said}")


def with_decoding(fast: nn.Module, plan: Plan, example: Example, terms: Terms) -> Plan:
    """Let a decoder's calls with a cache run as graphs, where these are right and faster; returns the plan with why.

    Args:
        fast: The model with compiled layers; its instance may get a `forward`, around the one it has.
        plan: What was decided.
        example: A prompt.
        terms: What held for every layer.
    """
    if not _generates(fast):
        return plan
    given = arguments(fast, example.args, example.kwargs)
    try:
        with TRACING, _own_forward(fast), torch.no_grad():
            _require_graphs(fast)
            chosen = _chosen_crossed if _crosses(fast) else _chosen
            decoding, said = chosen(fast, plan, given, terms)
    except RefusedError as error:
        decoding, said = None, f"decoding runs layer by layer: {error}"
    except MemoryError:
        raise
    except Exception as error:  # a rewrite that fails on a model never seen must not cost the layers
        decoding, said = None, f"decoding runs layer by layer: {_told(error)}"
        logger.debug("the graph of a step failed", exc_info=error)
    told = [said]
    if decoding is not None:
        told.append(_taken(fast, decoding))
    for one in told:
        logger.log(logging.INFO if decoding is not None else logging.WARNING, "%s", one)
    return replace(plan, notes=(*plan.notes, *told))


def _require_graphs(model: Any) -> None:
    """Raise RefusedError where a model cannot be called as a graph of a call with a cache is."""
    if lacking := _lacking(model):
        raise RefusedError(f"its forward takes no {' and no '.join(lacking)}")
    if (how := getattr(model.config, "_attn_implementation", "sdpa")) != "sdpa":
        raise RefusedError(f'its attention is "{how}", which adds masks; load it with attn_implementation="sdpa"')


def _taken(fast: nn.Module, decoding: Decoding) -> str:
    """Let decoding be the forward of a model, and `generate` go over it; return what the plan says of that."""
    left = left_out(fast)
    decoding.inner = fast.__dict__.get("forward")
    object.__setattr__(fast, "forward", decoding)
    if not left:
        how = (refused_crossed, CrossBehind) if _crosses(fast) else (refused, Behind)
        object.__setattr__(fast, "generate", Generation(fast, *how))
    return LEFT % left if left else SERVED


def _told(error: Exception) -> str:
    """Return a refusal, or what must not happen with the word to report it."""
    if isinstance(error, RefusedError):
        return str(error)
    return f"{type(error).__name__}: {cut(' '.join(str(error).split()), 200)}, please report it"


def _fitting(model: Any, ids: Tensor) -> tuple[Tensor, int]:
    """Return the beginning of a prompt, and how many tokens a model takes: steps behind twice as many must fit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    most = limit if isinstance(limit, int) and limit > 4 else 1 << 30
    return ids[:, : (most - 1) // 2], most


@contextmanager
def _own_forward(model: nn.Module) -> Iterator[None]:
    """Let the forward of the model's class run inside, whatever stands in its place."""
    before = model.__dict__.pop("forward", None)
    try:
        yield
    finally:
        if before is not None:
            object.__setattr__(model, "forward", before)


def _chosen(fast: nn.Module, plan: Plan, given: Call, terms: Terms) -> tuple[Decoding | None, str]:
    """Capture and time both graphs; return the forward with those that are used, if any, and what the plan says."""
    ids = given.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.numel() or ids.shape[1] < 2:
        raise RefusedError("the example is no prompt, `input_ids` (batch, tokens) of two tokens or more")
    ids, most = _fitting(fast, ids)
    prompt = Prompt(fast)
    past = prompt.layers(ids)[1]
    step = Step(fast, prompt.kind, len(past))
    given = step.example(ids, past)
    runner = _runner(fast, plan, step.captured, given, terms, {})
    larger = [(_larger(k, most), _larger(v, most)) for k, v in past]
    for rows, keys in ((ids, past), (torch.cat([ids, ids]), larger)):
        _agree(runner, plan, step.example(rows, keys), partial(step.leaves, rows, keys), "a step")
    decoding = Decoding(fast, prompt.kind, len(past), runner)
    layers, graph = partial(step.layers, ids, past), partial(decoding.timed, ids[:, -1:], past)
    times = {"step": _raced(runner, given, terms, layers, graph)}
    left = ""
    try:
        first, given, left = _prompt_graph(fast, plan, prompt, ids, terms)
        layers, graph = partial(prompt.layers, ids), partial(first.program, *tree_leaves(given))
        times["prompt"] = _raced(first, given, terms, layers, graph)
        if times["prompt"]["graph"] <= TIE * times["prompt"]["layers"]:  # else the layers run it: `_faster` says so
            decoding.prompt, decoding.kept, decoding.masked = first, prompt.kept, prompt.masked
    except MemoryError:
        raise
    except Exception as error:  # a step's graph is worth having without it
        left = f"; a prompt runs layer by layer: {_told(error)}"
    return _faster(decoding, times, f"{len(ids)} x {ids.shape[1]} tokens in the cache", left)


def _chosen_crossed(fast: Any, plan: Plan, given: Call, terms: Terms) -> tuple[CrossDecoding | None, str]:
    """Do as `_chosen` for an encoder-decoder, whose first call of each text runs layer by layer."""
    step = CrossStep(fast)
    known = step.begin(given)
    hidden, seen, past, cross = known
    words = fast.config.get_text_config(decoder=True).vocab_size
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(words, (len(hidden), 1), generator=draw, device="cpu")
    example = step.example(ids, known)
    runner = _runner(fast, plan, step.captured, example, terms, {})
    limits = (getattr(fast.config, name, None) for name in ("max_target_positions", "max_position_embeddings"))
    most = next((limit for limit in limits if isinstance(limit, int) and limit > 4), 1 << 30)
    hidden, seen = torch.cat([hidden, hidden]), torch.cat([seen, seen])
    seen[-1, : seen.shape[1] // 2] = 0
    own = [(_larger(k, most), _larger(v, most)) for k, v in past]
    other = [(torch.cat([k, k]), torch.cat([v, v])) for k, v in cross]
    for rows, behind in ((ids, known), (torch.cat([ids, ids]), (hidden, seen, own, other))):
        _agree(runner, plan, step.example(rows, behind), partial(step.leaves, rows, behind), "a step")
    decoding = CrossDecoding(step, runner, not step.masked and step.overlooks(ids, known))
    layers, graph = partial(step.layers, ids, known), partial(decoding.timed_behind, ids, known)
    times = {"step": _raced(runner, example, terms, layers, graph)}
    what = f"{len(ids)} x {past[0][0].shape[2]} tokens in the cache, {cross[0][0].shape[2]} of the encoder"
    return _faster(decoding, times, what, "; the first call of each text runs layer by layer")


def _faster(
    decoding: AnyDecoding, times: Mapping[str, Mapping[str, float]], what: str, left: str
) -> tuple[AnyDecoding | None, str]:
    """Return decoding where its step is no slower than the layers', and what the plan says."""
    decoding.__dict__.pop("_timing", None)
    taken = {name: ms["graph"] <= TIE * ms["layers"] for name, ms in times.items()}
    parts = [
        f"a {name} {ms['graph']:.3f} ms as a graph, {ms['layers']:.3f} ms layer by layer"
        f"{'' if taken[name] else ', which it runs'}"
        for name, ms in times.items()
    ]
    said = f"decoding ({what}): {'; '.join(parts)}{left}"
    if not taken["step"]:
        return None, f"{said}; the layers are faster"
    return decoding, said


def _prompt_graph(
    fast: nn.Module, plan: Plan, prompt: Prompt, ids: Tensor, terms: Terms
) -> tuple[WholeModel, Call, str]:
    """Return the graph of a prompt, which may hide tokens where that works, its example, and what is said of it."""
    without = {JOIN_QKV.name: "its weights would be kept once more"}
    two, left = torch.cat([ids, ids])[:, 1:], ""
    seen = torch.ones(two.shape, dtype=torch.bool, device="cpu")
    seen[1, : two.shape[1] // 2] = False  # padding stands in front
    while True:
        try:
            given = prompt.example(ids)
            first = _runner(fast, plan, prompt.captured, given, terms, without)
            for rows, hidden in ((ids, None), (two, seen if prompt.masked else None)):
                _agree(first, plan, prompt.example(rows, hidden), partial(prompt.leaves, rows, hidden), "a prompt")
            return first, given, left
        except MemoryError:
            raise
        except Exception as error:  # one that hides none is worth having alone
            if not prompt.masked:
                raise
            prompt.masked, left = False, f"; a prompt with padding runs layer by layer: {_told(error)}"
            logger.debug("the graph of a prompt with padding failed", exc_info=error)


def with_bytes_beside(fast: nn.Module, plan: Plan) -> Plan:
    """Return the plan whose note on decoding says what its graphs keep besides the model's own weights."""
    decoding = fast.__dict__.get("forward")
    if not isinstance(decoding, Decoding):
        return plan
    with _own_forward(fast):
        added = bytes_beside(fast, decoding)
    said = f"; its graphs keep {added / 1e6:.2f} MB of weights besides those above" if added else ""
    return replace(plan, notes=tuple(n + said if n.startswith("decoding (") else n for n in plan.notes))


def bytes_beside(fast: nn.Module, decoding: Decoding) -> int:
    """Return the bytes of weights that the graphs of decoding hold, and the model without them does not."""
    known = {memory_of(tensor) for tensor in tensors_in(fast)}
    programs = [one.program.python.names for one in (decoding.step, decoding.prompt) if one is not None]
    held = {memory_of(tensor): tensor for tensor in tensors_in(programs)}
    return sum(one.numel() * one.element_size() for memory, one in held.items() if memory not in known)


def memory_of(tensor: Tensor) -> int:
    """Return what tensors of one memory share; a library's layout and a packed weight's stand-in have no address."""
    plain = tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter)
    return -tensor.untyped_storage().data_ptr() if plain else id(tensor)


def _larger(tensor: Tensor, most: int) -> Tensor:
    """Return keys or values of twice as many sequences, behind more tokens than a first buffer has room for.

    They and one more are `most` at most.
    """
    length = tensor.shape[2]
    return torch.cat([tensor, tensor]).repeat(1, 1, min(1 + ROOM // length, (most - 1) // length), 1)


def _runner(
    fast: nn.Module, plan: Plan, call: Callable[..., Any], given: Call, terms: Terms, without: Mapping[str, str]
) -> WholeModel:
    """Return the rewritten graph of one kind of call."""
    left_out = dict(without)
    while True:
        object.__setattr__(fast, "forward", call)
        try:
            graph = capture(fast, given, kept_layers(fast))
        finally:
            object.__delattr__(fast, "forward")
        if not graph.dynamic:
            raise RefusedError(f"its graph holds for one number of keys alone: {graph.reason}")
        leaves = tree_leaves(given)
        try:
            with torch.inference_mode(), without_torchs_log():
                rewrite_graph(fast, graph, plan, leaves, terms, left_out)
                for node in graph.module.graph.find_nodes(op="call_function", target=aten.stack.default):
                    node.target = stacked if any(user.op == "output" for user in node.users) else node.target
                return WholeModel(fast, Guard(graph), Executor(Program(graph.module)), graph)
        except FailedRuleError as error:
            if error.rule in left_out:
                raise
            logger.warning("a graph is rewritten without one rule: %s, please report it", error)
            left_out[error.rule] = error.reason


def _agree(runner: WholeModel, plan: Plan, given: Call, layers: Callable[[], list[Any]], what: str) -> float:
    """Compare a graph with the layers.

    Raises:
        RefusedError: They differ.
    """
    leaves = runner.guard.leaves(given)
    if leaves is None:
        raise RefusedError(f"the graph of {what} does not hold for its own example")
    runner.agreement = agreement(runner.model, plan.dtype, leaves, layers)

    def graph(run: Callable[..., Any] = runner.program) -> list[Any]:
        return tree_leaves(runner.outputs.value(run(*leaves)))

    error = difference(graph(), layers())
    if not runner.agreement.judged(error, partial(graph, runner.program.python), layers) <= runner.agreement.allowed:
        raise RefusedError(f"the graph of {what} differs from the layers {amount(error)} on its example")
    return error


def _raced(
    runner: WholeModel, given: Call, terms: Terms, layers: Callable[[], object], graph: Callable[[], object]
) -> dict[str, float]:
    """Return the milliseconds of both engines on one call."""
    sizes = [(tuple(leaf.shape), str(leaf.dtype)) for leaf in tree_leaves(given)]
    program = runner.program.python
    facts = repr((program.text, held_by_model(runner.model), held_by_program(program), sizes))
    digest = hashlib.sha256(facts.encode()).hexdigest()[:16]
    runner.program.prepare(tree_leaves(given))
    case = terms.cache.key(f"decoding/{digest}")
    calls = {ENGINES[0]: layers, ENGINES[1]: graph}
    found = terms.cache.times(case, ENGINES, lambda: race(calls, repeats=9, seconds=0.5))
    return {name: 1e3 * seconds for name, seconds in found.items()}
