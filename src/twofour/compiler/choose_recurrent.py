"""Recurrent layers compiled: the products of each weight chosen by measuring, the whole layer against torch's own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from twofour import masks
from twofour.compiler.choose import Choice
from twofour.compiler.computing import FLOAT32, Computing
from twofour.compiler.in_file import stored_bytes
from twofour.compiler.layer import PreparedWeights
from twofour.compiler.plan import LayerPlan
from twofour.compiler.recurrent import CompiledCell, CompiledRecurrent, HeldWeight, RecurrentLayer
from twofour.compiler.recurrent_kinds import Recurrent, is_cell, is_recurrent, parts_of, problem_of, recurrent_refusal
from twofour.compiler.replaceable import LayerWeight, layer_weight
from twofour.compiler.terms import Terms
from twofour.errors import KernelError, cut
from twofour.kernels.base import FLOATS
from twofour.kernels.recurrent import RecurrentProblem
from twofour.measure.chooser import race
from twofour.packing import Packed, dense_of
from twofour.patterns import Pattern

Steps = tuple[int, int]
"""Steps of a sequence, and sequences at once."""

DEFAULT_STEPS: Steps = (32, 1)
"""What a layer is timed on that no example runs."""

TORCH, NATIVE, DENSE = "torch", "native", "dense"
"""What a layer is timed as: torch's own, ours with the products chosen, and ours with all weights dense."""


@dataclass(frozen=True, eq=False)
class RecurrentWeights:
    """A recurrent layer to be replaced.

    Attributes:
        name: Name of the layer.
        module: The layer: its settings are read, and its class makes what it is timed against.
        problem: What it computes.
        weights: Each weight by its name, in the order of `problem.shapes`.
        biases: float32 (out,) by their names; none where it has none.
        example: What it ran on in the example; None without one.
    """

    name: str
    module: Recurrent
    problem: RecurrentProblem
    weights: Mapping[str, LayerWeight]
    biases: Mapping[str, Tensor]
    example: Steps | None = None

    @property
    def steps(self) -> Steps:
        """What it is timed on."""
        return self.example or ((1, 1) if is_cell(self.module) else DEFAULT_STEPS)

    def rows(self, name: str) -> int:
        """Return how many rows a weight multiplies at once."""
        count, batch = self.steps
        role = dict(zip(self.weights, self.problem.roles, strict=True))[name]
        return self.problem.input_rows(count * batch, batch) if role == "input" else batch

    @property
    def nbytes(self) -> int:
        """Bytes of the dense weights."""
        return sum(weight.nbytes for weight in self.weights.values())


def recurrent_layers(
    model: nn.Module, computing: Computing, steps: Mapping[str, Steps]
) -> Iterator[tuple[str, RecurrentWeights]]:
    """Yield the recurrent layers that compile replaces, by name.

    Args:
        model: Any module.
        computing: How the compiled layers write their weights.
        steps: What each layer ran on in the example.

    Raises:
        PatternError: A weight holds NaN or infinity.
    """
    patterns = {name: mask.pattern for name, mask in masks.of(model).items()}
    for name, module in model.named_modules():
        if is_recurrent(module) and recurrent_refusal(module, computing) is None:
            yield name, recurrent_weights(name, module, module._parameters, computing, patterns, steps.get(name))


def recurrent_weights(
    name: str,
    module: Recurrent,
    stored: Mapping[str, Any],
    computing: Computing,
    patterns: Mapping[str, Pattern],
    steps: Steps | None = None,
) -> RecurrentWeights:
    """Describe a recurrent layer with the weights and biases of `stored`, the module's own or a file's, by their names.

    Args:
        name: Name of the layer.
        module: The layer.
        stored: Weights, dense or packed, and biases.
        computing: How the compiled layer writes them.
        patterns: What weights are said to obey, by their names in the model.
        steps: What it ran on in the example.

    Raises:
        PatternError: A weight holds NaN or infinity.
    """
    weights: dict[str, LayerWeight] = {}
    biases: dict[str, Tensor] = {}
    for part, bias in parts_of(module):
        like, said = module._parameters[part], patterns.get(f"{name}.{part}".lstrip("."))
        assert like is not None, part
        biases |= {bias: stored[bias].detach().float()} if bias else {}
        of_part = layer_weight(name, module, stored[part], biases.get(bias), computing, said, like.dtype)
        weights[part] = replace(of_part, kind=type(module).__name__)
    return RecurrentWeights(name, module, problem_of(module), weights, biases, steps)


