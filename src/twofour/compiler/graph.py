"""compile(..., graph=True): the model with compiled layers captured, rewritten and, where it is faster, run so."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _is_tracing
from torch._C._functorch import peek_interpreter_stack
from torch.compiler import is_compiling
from torch.utils._pytree import tree_flatten

from twofour import native
from twofour.capture import Graph, Guard, arguments, bind, capture
from twofour.compiler.account import Account, by_operator
from twofour.compiler.build import Terms
from twofour.compiler.conv import CompiledConv
from twofour.compiler.graph_conv import kept_convs, place_convs
from twofour.compiler.layer import CompiledLinear
from twofour.compiler.plan import Plan, with_products
from twofour.compiler.products import most_tokens, place
from twofour.errors import CompileError
from twofour.graph import Program, arrange, fuse, lower_activations, simplify
from twofour.kernels.operator import inference_only
from twofour.measure import compare

logger = logging.getLogger("twofour.compiler")

AGREEMENT = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Computing type -> relative difference beyond which a graph does not compute what the layers do: fusion changes the
order of sums and leaves out roundings, which bfloat16 and whole numbers magnify."""

NOISE = 1e-3
"""Size of an output, as a part of the largest output, below which its error is taken relative to that part."""

LOWERED = ("bfloat16", "int8")
"""Computing types whose graphs hand bfloat16 from layer to layer: their products round what they read to no more than
that."""

BETWEEN = "activations between layers in bfloat16"
"""What the account calls it: a rewrite that rounds."""

LEAST_LOWERED = 16
"""Tokens from which they do: with fewer the weights take the time, and conversions at the graph's edges are calls."""

TIE = 1.05
"""The layers' time over which the graph's must be for it to be given up: it computes the same with fewer calls, so that
a smaller difference is the noise of a busy machine."""


def require_graph(graph: bool | str, example: Any) -> None:
    """Refuse engines that do not exist, and to capture a model without an input to capture it on.

    Raises:
        CompileError: As above.
    """
    if not isinstance(graph, bool) and graph != "inductor":
        raise CompileError(
            "the graph is not known",
            got=repr(graph),
            wanted="False, True or 'inductor'",
            remedy="graph=True: the model captured once and rewritten",
        )
    if graph and example is None:
        raise CompileError(
            f"graph={graph!r} needs an example",
            got="none",
            wanted="an input for one forward pass",
            remedy="pass example=: a tensor, a tuple of positional or a dict of keyword arguments",
        )


def whole(fast: nn.Module, plan: Plan, example: Any, terms: Terms, original: nn.Module | None = None) -> Plan:
    """Let `fast` run as one rewritten graph, where it can be captured and that is faster; returns the plan with why.

    Args:
        fast: The model with compiled layers; its instance gets a `forward` of its own.
        plan: What was decided for the layers.
        example: As in `compile`.
        terms: What held for every layer.
        original: The model with plain layers, for the account of the time before; None: it has no weights.
    """
    args, kwargs = split(example)
    given = arguments(fast, args, kwargs)
    if reason := impossible(fast, given):
        logger.warning("each layer is compiled by itself: %s", reason)
        return replace(plan, account=Account("layers", reason))
    layers = {name: module for name, module in fast.named_modules() if isinstance(module, CompiledLinear)}
    convs = {name: module for name, module in fast.named_modules() if isinstance(module, CompiledConv)}
    try:
        if "" in layers or "" in convs:
            raise CompileError(
                "the model is a single layer",
                wanted="a model with operators around its layers",
                remedy="leave graph out",
            )
        kept = {name: layer.out_features for name, layer in layers.items()}
        graph = capture(fast, given, kept, kept_convs(convs))
    except CompileError as error:
        why = _cache_in(fast, given, error) or next(iter(error.reasons), error.wanted)
        reason = str(error).partition("\n")[0] + f": {why}"
        logger.warning("each layer is compiled by itself: %s", reason)
        return replace(plan, account=Account("layers", reason))
    with torch.inference_mode():
        return _rewritten(fast, plan, given, graph, terms, original or fast, layers, convs)


