"""compile: the masked model in, a copy whose layers run on the fastest measured kernels out."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from twofour import calls, quantization
from twofour.calls import Example
from twofour.compiler.against_dense import never_slower
from twofour.compiler.agreement import TIPPED, has_halves, tipping
from twofour.compiler.build import build, concluded
from twofour.compiler.choose import DEFAULT_TOKENS, QUICK_TOKENS, Progress
from twofour.compiler.choose_gpu import GPU_TOKENS, require_for_gpu
from twofour.compiler.choose_recurrent import Steps, recurrent_layers, steps_of
from twofour.compiler.compilation import Compilation
from twofour.compiler.computing import Computing, dtype_name
from twofour.compiler.conv import images_of
from twofour.compiler.decoding import with_decoding
from twofour.compiler.embeddings import Tables, heads, kind_of_tables
from twofour.compiler.foreign import watch
from twofour.compiler.graph import NATIVE, require_graph
from twofour.compiler.inductor import fastest_engine
from twofour.compiler.kept import keep_what_runs, tables_once
from twofour.compiler.low_bits import require_steps, run_low_bits
from twofour.compiler.notes import of_the_type, unmeasured, without_example
from twofour.compiler.plan import Plan
from twofour.compiler.ranges import observed
from twofour.compiler.recurrent_kinds import is_recurrent
from twofour.compiler.replaceable import (
    LayerWeight,
    device_of,
    is_linear,
    left_alone,
    replaceable,
    require_memory_mode,
    require_no_autocast,
    require_plain,
    require_tokens,
)
from twofour.compiler.runs import require_runs, unfit
from twofour.compiler.smoothing import Smoothed, looks_for_outliers, smoothed
from twofour.compiler.stages import Stages, stages
from twofour.compiler.terms import Terms
from twofour.errors import CompileError, one_of
from twofour.graph import EXACT
from twofour.kernels.conv import Images
from twofour.kernels.nm_matmul import DYNAMIC
from twofour.layers import mark_compiled
from twofour.measure.distance import distance, is_real
from twofour.measure.effort import EFFORTS, FULL, QUICK, measuring
from twofour.native import waiting
from twofour.packing import encodings
from twofour.patterns.base import is_finite

logger = logging.getLogger("twofour.compiler")

LARGEST_ERRORS = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
"""Relative error of a whole model beyond which something is broken: one product stays near 1e-6 in float32 and 4e-3 in
bfloat16. What int8 and int4 lose depends on the model; the plan states it."""


def compile(
    model: nn.Module,
    example: Any = None,
    dtype: str | torch.dtype = "float32",
    *,
    memory: str = "fast",
    tokens: Sequence[int] = DEFAULT_TOKENS,
    group: int | None = None,
    symmetric: bool | None = None,
    data: Iterable[Any] | None = None,
    embeddings: str | torch.dtype | None = None,
    smooth: bool | str = False,
    graph: bool | str = "auto",
    rules: str = EXACT,
    effort: str = "full",
    progress: Progress | bool | None = None,
) -> nn.Module:
    """Return a copy of `model` for inference whose layers run on the fastest measured kernels.

    Each Linear is timed with every kernel that can run it, sparse where its weight is 2:4 and dense, at the example's
    token count and at `tokens`; each Conv1d and Conv2d (float32) on the example's images, channels last; each LSTM,
    GRU, RNN and cell on the example's steps. The copy is of the same class, in evaluation mode and without gradients;
    `copy.plan` says what was decided and why. `model` stays as it is.

    Args:
        model: Usually masked (`twofour.prune`); a dense model gets the best dense kernels.
        example: Input for one forward pass: a tensor, a tuple or list of positional or a dict of keyword arguments.
            With it the plan speaks of the model's own token counts, and the outputs are compared.
        dtype: Computing type of the Linear layers: "float32"; "bfloat16"; "int8" (one scale per output channel,
            activations rounded per token); "int4" (weights alone, for few tokens); on a GPU "float16" and "float8" too,
            and "float32" runs dense: no tensor core reads 2:4 in it (docs/gpu.md). Between the layers activations keep
            the model's own type, float32 or bfloat16; a graph of 16 tokens or more hands bfloat16 on, but for float32
            and int4. torch's dtypes of these names are taken too.
        memory: "fast" plans a layout for every range of token counts where it gains at least 5 %, keeps those that the
            example reads, and makes another when a call wants it; where that takes more bytes than dense, the log says
            so first. "small" keeps packed weights alone, in one layout, also where dense would be faster.
        tokens: Token counts to measure besides the example's.
        group: For int4: inputs that share a scale, 32, 64 (default) or 128.
        symmetric: For int4: False adds zero points; default True.
        data: For int8: inputs, or pairs (input, target), from which each layer's input range is taken once. Without
            data every token gets its own range while the model runs.
        embeddings: "bfloat16" or "int8" keeps tables of nn.Embedding so, in int8 with a scale of each row; what they
            answer stays in the model's type. The plan says the bytes, and what it moves. None leaves them as they are.
        smooth: For int8: whether channels that are far wider than others are smoothed before they are rounded
            (SmoothQuant), by scales folded into the normalisation before a layer and into the layer, where it lowers
            the error on the data; the plan says where. True wants data, "auto" does it where there are some. False
            (default) leaves it out: the model's own normalisations answer otherwise after it, so `data` must call it
            in every way that it will be called.
        graph: "auto" captures the whole model on the example, where there is one, and runs it as one rewritten graph
            where that can be done and is faster: linear layers with what follows them, attention and normalisation
            become single calls. The plan accounts for the time per operator; calls the graph does not hold for run
            layer by layer. True does the same and warns where there is no graph, False leaves the layers by themselves.
            "native" measures this package's kernels alone, no library's, and runs the graph whatever the layers' times:
            what `export.to_runtime` writes for libtwofour (docs/runtime.md).
            "inductor" also measures torch.compile around the compiled layers, which needs a C++ compiler and up to a
            minute, and keeps the fastest of the three; `plan.account` has their times.
        rules: Rules of algebra that a graph is rewritten by (docs/rewriting.md): "exact" for those that keep the domain
            of real arithmetic, "close" also for those that only keep what they state, and for convolutions by
            Winograd's algorithm (docs/kernels.md). The plan lists each use with its error bound, and what was left out
            with why.
        effort: How much is measured. "full" times every kernel until the order is sure, at the example's token count
            and at `tokens`. "quick" takes seconds: three short rounds, one of a kernel that is half as slow again as
            the fastest, at the example's token count, 1 and 32. What it leaves out the plan says; it is made up for by
            a later compile with "full", on times that are kept.
        progress: Called with layers done, layers in all and the next layer's name, at last "the whole model". None
            shows a bar on a terminal, elsewhere a line in a quarter of a minute; False shows nothing.

    Raises:
        CompileError: An argument is impossible or means nothing for this dtype, the model is compiled already or is on
            no device with kernels, it does not run on the example, autocast is at work, or the outputs do not agree.
        KernelError: No kernel of that computing type runs here.
        PatternError: A weight holds NaN or infinity.
        QuantizationError: A step of a layer of low bits is zero, NaN or infinite.
    """
    _require(model, memory, tokens, graph, example, rules, effort)
    computing = Computing.of(dtype_name(dtype), device := device_of(model), group=group, symmetric=symmetric)
    if device == "cuda":
        graph = False if graph == "auto" else graph  # planned there
        require_for_gpu(data, graph)
        tokens = GPU_TOKENS if tokens is DEFAULT_TOKENS else tokens
    how = EFFORTS[effort]
    counts = QUICK_TOKENS if how is QUICK and tokens is DEFAULT_TOKENS else tokens
    given, kind = _examined(example, data, computing.dtype), kind_of_tables(embeddings)
    terms = Terms(computing, memory, tuple(counts), rules=rules, native=graph == NATIVE, effort=how)
    with calls.evaluating(model), calls.keeping_buffers(model), torch.no_grad(), measuring(how), stages(progress) as at:
        ready = smoothed(model, data, computing) if looks_for_outliers(smooth, terms, data) else Smoothed(model, data)
        fast, layers, reference = _layer_by_layer(ready, given, terms, kind, at)
        layers = layers if how is FULL else layers.with_note(unmeasured(how, tokens, layers.layers))
        if given is None:
            plan = without_example(layers, graph)
        else:
            at.whole()
            plan = _as_a_whole(fast, layers, ready, given, reference, terms, graph)
    _restore_buffers(fast, model)
    said = of_the_type(model, plan.layers, computing, data=data, smooth=smooth, group=group, symmetric=symmetric)
    plan = tables_once(fast, ready.noted(plan), terms).with_note(*heads(ready.model, fast, plan.layers), *said)
    return with_plan(fast, concluded(plan, terms), terms.computing)


def _layer_by_layer(
    ready: Smoothed, example: Example | None, terms: Terms, kind: str, at: Stages
) -> tuple[nn.Module, Plan, list[Any]]:
    """Return the model with its layers on their fastest kernels, the plan, and the leaves of what the model answers."""
    model, data, computing = ready.model, ready.data, terms.computing
    require_steps(model)
    counts, images, ran, reference = _observe(model, example)
    images = images if computing.device == "cpu" else {}
    weights = _ranged(model, dict(replaceable(model, computing, images)), data)
    recurrent = dict(recurrent_layers(model, computing, ran))
    left = left_alone(model, computing, {**weights, **recurrent})
    tables = Tables.of(model, kind, weights)
    others = {"recurrent": recurrent, "tables": tables.made, "left": left}
    fast, layers = build(model, weights, counts, terms, **others, progress=at.layer)
    layers = run_low_bits(fast, layers, counts, terms, images)
    require_runs(fast, example)
    if kind:
        told = tables.said + _moved(tables, fast, model, example, computing)
        layers = replace(layers, embeddings=kind).with_note(told)
    terms.share_tables(model, fast, weights)
    return fast, layers, reference


def _moved(tables: Tables, fast: nn.Module, model: nn.Module, example: Example | None, computing: Computing) -> str:
    if example is None:
        return ""
    return tables.moved(fast, model, lambda: calls.output_leaves(example.run(fast)), computing.dtype)


def _as_a_whole(
    fast: nn.Module,
    layers: Plan,
    ready: Smoothed,
    example: Example,
    reference: Sequence[Any],
    terms: Terms,
    graph: bool | str,
) -> Plan:
    """Give the model its fastest engine on the example, compare it with the one given, and look at decoding."""
    model = ready.model
    plan = fastest_engine(fast, layers, example, terms, graph, model) if graph else layers
    ours = terms.memory == "fast" and terms.computing.device == "cpu" and not terms.native
    if ours and not _empty(reference):
        plan = replace(plan, rounded=bool(quantization.of(model)))
        plan = never_slower(fast, plan, replace(layers, rounded=plan.rounded), model, example.run)
        ready.take_back(fast)
    plan = _verified(fast, plan, layers, example, reference, model)
    return with_decoding(fast, plan, example, terms) if graph and not terms.native else plan


def with_plan(fast: nn.Module, plan: Plan, computing: Computing) -> nn.Module:
    """Note on a model what it was compiled with, and put the plan on it unless its class has something of that name.

    Layouts that the example does not read are given up first: a call that wants one makes it.
    """
    if plan.won:
        logger.info("%s", plan.won)
    plan = keep_what_runs(fast, plan) if computing.device == "cpu" else plan
    mark_compiled(fast, Compilation.of(fast, plan, computing))
    watch(fast)
    if hasattr(fast, "plan"):
        logger.warning("the model has an attribute `plan` of its own; the plan is logged instead:\n%s", plan)
    else:
        object.__setattr__(fast, "plan", plan)
    return fast


def _require(
    model: nn.Module, memory: str, tokens: Sequence[int], graph: bool | str, example: Any, rules: str, effort: str
) -> None:
    if not isinstance(model, nn.Module):
        raise _no_model(model)
    require_memory_mode(memory)
    require_tokens(tokens)
    require_plain(model)
    require_no_autocast(model)
    require_graph(graph, example, rules)
    one_of("the effort is not known", effort, tuple(EFFORTS), CompileError)
    waiting.warn()


def _examined(example: Any, data: Iterable[Any] | None, dtype: str) -> Example | None:
    """Return what the model is run on, if anything; refuse data that the computing type has no use for."""
    if data is not None and not encodings.get(dtype).rounds_inputs:
        raise CompileError(
            "data are for int8 alone",
            got=f'dtype="{dtype}" with data',
            wanted='dtype="int8"',
            remedy='leave `data` out, or pass dtype="int8"',
        )
    return None if example is None else Example.of(example)


def _ranged(model: nn.Module, weights: dict[str, LayerWeight], data: Iterable[Any] | None) -> dict[str, LayerWeight]:
    """Return weights with the ranges of their inputs and answers on data, where there are data."""
    if data is None:
        return weights
    ranges, answers = observed(model, weights, data)
    return {
        name: replace(w, quantization=ranges.get(name, DYNAMIC), answers=answers.get(name))
        for name, w in weights.items()
    }


def _no_model(given: object) -> CompileError:
    remedy = "pass the model itself: twofour.compile(model, example)"
    if isinstance(given, Mapping):
        remedy = "load the state dict into its model first: model.load_state_dict(state)"
    elif callable(given):
        remedy = "put the function into the forward of an nn.Module"
    return CompileError(
        "there is no model to compile", got=f"a {type(given).__name__}", wanted="an nn.Module", remedy=remedy
    )


def _observe(
    model: nn.Module, example: Example | None
) -> tuple[dict[str, int], dict[str, Images], dict[str, Steps], list[Any]]:
    """Run the example once; return tokens, images and steps that layers saw, by their names, the output's leaves."""
    counts: dict[str, int] = {}
    images: dict[str, Images] = {}
    steps: dict[str, Steps] = {}
    if example is None:
        return counts, images, steps, []
    running: list[str] = []

    def before(name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running.append(name)
        x = calls.first_input(args, kwargs)
        if is_recurrent(layer):
            steps[name] = max(steps.get(name, (0, 0)), steps_of(x, layer) or (0, 0), key=math.prod)
            return
        if not isinstance(x, Tensor) or x.is_nested or not x.numel():
            return
        if is_linear(layer):
            counts[name] = max(counts.get(name, 0), x.numel() // x.shape[-1])
        else:
            images[name] = max(images.get(name, (0, 0, 0)), images_of(x, layer), key=math.prod)

    layers = [
        (name, module)
        for name, module in model.named_modules()
        if is_linear(module) or is_recurrent(module) or isinstance(module, nn.Conv1d | nn.Conv2d)
    ]
    try:
        # torch's fused transformer layers write zeros at padded places, their operators values: those are compared
        with calls.observing(layers, before, lambda *_: running.clear()), calls.without_fast_paths():
            output = example.run(model)
    except Exception as error:
        raise unfit(model, example, error, running[-1] if running else None) from error
    return counts, images, {name: found for name, found in steps.items() if all(found)}, calls.output_leaves(output)


def _restore_buffers(fast: nn.Module, model: nn.Module) -> None:
    """Give the buffers of a compiled model, which has run by now, what those of the model hold."""
    held = dict(model.named_buffers())
    for name, buffer in fast.named_buffers():
        values = held.get(name)
        if values is not None and not values.is_meta and (values.shape, values.dtype) == (buffer.shape, buffer.dtype):
            calls.write_back(buffer, values)


def _verified(
    fast: nn.Module, plan: Plan, layers: Plan, example: Example, reference: Sequence[Any], model: nn.Module
) -> Plan:
    """Return the plan with its error on the example; an engine that errs more than the layers may gives way to them."""
    with calls.without_fast_paths():
        found = calls.output_leaves(example.run(fast))
    if why := _incomparable(reference):
        logger.warning("the outputs were not compared: %s", why)
        return plan
    if plan.dtype != "float32":  # a coarser type may tip what a model decides
        pairs = [pair for pair in zip(found, reference, strict=True) if isinstance(pair[1], Tensor)]
        if any(not is_real(want) and not torch.equal(got, want) for got, want in pairs):
            logger.warning("outputs that are whole numbers differ from the model's in %s", plan.dtype)
        found, reference = ([pair[side] for pair in pairs if is_real(pair[1])] for side in (0, 1))
    error = distance(found, reference)
    largest = _largest_error(plan, example, fast, model, error)
    if error > largest and plan.account is not None and fast.__dict__.pop("forward", None) is not None:
        reason = f"the {plan.account.engine} has a relative error of {error:.1e} on the example, please report it"
        logger.warning("each layer is compiled by itself: %s", reason)
        plan = replace(layers, account=replace(plan.account, engine="layers", reason=reason))
        return _verified(fast, plan, layers, example, reference, model)
    if error > largest:
        finite = all(is_finite(leaf) for leaf in example.leaves if is_real(leaf))
        with calls.without_fast_paths():
            again = distance(calls.output_leaves(example.run(model)), reference) if finite else 0.0
        if again > largest:
            logger.warning("the outputs were not compared: the model answers one example differently from call to call")
            return plan
        got = f"a relative error of {error:.2e} on the example"
        remedy = "please report it; compile without an example does not compare"
        if not finite:
            got = "other outputs on an example that holds NaN or infinity"
            remedy = "pass a finite example: the kernels skip pruned positions, and what is not finite at them"
        raise CompileError(
            "the compiled model does not compute what the model does",
            got=got,
            wanted=f"at most {largest:g} in {plan.dtype}",
            remedy=remedy,
        )
    return replace(plan, error=error)


def _largest_error(plan: Plan, example: Example, fast: nn.Module, model: nn.Module, error: float) -> float:
    """Return the error beyond which something is broken; what float noise costs by codes that tip is on top."""
    halves = plan.dtype == "float32" and has_halves((*example.leaves, *fast.parameters()))
    types = "bfloat16" if halves else plan.dtype, plan.embeddings or plan.dtype
    largest = max(LARGEST_ERRORS.get(one, sys.float_info.max) for one in types)
    if error <= largest:
        return largest
    with calls.without_fast_paths():
        return largest + TIPPED * tipping(model, lambda: calls.output_leaves(example.run(model)))


def _empty(reference: Sequence[Any]) -> bool:
    """Tell whether a model's outputs are tensors without values: neither they nor the call's time say anything."""
    tensors = [leaf for leaf in reference if isinstance(leaf, Tensor)]
    return bool(tensors) and not any(leaf.numel() for leaf in tensors)


def _incomparable(reference: Sequence[Any]) -> str:
    """Return why a model's outputs tell nothing about a copy of it, "" where they do."""
    tensors = [leaf for leaf in reference if isinstance(leaf, Tensor)]
    if not tensors:
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in reference})) or "nothing"
        return f"the model answers with {kinds}, not with tensors"
    if _empty(reference):
        return f"the example is empty, and so is the answer, {tuple(tensors[0].shape)}"
    if not any(not is_real(leaf) or torch.isfinite(leaf).any() for leaf in tensors):
        return "all of them are NaN or infinite"
    return ""