def steps_of(x: Any, module: Recurrent) -> Steps | None:
    """Return on how many steps of how many sequences a recurrent layer is called, None where its input says nothing."""
    if isinstance(x, PackedSequence):
        return len(x.batch_sizes), int(x.batch_sizes[0])
    if not isinstance(x, Tensor) or x.is_nested or not x.numel():
        return None
    if is_cell(module):
        return 1, x.shape[0] if x.ndim == 2 else 1
    if x.ndim == 2:
        return x.shape[0], 1
    return (x.shape[1], x.shape[0]) if getattr(module, "batch_first", False) else (x.shape[0], x.shape[1])


def choose_recurrent(layer: RecurrentWeights, terms: Terms, footprint: int) -> tuple[RecurrentLayer | None, LayerPlan]:
    """Return the compiled layer, None where torch's own is faster or nothing of ours takes it, and its plan.

    Args:
        layer: What is to be replaced.
        terms: What holds for every layer.
        footprint: Bytes of the whole model's weights.
    """
    steps = layer.steps
    try:
        chosen = {name: _chosen(layer, name, weight, terms, steps, footprint) for name, weight in layer.weights.items()}
    except KernelError as error:
        return None, _plan(layer, {}, None, f"dense: {cut(error.what, 200)}")
    sparse, small = any(choice.dispatch.sparse for choice, _ in chosen.values()), terms.memory == "small"
    ways = {NATIVE: chosen}
    if sparse:
        ways[DENSE] = {name: _chosen_dense(layer, name, terms, steps, footprint) for name in layer.weights}
    made = {way: _compiled(layer, of_way) for way, of_way in ways.items()}
    seconds = _raced(layer, made, terms, steps)
    best = NATIVE if small else min(ways, key=lambda way: seconds[way])
    if seconds[best] > seconds[TORCH] and not (sparse and small) and not terms.native:
        ratio = seconds[best] / seconds[TORCH]
        return None, _plan(layer, chosen, seconds, f"dense: torch's own is faster, ours takes {ratio:.2f}x its time")
    reason = _reason(layer, ways[best], seconds, best)
    return made[best], _plan(layer, ways[best], seconds, reason, made[best].nbytes, best)


def _chosen_dense(layer: RecurrentWeights, name: str, terms: Terms, steps: Steps, footprint: int) -> tuple[Choice, str]:
    """Choose the products of a weight that is unpacked."""
    weight = layer.weights[name]
    packed = isinstance(weight.weight, Packed) and weight.weight.header.sparse
    plain = dense_of(weight.weight) if packed else weight.weight
    return _chosen(layer, name, replace(weight, weight=plain, pattern=None), terms, steps, footprint)


def _chosen(
    layer: RecurrentWeights, name: str, weight: LayerWeight, terms: Terms, steps: Steps, footprint: int
) -> tuple[Choice, str]:
    """Choose the products of one weight; return them, and why it is not packed, "" where it is."""
    source, because = weight.encoded()
    count, batch = steps
    footprint = weight.nbytes if count > 1 else footprint  # from the second step on a weight lies as near as it can
    given = weight.bias, None, footprint, weight.problem
    options = {"among": (1, batch, layer.rows(name)), "native_alone": True}
    try:
        return terms.choose(layer.name, source, *given, **options), because
    except KernelError:
        if isinstance(source, Packed) and source.header.sparse:
            raise
        found = terms.choose(layer.name, dense_of(source).float(), *given, **options, dtype=FLOAT32.dtype)
        return found, f"{because}; no dense {terms.computing.dtype} product of ours takes it, so in float32"