def _rewritten(
    fast: nn.Module,
    plan: Plan,
    given: Mapping[str, Any],
    graph: Graph,
    terms: Terms,
    original: nn.Module,
    layers: Mapping[str, CompiledLinear],
    convs: Mapping[str, CompiledConv],
) -> Plan:
    leaves = tree_flatten(dict(given))[0]
    plain = {name: original.get_submodule(name) for name in (*layers, *convs)}
    before = by_operator(Program(graph.module, plain, timed=True).seconds(leaves))
    rewrites = rewritten(graph, plan.dtype, leaves, copies=terms.memory == "fast")
    folded = place_convs(graph.module, convs, {layer.name: layer for layer in plan.layers})
    added = (*folded, *place(graph, leaves, layers, terms, lowered=rewrites.get(BETWEEN, 0) > 0))
    rewrites |= arrange(graph.module)
    program = Program(graph.module)
    after = by_operator(Program(graph.module, timed=True).seconds(leaves))
    guard = Guard(graph)
    runner = WholeModel(fast, guard, program, graph)
    runner.agreement = agreement(fast, plan.dtype, leaves)
    if plan.dtype == "int8" and original is not fast:  # where rounding costs much, other roundings cost as much
        lost = distance(tree_flatten(by_layers(fast, given))[0], tree_flatten(by_layers(original, given))[0])
        runner.agreement += lost if math.isfinite(lost) else 0.0
    if not (error := _probe(runner, graph, leaves)) <= runner.agreement:
        reason = f"the rewritten graph differs from the layers by {error:.1e} on the example, please report it"
        logger.warning("each layer is compiled by itself: %s", reason)
        return replace(plan, account=Account("layers", reason, {}, rewrites, before, after))
    times = _engines(runner, given)
    served = "other sizes too" if guard.dynamic else f"the example's sizes alone: {graph.reason or 'they differ'}"
    better = "faster than" if times["graph"] < times["layers"] else "within 5 % of"
    account = Account("graph", f"{better} layer by layer, in fewer calls; {served}", times, rewrites, before, after)
    if times["graph"] > TIE * times["layers"]:
        account = replace(account, engine="layers", reason="layer by layer is faster on the example")
        return replace(plan, account=account)
    object.__setattr__(fast, "forward", runner)
    return replace(plan, layers=with_products(plan.layers, added), account=account)


def impossible(fast: nn.Module, given: Mapping[str, Any]) -> str:
    """Return why no engine but the layers can be tried, "" where one can."""
    if names := _hooked(fast):
        listed = f"{', '.join(names[:4])}{' and more' if len(names) > 4 else ''}"
        return f"forward hooks on {listed} would not run in a graph"
    empty = [name for name, value in given.items() if any(_is_empty(leaf) for leaf in tree_flatten(value)[0])]
    if empty:
        return f"`{empty[0]}` of the example is empty: nothing can be compared or timed on it"
    return ""


