"""Copy a model with its layers replaced: measure first, one shape once, then encode one layer after the other."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from twofour import masks, native, quantization
from twofour.compiler.choose import Choice, Progress
from twofour.compiler.choose_conv import ConvCase, choose_conv, not_measured
from twofour.compiler.choose_recurrent import RecurrentWeights, choose_recurrent
from twofour.compiler.computing import FLOAT32, Computing
from twofour.compiler.conv import CompiledConv
from twofour.compiler.in_file import in_groups, stored_bytes
from twofour.compiler.layer import CompiledLinear, MeasuredLayer, PreparedWeights
from twofour.compiler.plan import LayerPlan, Plan, described
from twofour.compiler.reasons import AS_FLOATS, explain
from twofour.compiler.recurrent import RecurrentLayer
from twofour.compiler.replaceable import LayerWeight
from twofour.compiler.terms import Terms
from twofour.compiler.unpacked import Reads, WeightedLayer
from twofour.errors import TwofourError
from twofour.graph import CLOSE
from twofour.kernels.conv import SCATTERED, ConvProblem
from twofour.native import gpu
from twofour.packing import Packed, pack
from twofour.quantization.stored import bytes_in_file, shared

WIDENED = "its bfloat16 weight is widened to float32 once"


def build(
    model: nn.Module,
    weights: Mapping[str, LayerWeight],
    counts: Mapping[str, int],
    terms: Terms,
    *,
    recurrent: Mapping[str, RecurrentWeights] | None = None,
    tables: Mapping[str, nn.Module] | None = None,
    left: Sequence[LayerPlan] = (),
    progress: Progress | None = None,
) -> tuple[nn.Module, Plan]:
    """Copy `model` with the named layers replaced, measuring what each should run on.

    A layer that torch's own product serves best at every token count stays as it is. Weights are encoded one at a time,
    twice: for measuring, where a shape that was measured is passed over, and for good. So no more is ever held than the
    dense weights, the finished ones and one layer's candidates, and those only while little is finished.

    Args:
        model: Gives the structure; the weights of the named layers are not read (they may be on the meta device).
        weights: Layer name to its weight.
        counts: Token counts of an example, by layer.
        terms: What holds for every layer.
        recurrent: Recurrent layers by name.
        tables: Embeddings whose tables are kept in another type, by name.
        left: Plan entries of layers that stay as they are.
        progress: See `compile`.
    """
    recurrent, tell = recurrent or {}, progress or (lambda *_: None)
    chooser = _Chooser(terms, sum(entry.nbytes for entry in (*weights.values(), *recurrent.values())))
    seen: set[object] = set()
    for done, (name, entry) in enumerate(weights.items()):
        tell(done, len(weights) + len(recurrent), name)
        chooser.measure(entry, counts.get(name), seen)
        native.release_free_memory()
    terms.cache.save()
    replacements = dict(tables or {})
    plans: dict[str, LayerPlan] = {}
    shared: dict[object, PreparedWeights] = {}
    for name, entry in weights.items():
        layer, plans[name] = chooser.layer(entry, counts.get(name), shared)
        replacements |= {} if layer is None else {name: layer}
        native.release_free_memory()
    for done, (name, layer) in enumerate(recurrent.items()):
        tell(len(weights) + done, len(weights) + len(recurrent), name)
        made, plans[name] = choose_recurrent(layer, terms, chooser.footprint)
        replacements |= {} if made is None else {name: made}
    fast = copy_with(model, replacements)
    layers = _in_order(model, masked_sizes(fast, [*plans.values(), *left]))
    computing = terms.computing
    here = native.threads(), gpu.name() if computing.device == "cuda" else native.isa_text()
    plan = Plan(layers, computing.dtype, terms.memory, terms.tokens, *here, rules=terms.rules)
    seen_by = {name: count for name, count in counts.items() if name in weights}
    plan = replace(plan, group=computing.group, symmetric=computing.symmetric, counts=seen_by)
    plan = replace(plan, steps={name: layer.example for name, layer in recurrent.items() if layer.example})
    return fast, replace(plan, ranges=_ranges(weights.values(), computing.dtype))


def _ranges(weights: Collection[LayerWeight], dtype: str) -> str:
    """Say what int8 layers round their inputs by, "" of another type."""
    ranged = [weight for weight in weights if dtype == "int8"]
    static = sum(not weight.quantization.dynamic for weight in ranged)
    if not static:
        kinds = {"image" if weight.geometry is not None else "token" for weight in ranged}
        return f"a range of each {' and '.join(sorted(kinds, reverse=True))}" if kinds else ""
    return "static ranges of the data" + ("" if static == len(ranged) else f" in {static} layers")


def concluded(plan: Plan, terms: Terms) -> Plan:
    """Keep the times, say in one line if the machine was busy, and let the plan carry them to a file."""
    plan = replace(plan, notes=(*plan.notes, *terms.cache.finish()))
    return replace(plan, machines=terms.cache.machines()) if terms.computing.device == "cpu" else plan


def masked_sizes(fast: nn.Module, layers: Sequence[LayerPlan]) -> list[LayerPlan]:
    """Correct the bytes in a file of layers that stayed torch's and carry masks, or low bits: `save` packs those."""
    masked = masks.of(fast)
    sizes: dict[str, int] = {}
    elsewhere = shared(fast)
    for layer in dict.fromkeys(mask.layer for mask in masked.values()):
        weights = [(f"{layer}.{name}".lstrip("."), p) for name, p in fast.get_submodule(layer)._parameters.items()]
        sizes[layer] = sum(_in_file(p, masked.get(name)) for name, p in weights if p is not None and p.ndim >= 2)
    for name, low in quantization.of(fast).items():
        module = fast.get_submodule(name)
        if id(module.weight) not in elsewhere:
            mask = masked.get(f"{name}.weight".lstrip("."))
            pattern = module.pattern if isinstance(module, WeightedLayer) else None  # of a weight that stands in codes
            sizes[name] = bytes_in_file(module, low, pattern if mask is None else mask.pattern)
    return [replace(layer, bytes_in_file=sizes.get(layer.name, layer.bytes_in_file)) for layer in layers]


