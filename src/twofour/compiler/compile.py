"""compile: the masked model in, a copy whose layers run on the fastest measured kernels out."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from twofour import native
from twofour.compiler.cache import Cache
from twofour.compiler.choose import DEFAULT_TOKENS, Choice, Progress, choose, why
from twofour.compiler.layer import CompiledLinear, PreparedWeights
from twofour.compiler.plan import LayerPlan, Plan
from twofour.compiler.replaceable import LayerWeight, left_alone, replaceable, require_cpu
from twofour.errors import CompileError, TwofourError
from twofour.kernels.dense_matmul import PLAIN
from twofour.packing import Packed

logger = logging.getLogger("twofour.compiler")

LARGEST_ERROR = 1e-3
"""Relative error of a whole float32 model beyond which something is broken; one product stays near 1e-6."""


def compile(
    model: nn.Module,
    example: Any = None,
    dtype: str = "float32",
    *,
    memory: str = "fast",
    tokens: Sequence[int] = DEFAULT_TOKENS,
    progress: Progress | None = None,
) -> nn.Module:
    """Return a copy of `model` for inference whose Linear layers run on the fastest measured kernels.

    Each Linear is timed with every kernel that can run it, sparse where its weight is 2:4 and dense, at the example's
    token count and at `tokens`. The copy is of the same class, in evaluation mode and without gradients; `copy.plan`
    says what was decided and why. `model` stays as it is.

    Args:
        model: Usually masked (`twofour.prune`); a dense model gets the best dense kernels.
        example: Input for one forward pass: a tensor, a tuple of positional or a dict of keyword arguments. With it the
            plan speaks of the model's own token counts, and the outputs are compared.
        dtype: Computing type; "float32" ("bfloat16", "int8" and "int4" are planned).
        memory: "fast" keeps the weight in every layout that gains at least 5 % at some token count, which may be more
            bytes than dense; "small" keeps packed weights alone, in one layout, also where dense would be faster.
        tokens: Token counts to measure besides the example's.
        progress: Called with layers done, layers in all and the next layer's name.

    Raises:
        CompileError: An argument is impossible, the model is not on the CPU, or the outputs do not agree.
        PatternError: A weight holds NaN or infinity.
    """
    _require(model, dtype, memory, tokens)
    with _evaluating(model):
        counts, reference = _observe(model, example)
        weights = dict(replaceable(model))
        fast, plan = build(
            model, weights, counts, memory=memory, tokens=tokens, left=left_alone(model), progress=progress
        )
        if example is not None:
            plan = _verified(fast, plan, example, reference)
    return with_plan(fast, plan)


def build(
    model: nn.Module,
    weights: Mapping[str, LayerWeight],
    counts: Mapping[str, int],
    *,
    memory: str,
    tokens: Sequence[int],
    left: Sequence[LayerPlan] = (),
    progress: Progress | None = None,
) -> tuple[nn.Module, Plan]:
    """Copy `model` with the named Linear layers replaced, measuring what each should run on.

    A layer that torch's own product serves best at every token count stays as it is.

    Args:
        model: Gives the structure; the weights of the named layers are not read (they may be on the meta device).
        weights: Layer name to its weight.
        counts: Token counts of an example, by layer.
        memory: "fast" or "small".
        tokens: Token counts to measure besides.
        left: Plan entries of layers that stay as they are.
        progress: See `compile`.
    """
    cache = Cache.for_this_machine()
    footprint = sum(4 * entry.rows * entry.columns for entry in weights.values())
    replacements: dict[str, CompiledLinear] = {}
    plans: dict[str, LayerPlan] = {}
    shared: dict[int, PreparedWeights] = {}
    for done, (name, entry) in enumerate(weights.items()):
        if progress is not None:
            progress(done, len(weights), name)
        count = counts.get(name)
        measured = sorted({*tokens, count} if count else set(tokens))
        try:
            choice = choose(
                entry.source, entry.bias, measured, memory=memory, footprint=footprint, cache=cache, example=count
            )
        except TwofourError as error:
            raise error.for_layer(name) from None
        nbytes = 4 * entry.rows * entry.columns
        if choice.ladder.names == (PLAIN.name,):  # what the layer does already, without a microsecond of ours on top
            plans[name] = _describe(name, entry, choice, count or measured[-1], nbytes, memory)
            continue
        # Tied layers share one prepared weight when their ladders need the same layouts.
        prepared = shared.setdefault(entry.identity, PreparedWeights(choice.layouts))
        if prepared.layouts != choice.ladder.layouts:
            prepared = PreparedWeights(choice.layouts)
        replacements[name] = CompiledLinear(name, entry.columns, entry.rows, choice.ladder, prepared, entry.bias)
        plans[name] = _describe(name, entry, choice, count or measured[-1], prepared.nbytes, memory)
    cache.save()
    layers = _in_order(model, [*plans.values(), *left])
    plan = Plan(layers, "float32", memory, tuple(tokens), native.threads(), native.isa())
    return _copy_with(model, replacements), plan


def _in_order(model: nn.Module, layers: Sequence[LayerPlan]) -> tuple[LayerPlan, ...]:
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    return tuple(sorted(layers, key=lambda layer: order.get(layer.name, len(order))))


def with_plan(fast: nn.Module, plan: Plan) -> nn.Module:
    """Put the plan on the compiled model, unless its class has something of that name."""
    if hasattr(fast, "plan"):
        logger.warning("the model has an attribute `plan` of its own; the plan is logged instead:\n%s", plan)
    else:
        object.__setattr__(fast, "plan", plan)
    return fast


def _describe(name: str, entry: LayerWeight, choice: Choice, tokens: int, nbytes: int, memory: str) -> LayerPlan:
    dense, sparse = choice.at(tokens, "dense_matmul"), choice.at(tokens, "nm_matmul")
    return LayerPlan(
        name,
        "Linear",
        (entry.rows, entry.columns),
        tokens,
        choice.ladder.at(tokens)[0].name,
        choice.ladder.to_text(),
        dense and dense * 1e3,
        sparse and sparse * 1e3,
        why(choice, tokens, entry.source if isinstance(entry.source, Packed) else entry.dense_because, memory),
        4 * entry.rows * entry.columns,
        nbytes,
        choice.times,
    )


def _copy_with(model: nn.Module, replacements: Mapping[str, CompiledLinear]) -> nn.Module:
    """Deep-copy `model` with layers replaced, under every name they have; weights that vanish are not copied."""
    if "" in replacements:
        return replacements[""].eval()
    by_module = {id(model.get_submodule(name)): layer for name, layer in replacements.items()}
    names = {
        name: by_module[id(module)]
        for name, module in model.named_modules(remove_duplicate=False)
        if id(module) in by_module
    }
    fast = copy.deepcopy(model, _vanishing(model, by_module))
    for name, layer in names.items():
        parent, _, leaf = name.rpartition(".")
        setattr(fast.get_submodule(parent), leaf, layer)
    for module in fast.modules():
        # Their fast paths read linear1.weight and would bypass the compiled layers; these values tell them not to.
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.enable_nested_tensor = module.use_nested_tensor = False
    return fast.eval().requires_grad_(False)


def _vanishing(model: nn.Module, replaced: Mapping[int, CompiledLinear]) -> dict[int, Any]:
    """Return a memo for deepcopy that gives an empty parameter for each weight held by replaced layers alone.

    A weight that another module holds too (a tied embedding) is copied like any other.
    """
    held_elsewhere = {
        id(parameter)
        for module in model.modules()
        if id(module) not in replaced
        for parameter in module._parameters.values()
    }
    weights = [module._parameters["weight"] for module in model.modules() if id(module) in replaced]
    return {
        id(weight): nn.Parameter(torch.empty(0), requires_grad=False)
        for weight in weights
        if id(weight) not in held_elsewhere
    }


def _require(model: nn.Module, dtype: str, memory: str, tokens: Sequence[int]) -> None:
    if dtype in ("bfloat16", "int8", "int4"):
        raise CompileError(f'dtype="{dtype}" is planned, not built yet', got=dtype, wanted='"float32"')
    for what, given, allowed in (("dtype", dtype, ("float32",)), ("memory", memory, ("fast", "small"))):
        if given not in allowed:
            raise CompileError(f"the {what} is not known", got=repr(given), wanted=" or ".join(map(repr, allowed)))
    if not tokens or any(type(count) is not int or count < 1 for count in tokens):
        raise CompileError("the token counts are impossible", got=repr(tokens), wanted="positive whole numbers")
    require_cpu(model)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, without gradients, and back."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in training.items():
            module.training = mode


def _call(model: nn.Module, example: Any) -> Any:
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def _observe(model: nn.Module, example: Any) -> tuple[dict[str, int], list[Any]]:
    """Run the example once; return the token count each Linear saw, and the leaves of the output."""
    counts: dict[str, int] = {}
    if example is None:
        return counts, []
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def see(_: nn.Module, inputs: tuple[Any, ...], name: str = name) -> None:
                if inputs and isinstance(inputs[0], Tensor) and inputs[0].numel():
                    counts[name] = max(counts.get(name, 0), inputs[0].numel() // inputs[0].shape[-1])

            handles.append(module.register_forward_pre_hook(see))
    try:
        output = _call(model, example)
    except Exception as error:
        raise CompileError(
            "the model does not run on the example",
            got=f"{type(error).__name__}: {error}",
            wanted="a tensor, a tuple of positional arguments or a dict of keyword arguments",
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return counts, _leaves(output)


def _verified(fast: nn.Module, plan: Plan, example: Any, reference: Sequence[Any]) -> Plan:
    found = _leaves(_call(fast, example))
    pairs = [
        (got.double(), want.double())
        for got, want in zip(found, reference, strict=True)
        if isinstance(want, Tensor) and want.is_floating_point()
    ]
    if not pairs:
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in reference})) or "nothing"
        logger.warning("the outputs were not compared: the model answers with %s, not with tensors", kinds)
        return plan
    difference = sum(float((got - want).square().sum()) for got, want in pairs)
    size = sum(float(want.square().sum()) for _, want in pairs)
    error = (difference / size) ** 0.5 if size else difference**0.5
    if not error <= LARGEST_ERROR:  # also catches NaN
        raise CompileError(
            "the compiled model does not compute what the model does",
            got=f"a relative error of {error:.2e} on the example",
            wanted=f"at most {LARGEST_ERROR}",
            remedy="if the model is random in evaluation mode, compile without an example; else please report it",
        )
    return replace(plan, error=error)


def _leaves(output: Any) -> list[Any]:
    """Flatten an output into its leaves, dataclasses included."""
    leaves = tree_leaves(output, is_leaf=is_dataclass)
    return [
        leaf
        for entry in leaves
        for leaf in (_leaves([getattr(entry, f.name) for f in fields(entry)]) if is_dataclass(entry) else [entry])
    ]