def _is_empty(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.numel()


def _cache_in(fast: nn.Module, given: Mapping[str, Any], error: CompileError) -> str:
    """Return what to do where a Hugging Face model answers with a cache, which no graph can hold, "" elsewhere."""
    asked = getattr(getattr(fast, "config", None), "use_cache", False) and given.get("use_cache") is not False
    if not asked or "Cache'>" not in str(error):
        return ""
    names = ", ".join(f'"{name}": {name}' for name in given if name not in ("use_cache", "past_key_values"))
    example = f'example={{{names}, "use_cache": False}}'
    return f"it answers with a cache; pass {example}: calls with use_cache=False are then a graph, others layers"


def _hooked(model: nn.Module) -> list[str]:
    """Return the inner modules with forward hooks, which run when their module is called: a graph calls none."""
    return [f"`{name}`" for name, module in model.named_modules() if name and any(_hooks(module))]


def _hooks(module: nn.Module) -> tuple[Mapping[int, Any], ...]:
    return module._forward_hooks, module._forward_pre_hooks


def all_hooks(model: nn.Module) -> list[Mapping[int, Any]]:
    """Return the forward hooks of every inner module: torch keeps these mappings and fills them when one is added."""
    return [hooks for name, module in model.named_modules() if name for hooks in _hooks(module)]


def rewritten(graph: Graph, dtype: str, leaves: Sequence[Any], *, copies: bool = True) -> dict[str, int]:
    """Rewrite the graph up to its products, which have no kernels yet; returns how many places each rewrite changed.

    Without `copies` no weight is kept twice: folding and joining would make copies beside those of the layers.
    """
    counts = {**simplify(graph.module), **fuse(graph.module, copies=copies)}
    if dtype in LOWERED and most_tokens(graph.module, leaves) >= LEAST_LOWERED:
        counts[BETWEEN] = lower_activations(graph.module)
    return counts


def agreement(fast: nn.Module, dtype: str, leaves: Sequence[Any]) -> float:
    """Return the relative difference from the layers beyond which an engine is not used."""
    tensors = [leaf for leaf in (*leaves, *fast.parameters()) if isinstance(leaf, Tensor)]
    low = dtype != "float32" or any(leaf.dtype in (torch.bfloat16, torch.float16) for leaf in tensors)
    return AGREEMENT[torch.bfloat16 if low else torch.float32]


def by_operators() -> bool:
    """Tell whether something follows a call operator by operator: another capture, jit.trace, vmap and its like."""
    return is_compiling() or _is_tracing() or peek_interpreter_stack() is not None


class WholeModel:
    """The forward of a model compiled as a graph; calls the graph does not hold for run layer by layer.

    Args:
        model: The model with compiled layers.
        guard: Which calls the graph holds for.
        program: The rewritten graph.
        graph: As captured: the structure of its outputs.
    """

    def __init__(self, model: nn.Module, guard: Guard, program: Program, graph: Graph) -> None:
        self.model, self.guard, self.program, self.outputs = model, guard, program, graph.outputs
        self.agreement = AGREEMENT[torch.float32]
        self._said: set[str] = set()
        self._hooks: list[Mapping[int, Any]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's own forward returns."""
        kind = type(self.model)
        if by_operators():
            return kind.forward(self.model, *args, **kwargs)
        given = bind(_signature(kind), self.model, args, kwargs)
        if self._hooks is None:
            self._hooks = all_hooks(self.model)
        own = "in training mode" if self.model.training else "with forward hooks" if any(self._hooks) else ""
        leaves = None if own else self.guard.leaves(given)
        if torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves or ()):
            raise inference_only()
        if leaves is not None:
            return self.outputs.value(self.program(*leaves))
        why = own or "that the captured graph does not hold for"
        if why not in self._said:
            self._said.add(why)
            logger.warning("a call %s runs layer by layer (said once)", why)
        return kind.forward(self.model, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_hooks": None}  # a copy has modules of its own


_signatures: dict[type, inspect.Signature] = {}


def _signature(kind: type) -> inspect.Signature:
    if kind not in _signatures:
        _signatures[kind] = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    return _signatures[kind]


def split(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an example's positional and keyword arguments."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}


def _probe(runner: WholeModel, graph: Graph, leaves: Sequence[Any]) -> float:
    """Compare graph and layers on the example and on other sizes; narrow the guard where they differ.

    torch captures no size of 1 as free, and a branch of the model on a size is frozen: only running it shows that.

    Returns:
        The relative difference on the example itself; infinite where one of them does not run it.
    """
    found = _difference(runner, leaves)
    if found is None or not found <= runner.agreement:
        return math.inf if found is None else found
    guard = runner.guard
    for axis in guard.free_axes():
        sizes = {size for index, a in guard.free if a == axis for size in [graph.example[index].size(axis)]}
        for small in (1, max(2, max(sizes) // 2)):
            shrunk = [
                leaf.narrow(axis, 0, min(small, leaf.size(axis))) if (index, axis) in guard.free else leaf
                for index, leaf in enumerate(graph.example)
            ]
            error = _difference(runner, shrunk)
            if error is not None and not error <= runner.agreement:
                logger.info("the graph does not hold for a size of %d on axis %d: error %.1e", small, axis, error)
                guard.refuse_ones(axis) if small == 1 else guard.freeze(leaves)
    return found


def _difference(runner: WholeModel, leaves: Sequence[Any]) -> float | None:
    """Return the relative difference of graph and layers, or None where the model itself takes no such sizes."""
    given = runner.guard.inputs.value(leaves)
    try:
        want = tree_flatten(by_layers(runner.model, given))[0]
    except Exception:  # a model may refuse sizes in any way it likes
        return None
    if runner.guard.leaves(given) is None:
        return None
    try:
        found = runner.program(*leaves)
    except Exception:
        return float("inf")
    return distance(found, want)


def distance(found: Sequence[Any], want: Sequence[Any]) -> float:
    """Return the largest relative difference of output leaves; infinite where shapes or whole numbers differ.

    NaN and infinities must stand where they are wanted, and count as equal there.
    A leaf smaller than `NOISE` of the largest one is compared with that, so that what cancels to nearly zero counts as
    zero.
    """
    pairs = [(got, wanted) for got, wanted in zip(found, want, strict=True) if isinstance(wanted, Tensor)]
    if any(got.shape != wanted.shape or not (is_real(wanted) or torch.equal(got, wanted)) for got, wanted in pairs):
        return math.inf
    if any(is_real(wanted) and not _finite_alike(got, wanted) for got, wanted in pairs):
        return math.inf
    finite = [(got[(at := wanted.isfinite())], wanted[at]) for got, wanted in pairs if is_real(wanted)]
    real = [(got.double(), wanted.double()) for got, wanted in finite if wanted.numel()]
    sizes = [float(wanted.square().mean()) ** 0.5 for _, wanted in real]
    least = NOISE * max(sizes, default=0.0)
    errors = [float((got - wanted).square().mean()) ** 0.5 for got, wanted in real]
    ratios = [error / (max(size, least) or 1.0) for error, size in zip(errors, sizes, strict=True)]
    return max(ratios, default=0.0) if all(map(math.isfinite, ratios)) else math.inf


def _finite_alike(got: Tensor, wanted: Tensor) -> bool:
    """Tell whether NaN, inf and -inf stand in the same places."""
    odd = [torch.where(leaf.isfinite(), 0.0, leaf.double()).nan_to_num(2.0, 1.0, -1.0) for leaf in (got, wanted)]
    return torch.equal(*odd)


def is_real(leaf: Any) -> bool:
    """Tell whether an output is a tensor of rounded numbers, which no other engine computes to the last bit."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def by_layers(model: nn.Module, given: Mapping[str, Any], forward: Callable[..., Any] | None = None) -> Any:
    """Return what the forward of the model's class answers, or `forward`, with what a call gives to its parameters."""
    signature = _signature(type(model))
    known = {name: value for name, value in given.items() if name in signature.parameters}
    extra = {name: value for name, value in given.items() if name not in known}
    bound = signature.bind_partial(model)
    bound.arguments.update(known)
    if forward is not None:
        return forward(*bound.args[1:], **bound.kwargs, **extra)
    return type(model).forward(*bound.args, **bound.kwargs, **extra)


def _engines(runner: WholeModel, given: Mapping[str, Any]) -> dict[str, float]:
    """Return the median milliseconds of the whole model on the example, by engine."""
    calls: dict[str, Callable[[], object]] = {
        "layers": lambda: by_layers(runner.model, given),
        "graph": lambda: runner.outputs.value(runner.program(*(runner.guard.leaves(given) or ()))),
    }
    return milliseconds(calls)


def milliseconds(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median milliseconds of each call, interleaved."""
    clock = "thread" if native.threads() == 1 else "wall"  # the thread's own time is honest on a shared machine
    record = compare({name: [call] for name, call in calls.items()}, repeats=9, seconds=0.5, weights="hot", clock=clock)
    return {name: 1e3 * record.median(name) for name in calls}