def _in_file(weight: nn.Parameter, mask: masks.Mask | None) -> int:
    if mask is not None:
        with suppress(TwofourError):  # what cannot be packed is for `save` to refuse
            return pack(weight.detach(), mask.pattern, axis=mask.axis.axis).nbytes
    return weight.nbytes


@dataclass(frozen=True)
class _Chooser:
    terms: Terms
    footprint: int

    def choice(
        self, entry: LayerWeight, source: Packed | Tensor, because: str, count: int | None
    ) -> tuple[Choice, str]:
        """Choose the kernels of one layer; return them, and why none is sparse, "" where one is."""
        if entry.geometry is None:
            given = source, entry.bias, count, self.footprint, entry.problem
            return self.terms.choose(entry.name, *given, activations=entry.activations), because
        try:
            terms, close = self.terms, self.terms.rules == CLOSE
            options = {"memory": terms.memory, "footprint": self.footprint, "cache": terms.cache}
            options |= {"native_alone": terms.native}
            return choose_conv(ConvCase.of(entry), **options, close=close)
        except TwofourError as error:
            raise error.for_layer(entry.name) from None

    def measure(self, entry: LayerWeight, count: int | None, seen: set[object]) -> None:
        """Time the candidates for one layer, unless one of its shape was timed; what that needs is freed again."""
        source, because = entry.encoded()
        shape = entry.rows, entry.columns, entry.bias is None, because == "", entry.activations, count
        shape = (
            *shape,
            source.header.pattern if isinstance(source, Packed) else "",
            entry.problem.quantization.dynamic,
            entry.geometry,
            entry.images,
        )
        if shape not in seen:
            seen.add(shape)
            self.choice(entry, source, because, count)

    def layer(
        self, entry: LayerWeight, count: int | None, shared: dict[object, PreparedWeights]
    ) -> tuple[MeasuredLayer | None, LayerPlan]:
        """Return the compiled layer, None where torch's own serves best, and its plan; its shape was timed before.

        Tied layers share one prepared weight where their tables need the same layouts.
        """
        choice, because = self.choice(entry, *entry.encoded(), count)
        tokens = count if count in choice.times else max(choice.times)
        if _is_torchs(choice, entry):  # what the layer does already, without a microsecond of ours on top
            return None, _describe(entry, choice, tokens, entry.nbytes, entry.nbytes, self.terms, because)
        prepared = PreparedWeights(choice.layouts.values())
        known = shared.setdefault(
            (id(entry.source), entry.axis, entry.activations, entry.geometry, entry.shape), prepared
        )
        prepared = known if known.layouts == choice.dispatch.layouts else prepared
        problem, given = entry.problem, (choice.dispatch, prepared, entry.bias)
        if isinstance(problem, ConvProblem):
            layer = CompiledConv(entry.name, problem, *given, entry.images, len(entry.shape) - 2)
        else:
            layer = CompiledLinear(entry.name, entry.columns, problem, *given)
            layer.answers = entry.answers
        layer.axis, layer.weight_dtype, layer.pattern = entry.axis, entry.activations, entry.pattern
        if isinstance(problem, ConvProblem) and choice.dispatch.kernels[0].dtype == "float32":
            entry = replace(entry, computing=_written(entry))
        stored = stored_bytes(entry, choice.dispatch.sparse)
        return layer, _describe(entry, choice, tokens, prepared.nbytes, stored, self.terms, because)