def _compiled(layer: RecurrentWeights, chosen: Mapping[str, tuple[Choice, str]]) -> RecurrentLayer:
    held = {}
    for (name, (choice, _)), shape in zip(chosen.items(), layer.problem.shapes, strict=True):
        weight = layer.weights[name]
        prepared = PreparedWeights(choice.layouts.values())
        given = choice.dispatch, weight.pattern, weight.activations
        held[name] = HeldWeight(layer.name, shape, prepared, *given)
    computing = next(iter(layer.weights.values())).computing
    reads = FLOATS[:1] if computing.dtype == "float32" else FLOATS
    given = layer.name, layer.problem, held, dict(layer.biases), reads
    if is_cell(layer.module):
        return CompiledCell(*given)
    return CompiledRecurrent(*given, batch_first=bool(getattr(layer.module, "batch_first", False)))


def raced_patterns(
    name: str,
    module: nn.Module,
    pruned: Mapping[str, Mapping[str, tuple[Pattern, Tensor]]],
    terms: Terms,
    steps: Steps,
    footprint: int,
) -> tuple[dict[str, tuple[str, float]], dict[str, str]]:
    """Race torch's layer, ours dense, and ours with each of several patterns.

    Args:
        name: Name of the layer.
        module: The layer, a recurrent one.
        pruned: A name of each candidate -> the pattern and the pruned values of each weight, by the weights' names.
        terms: What holds for every layer.
        steps: What they are timed on.
        footprint: Bytes of the whole model's weights.

    Returns:
        The kernel of each product with the states, and the seconds, of "torch", "dense" and each candidate; and why a
        candidate is not among them: none of its weights can be packed.

    Raises:
        KernelError: No product of this computing type is ours.
    """
    made: dict[str, RecurrentLayer] = {}
    refused: dict[str, str] = {}
    layer = None
    assert is_recurrent(module), type(module)
    for text, weights in {"dense": {}, **pruned}.items():
        stored = dict(module._parameters) | {part: values for part, (_, values) in weights.items()}
        said = {f"{name}.{part}".lstrip("."): pattern for part, (pattern, _) in weights.items()}
        layer = recurrent_weights(name, module, stored, terms.computing, said, steps)
        chosen = {part: _chosen(layer, part, one, terms, steps, footprint) for part, one in layer.weights.items()}
        if weights and all(because for _, because in chosen.values()):
            refused[text] = next(iter(chosen.values()))[1]
        else:
            made[text] = _compiled(layer, chosen)
    assert layer is not None
    seconds = _raced(layer, made, terms, steps)
    states = {text: list(one.held.values())[1].dispatch_text.split("=")[1].split(";")[0] for text, one in made.items()}
    return {text: (states.get(text, text), found) for text, found in seconds.items()}, refused


