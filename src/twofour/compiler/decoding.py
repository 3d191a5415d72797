"""A Hugging Face decoder's calls with a cache as two graphs: a prompt into an empty one, and one token behind its keys.

`generate` makes these calls. No graph can hold a cache object; here the keys and values are inputs, those of the new
token outputs, and the cache is written in place around the graph.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from twofour.calls import Example
from twofour.capture import TRACING, Guard, arguments, capture, without_torchs_log
from twofour.compiler.agreement import agreement
from twofour.compiler.cache_calls import Call, Prompt, RefusedError, Step, are_positions, positions_at
from twofour.compiler.caches import ROOM, Buffers, Pair, asks_for_gradient, cache_of, initialize, is_empty, is_served
from twofour.compiler.graph import ENGINES, TIE, kept_layers
from twofour.compiler.graph_rewrites import rewrite_graph
from twofour.compiler.plan import Plan
from twofour.compiler.terms import Terms
from twofour.compiler.timed import held_by_model, held_by_program
from twofour.compiler.whole_model import WholeModel, layers_alone, own_signature
from twofour.errors import KernelError, cut
from twofour.graph import JOIN_QKV, Executor, Program
from twofour.graph.base import FailedRuleError
from twofour.graph.executor.recorder import tensors_in
from twofour.measure.chooser import race
from twofour.measure.distance import distance

logger = logging.getLogger("twofour.compiler")

TAKEN = ("input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "return_dict", "logits_to_keep")
"""Arguments of a call that the graphs serve; others must be None or False."""

LONGEST = 256
"""Tokens of a prompt that is made up."""


def decodes(model: nn.Module) -> bool:
    """Tell whether `generate` of a model calls it with a cache, and with all that a graph of such a call is given."""
    config: Any = getattr(model, "config", None)
    generates = getattr(model, "can_generate", None)
    if config is None or not callable(generates) or not generates() or not getattr(config, "use_cache", True):
        return False
    named = inspect.signature(type(model).forward).parameters
    takes = {"input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache"} <= named.keys()
    return takes and not getattr(config, "is_encoder_decoder", False)


def prompt_like(model: nn.Module, plan: Plan) -> Example | None:
    """Return a prompt of random tokens, as many as the layers of a decoder saw in its example; None of other models."""
    words = getattr(getattr(model, "config", None), "vocab_size", None)
    count = max(plan.counts.values(), default=0)
    if not decodes(model) or not isinstance(words, int) or count < 2:
        return None
    draw = torch.Generator().manual_seed(0)
    return Example((), {"input_ids": torch.randint(words, (1, min(count, LONGEST)), generator=draw, device="cpu")})


def with_decoding(fast: nn.Module, plan: Plan, example: Example, terms: Terms) -> Plan:
    """Let a decoder's calls with a cache run as graphs, where these are right and faster; returns the plan with why.

    Args:
        fast: The model with compiled layers; its instance may get a `forward`, around the one it has.
        plan: What was decided.
        example: A prompt.
        terms: What held for every layer.
    """
    ids = arguments(fast, example.args, example.kwargs).get("input_ids") if decodes(fast) else None
    if not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.numel() or ids.shape[1] < 2:
        return plan
    try:
        with TRACING, _own_forward(fast), torch.no_grad():
            decoding, said = _chosen(fast, plan, ids, terms)
    except RefusedError as error:
        decoding, said = None, f"decoding runs layer by layer: {error}"
    except MemoryError:
        raise
    except Exception as error:  # a rewrite that fails on a model never seen must not cost the layers
        decoding, said = None, f"decoding runs layer by layer: {_told(error)}"
        logger.debug("the graph of a step failed", exc_info=error)
    if decoding is not None and (added := bytes_beside(fast, decoding)):
        said += f"; its graphs keep {added / 1e6:.2f} MB of weights besides those above"
    logger.log(logging.INFO if decoding is not None else logging.WARNING, "%s", said)
    if decoding is not None:
        decoding.inner = fast.__dict__.get("forward")
        object.__setattr__(fast, "forward", decoding)
    return replace(plan, notes=(*plan.notes, said))


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


def _chosen(fast: nn.Module, plan: Plan, ids: Tensor, terms: Terms) -> tuple[Decoding | None, str]:
    """Capture and time both graphs; return the forward with those that are used, if any, and what the plan says."""
    if (how := getattr(fast.config, "_attn_implementation", "sdpa")) != "sdpa":
        raise RefusedError(f'its attention is "{how}", which adds masks; load it with attn_implementation="sdpa"')
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
        without, given = {JOIN_QKV.name: "its weights would be kept once more"}, prompt.example(ids)
        first = _runner(fast, plan, prompt.captured, given, terms, without)
        for rows in (ids, torch.cat([ids, ids])[:, 1:]):
            _agree(first, plan, prompt.example(rows), partial(prompt.leaves, rows), "a prompt")
        layers, graph = partial(prompt.layers, ids), partial(first.program, *tree_leaves(given))
        times["prompt"] = _raced(first, given, terms, layers, graph)
        if times["prompt"]["graph"] <= TIE * times["prompt"]["layers"]:
            decoding.prompt, decoding.kept = first, prompt.kept
    except MemoryError:
        raise
    except Exception as error:  # a step's graph is worth having without it
        left = f"; a prompt runs layer by layer: {_told(error)}"
    decoding.__dict__.pop("_timing", None)
    parts = [
        f"a {name} {ms['graph']:.3f} ms as a graph, {ms['layers']:.3f} ms layer by layer" for name, ms in times.items()
    ]
    said = f"decoding ({len(ids)} x {ids.shape[1]} tokens in the cache): {'; '.join(parts)}{left}"
    if times["step"]["graph"] > TIE * times["step"]["layers"]:
        return None, f"{said}; the layers are faster"
    return decoding, said


def bytes_beside(fast: nn.Module, decoding: Decoding) -> int:
    """Return the bytes of weights that the graphs of decoding hold, and the model without them does not."""
    known = {_memory(tensor) for tensor in tensors_in(fast)}
    programs = [one.program.python.names for one in (decoding.step, decoding.prompt) if one is not None]
    held = {_memory(tensor): tensor for tensor in tensors_in(programs)}
    return sum(one.numel() * one.element_size() for memory, one in held.items() if memory not in known)


def _memory(tensor: Tensor) -> int:
    """Return what tensors of one memory share; one in a layout of its library has no address."""
    return id(tensor) if tensor.layout is not torch.strided else -tensor.untyped_storage().data_ptr()


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

    error = distance(graph(), layers())
    if not runner.agreement.judged(error, partial(graph, runner.program.python), layers) <= runner.agreement.allowed:
        raise RefusedError(f"the graph of {what} differs from the layers by {error:.1e}")
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


def plain(tensor: Tensor) -> Tensor:
    """Return numbers of one token a sequence with the strides of a new tensor: a run is known by them too."""
    return tensor if tensor.stride() == (1, 1) else tensor.clone(memory_format=torch.contiguous_format)


_numbers = count()


class Decoding:
    """The forward of a decoder whose calls with a cache run as graphs; other calls run as they did.

    Args:
        model: The model with compiled layers.
        kind: Class of its answers.
        layers: Layers of its cache.
        step: The graph of one token.

    Attributes:
        inner: The forward for other calls, None for that of the model's class.
        prompt: The graph of a prompt, None where the layers are as fast.
        kept: `logits_to_keep` of the calls that it holds for.
        number: Its own among those of this process, copies too: a cache may meet several.
    """

    def __init__(self, model: nn.Module, kind: Any, layers: int, step: WholeModel) -> None:
        self.model, self.kind, self.layers, self.step = model, kind, layers, step
        self.inner: Callable[..., Any] | None = None
        self.prompt: WholeModel | None = None
        self.kept: int | None = None
        self._said: set[str] = set()
        self.number = next(_numbers)
        self.__signature__ = own_signature(model)

    @property
    def __code__(self) -> CodeType:
        """Code of the model's own forward, which torch.export names its frames by."""
        return inspect.unwrap(type(self.model).forward).__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's own forward returns."""
        cache = kwargs.get("past_key_values")
        if cache is not None and not args and not layers_alone(self.model):
            try:
                answer = self._served(cache, kwargs)
            except KernelError as error:  # the layers raise it with their names, or serve the call
                answer = self._say(f"that a kernel of the graph refuses ({error.what})")
            if answer is not None:
                return answer
            return type(self.model).forward(self.model, **kwargs)
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.model).forward(self.model, *args, **kwargs)

    def _served(self, cache: Any, given: Call) -> Any:
        """Return the answer to a call that a graph holds for; else None, and why is said once."""
        ids, mask = given.get("input_ids"), given.get("attention_mask")
        positions, keep = given.get("position_ids"), given.get("logits_to_keep")
        if not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.numel():
            return self._say("without token ids")
        unlike = (name for name, value in given.items() if value is not None and value is not False)
        if other := [name for name in unlike if name not in TAKEN]:
            return self._say(f"with `{other[0]}`")
        if given.get("use_cache") is False or given.get("return_dict") is False:
            return self._say("that asks for an answer without a cache")
        if keep is not None and type(keep) is not int:
            return self._say("with `logits_to_keep` that is no number")
        if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2 or len(mask) != len(ids)):
            return self._say("with an attention mask that is not (batch, keys)")
        if positions is not None and not are_positions(positions, ids):
            return self._say("with `position_ids` that are not (batch, tokens)")
        if mask is not None and positions is None and not bool(mask.all()):  # some models count from the mask then
            return self._say("with hidden tokens and no `position_ids`")
        if not is_served(cache, self.layers):
            if not is_empty(cache):
                return self._say(f"with a {type(cache).__name__} that is not of {self.layers} layers that grow")
            return None
        if why := self.step.own():
            return self._say(why)
        if torch.is_grad_enabled() and asks_for_gradient(
            cache
        ):  # no graph has one; what is copied into buffers loses it
            return self._say("with keys or values that a gradient is asked for")
        if not cache.layers[0].is_initialized or not cache.layers[0].keys.numel():
            return self._begun(cache, ids, mask, positions, keep)
        if ids.shape[1] != 1 or keep not in (None, 0, 1):
            return self._say("of several tokens behind a cache")
        return self._stepped(cache, ids, mask, positions)

    def _stepped(self, cache: Any, ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> Any:
        """Return the answer to one token behind a cache, which has its keys and values then; else None."""
        length = Buffers.length_of(cache, len(ids))
        if length is None:
            return self._say("with a cache whose layers or sequences are not alike")
        if mask is not None and mask.shape[1] != length + 1:
            return self._say("with an attention mask of another length than the cache and the token")
        buffers = Buffers.of(cache)
        buffers.see(mask)
        positions = positions_at(length, len(ids)) if positions is None else positions.expand(len(ids), 1)
        ids, positions = plain(ids), plain(positions)
        leaves = [ids, positions, buffers.mask, *buffers.leaves]
        kinds = self.number, ids.dtype, positions.dtype
        if buffers.checked != kinds and self.step.guard.leaves(self.step.guard.inputs.value(leaves)) is None:
            return self._say("with a cache whose sizes the graph does not hold for")
        buffers.checked = kinds
        fields, added = self.step.outputs.value(self.step.program(*leaves))
        buffers.append([tensor for pair in added for tensor in pair], cache)
        return self.kind(**fields, past_key_values=cache)

    def _begun(self, cache: Any, ids: Tensor, mask: Tensor | None, positions: Tensor | None, keep: int | None) -> Any:
        """Return the answer to a prompt with an empty cache, which has its keys and values then; else None."""
        if self.prompt is None:  # the plan says why
            return None
        if mask is not None and (mask.shape != ids.shape or not bool(mask.all())):
            return self._say("of a prompt with hidden tokens")
        if self.kept is not None and (keep or 0) != self.kept:
            return self._say(f"of a prompt without logits_to_keep={self.kept}")
        if positions is None:
            positions = torch.arange(ids.shape[1], device="cpu")
        taken = {"input_ids": ids, "position_ids": positions.expand(len(ids), -1).contiguous()}
        if (leaves := self.prompt.guard.leaves(taken)) is None:
            return self._say("of a prompt whose sizes the graph does not hold for")
        fields, past = self.prompt.outputs.value(self.prompt.program(*leaves))
        for layer, pair in zip(cache.layers, past, strict=True):
            initialize(layer, *pair)
        Buffers(past).hand(cache)
        return self.kind(**fields, past_key_values=cache)

    def timed(self, ids: Tensor, past: Sequence[Pair]) -> Any:
        """Return the answer of one step behind `past`, in buffers that are kept from call to call."""
        if "_timing" not in self.__dict__:
            cache = cache_of(past)
            self.__dict__["_timing"] = cache, Buffers.of(cache), past[0][0].shape[2]
        cache, buffers, length = self.__dict__["_timing"]
        buffers.length, buffers.mask[..., length] = length, False
        buffers.hand(cache)
        return self._stepped(cache, ids, None, None)

    def _say(self, why: str) -> None:
        """Log, once for each reason, why a call with a cache runs layer by layer."""
        if why not in self._said:
            self._said.add(why)
            logger.warning("a call %s runs layer by layer (said once)", why)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "__signature__": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.number = next(_numbers)
        self.__signature__ = own_signature(self.model)