def _written(entry: LayerWeight) -> Computing:
    """Return how a file holds the weight of a convolution in floats."""
    return Computing("bfloat16") if entry.activations is torch.bfloat16 else FLOAT32


def _is_torchs(choice: Choice, entry: LayerWeight) -> bool:
    """Whether torch's own product on the layer's own weight is all that would run."""
    if len(choice.dispatch.names) > 1:
        return False
    return choice.dispatch.kernels[0].is_own(entry.activations)


def _describe(
    entry: LayerWeight, choice: Choice, tokens: int, nbytes: int, stored: int, terms: Terms, because: str
) -> LayerPlan:
    notes = (
        AS_FLOATS if _as_floats(entry, terms) and not choice.dispatch.sparse else "",
        choice.dispatch.at(tokens)[0].remark(entry.columns),
        WIDENED if entry.geometry is not None and entry.activations is torch.bfloat16 else "",
        SCATTERED if entry.geometry is not None and entry.geometry.scattered else "",
        not_measured(entry.geometry, terms.memory, terms.rules == CLOSE) if entry.geometry is not None else "",
    )
    reason = explain(choice, tokens, because, terms.memory, *notes)
    sizes = entry.nbytes, nbytes, stored
    return described(entry.name, entry.kind, entry.shape, tokens, choice, reason, sizes, dense_because=because)


def _as_floats(entry: LayerWeight, terms: Terms) -> bool:
    """Whether a file holds the floats that the whole numbers of a dense weight stand for."""
    if terms.computing.packed.groups and entry.geometry is None:
        return terms.computing.stored != terms.computing.dense_stored or not in_groups(entry)
    return terms.computing.stored != terms.computing.dense_stored


def _in_order(model: nn.Module, layers: Sequence[LayerPlan]) -> tuple[LayerPlan, ...]:
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    return tuple(sorted(layers, key=lambda layer: order.get(layer.name, len(order))))


def copy_with(model: nn.Module, replacements: Mapping[str, nn.Module]) -> nn.Module:
    """Deep-copy `model` with layers replaced, under every name they have; they answer for the settings of the old."""
    reads = Reads()
    for name, layer in replacements.items():
        if isinstance(layer, WeightedLayer | RecurrentLayer):
            layer.take_settings(model.get_submodule(name))
            layer.weight_reads = reads
    if "" in replacements:
        return replacements[""].eval()
    # What the memo of deepcopy has is not copied: neither the old weights nor their masks are in memory twice.
    fast = copy.deepcopy(model, {id(model.get_submodule(name)): layer for name, layer in replacements.items()})
    for module in fast.modules():
        # Their fast paths read linear1.weight and would bypass the compiled layers; these values tell them not to.
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.enable_nested_tensor = module.use_nested_tensor = False
    return fast.eval().requires_grad_(False)