def _raced(layer: RecurrentWeights, made: Mapping[str, RecurrentLayer], terms: Terms, steps: Steps) -> dict[str, float]:
    """Return the seconds of torch's layer and of ours, by their names, on random input."""
    (count, batch), problem = steps, layer.problem
    texts = [(one.nbytes, [held.dispatch_text for held in one.held.values()]) for one in made.values()]
    dtype, cell = next(iter(layer.weights.values())).activations, is_cell(layer.module)
    first = bool(getattr(layer.module, "batch_first", False))
    facts = problem, steps, cell, first, str(dtype), bool(layer.biases), texts
    case = f"recurrent/{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"

    def measure() -> tuple[dict[str, float], float]:
        plain = twin(layer.module).to(dtype).eval()
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(count, batch, problem.inputs, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
        x = x[0] if cell else x.transpose(0, 1) if first else x
        calls: dict[str, Callable[[], object]] = {TORCH: lambda: plain(x)}
        calls |= {name: partial(one, x) for name, one in made.items()}
        with torch.inference_mode():
            return race(calls, seconds=0.5)

    return terms.cache.times(terms.cache.key(case), (TORCH, *made), measure)


def twin(module: Any) -> nn.Module:
    """Return a layer of the same class and sizes on the CPU, with random weights."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        problem = problem_of(module)
        if isinstance(module, nn.RNNCellBase):
            options = {"nonlinearity": problem.cell} if isinstance(module, nn.RNNCell) else {}
            kind: Any = type(module)
            return kind(module.input_size, module.hidden_size, bias=module.bias, **options)
        options = {name: getattr(module, name) for name in ("num_layers", "bias", "batch_first", "bidirectional")}
        if isinstance(module, nn.LSTM):
            options["proj_size"] = module.proj_size
        if isinstance(module, nn.RNN):
            options["nonlinearity"] = problem.cell
        return type(module)(module.input_size, module.hidden_size, **options)


def _reason(
    layer: RecurrentWeights, chosen: Mapping[str, tuple[Choice, str]], seconds: Mapping[str, float], way: str
) -> str:
    sparse = sum(choice.dispatch.sparse for choice, _ in chosen.values())
    count, batch = layer.steps
    ratio = seconds[way] / seconds[TORCH]
    if way == DENSE:
        dense = f"; dense: packed weights take {seconds[NATIVE] / seconds[DENSE]:.2f}x the time of dense ones of ours"
    else:
        faster = "its dense product is the faster one"
        why = next((because or faster for choice, because in chosen.values() if not choice.dispatch.sparse), "")
        dense = f"; dense: {why}" if why else ""
    where = f"{count} steps of {batch}" if layer.example else f"{count} steps of {batch}, no example"
    return f"{sparse} of {len(chosen)} weights sparse, {ratio:.2f}x the time of torch's own at {where}{dense}"


def _plan(
    layer: RecurrentWeights,
    chosen: Mapping[str, tuple[Choice, str]],
    seconds: Mapping[str, float] | None,
    reason: str,
    nbytes: int | None = None,
    way: str = NATIVE,
) -> LayerPlan:
    first = next(iter(layer.weights.values()))
    count, batch = layer.steps
    best = None if seconds is None else 1e3 * min(seconds[one] for one in (TORCH, DENSE) if one in seconds)
    kernel, dispatch, dense, sparse = "torch", "", best, None
    if nbytes is None and seconds is not None:
        dense = 1e3 * seconds[TORCH]
    if nbytes is not None and seconds is not None:
        runs = {choice.runs(batch).name: choice for choice, _ in chosen.values()}
        kernel = next((name for name, choice in runs.items() if choice.runs(batch).sparse), next(reversed(runs)))
        dispatch = runs[kernel].dispatch.to_text()
        packed = 1e3 * seconds[NATIVE] if DENSE in seconds else None
        dense, sparse = (dense, packed) if runs[kernel].runs(batch).sparse else (1e3 * seconds[way], packed)
    own = nbytes is None  # torch's layer, whose weights are written as they are
    sizes = layer.nbytes, *((layer.nbytes, layer.nbytes) if own else (nbytes, _stored(layer, chosen)))
    named = layer.name, type(layer.module).__name__, first.shape
    return LayerPlan(*named, count * batch, kernel, dispatch, dense, sparse, reason, *sizes)


def _stored(layer: RecurrentWeights, chosen: Mapping[str, tuple[Choice, str]]) -> int:
    """Return the bytes of the layer's weights in a file, in float32 where one runs so for want of a kernel."""

    def written(name: str, weight: LayerWeight) -> int:
        dispatch = chosen[name][0].dispatch
        floats = dispatch.kernels[0].dtype == FLOAT32.dtype
        return stored_bytes(replace(weight, computing=FLOAT32) if floats else weight, dispatch.sparse)

    return sum(written(name, weight) for name, weight in layer.weights.items())
