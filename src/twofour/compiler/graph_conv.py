"""The convolutions of a rewritten graph get their layers: normalisation, residual and activation in the same pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, fx, nn

from twofour.compiler.choose import Choice
from twofour.compiler.choose_conv import ConvCase, choose_conv, more_than_sums
from twofour.compiler.computing import convolved
from twofour.compiler.conv import CompiledConv
from twofour.compiler.layer import PreparedWeights
from twofour.compiler.plan import LayerPlan, described
from twofour.compiler.terms import Terms
from twofour.graph import CLOSE, Convolution, Norm
from twofour.graph.base import place
from twofour.graph.precision import is_low
from twofour.kernels.conv import ConvProblem, PreparedConv
from twofour.kernels.fold import batch_norm_scale, fold_batch_norm
from twofour.packing import dense_of
from twofour.patterns import Pattern


class ConvLayer(CompiledConv):
    """A compiled convolution inside a graph: named in the account by what it takes in.

    Attributes:
        scale: float64 (out,), what a normalisation multiplied its weight by; None where none did.
    """

    residual = False
    scale: Tensor | None = None

    @property
    def label(self) -> str:
        """Return "conv" with what is done in its pass, such as "conv+add+relu"."""
        activation = self.problem.activation
        parts = ["conv", *(["add"] if self.residual else []), *([activation] if activation != "none" else [])]
        return "+".join(parts)


def kept_convs(layers: Mapping[str, CompiledConv]) -> dict[str, tuple[int, ...]]:
    """Return what `capture` wants to know of each convolution: output channels, then four numbers an axis."""
    found = {}
    for name, layer in layers.items():
        g = layer.geometry
        axes = [(g.kernel[i], g.stride[i], g.before[i] + g.after[i], g.dilation[i]) for i in range(2)]
        found[name] = g.out_channels, *(size for axis in axes[2 - layer.dimensions :] for size in axis)
    return found


def place_convs(
    module: fx.GraphModule, layers: Mapping[str, CompiledConv], plans: Mapping[str, LayerPlan], terms: Terms
) -> tuple[LayerPlan, ...]:
    """Replace every marked convolution by a layer; returns plan entries for the weights that are kept besides.

    Args:
        module: The rewritten graph; it is changed.
        layers: The compiled convolutions by name.
        plans: What was decided for them.
        terms: What holds for every layer.
    """
    added: list[LayerPlan] = []
    footprint = sum(plan.bytes_before for plan in plans.values() if plan.tokens is not None)  # of all that was measured
    for index, node in enumerate([node for node in module.graph.nodes if "convolution" in node.meta]):
        marked: Convolution = node.meta["convolution"]
        before, plan = layers[marked.layer], plans.get(marked.layer)
        layer, choice = _chosen_anew(_layer(module, before, marked), before.pattern, terms, footprint)
        if plan is not None and layer.prepared is not before.prepared:
            norm = "" if marked.norm is None else "; its normalisation folded in"
            sizes = plan.bytes_before, plan.bytes_before + layer.prepared.nbytes, plan.bytes_in_file
            new = replace(plan, bytes_after=sizes[1], reason=plan.reason + norm)
            if choice is not None:
                reason = f"{new.reason}; chosen once more in the graph, with what its call does there"
                new = described(plan.name, plan.kind, plan.shape, next(iter(choice.times)), choice, reason, sizes)
            added.append(new)
        layer.weight_dtype = before.weight_dtype if is_low(node) else layer.weight_dtype
        place(module, node, f"convolution_{index}", layer)
    module.graph.lint()
    return tuple(added)


def _chosen_anew(
    layer: ConvLayer, pattern: Pattern | None, terms: Terms, footprint: int
) -> tuple[ConvLayer, Choice | None]:
    """Choose the kernel once more where it is a library's, which may do in a pass of its own what is now asked of it.

    With memory="small" the choice stays, since its weight is held once.
    """
    (kernel,), asked = layer.dispatch.kernels, more_than_sums(layer.problem, layer.residual)
    if not asked or kernel.isa != "any" or terms.memory == "small" or min(layer.images) < 1:
        return layer, None
    source = layer.prepared.source()
    weight = dense_of(source)
    weight = weight if weight.ndim == 4 else weight.unsqueeze(2)
    more = {"residual": layer.residual, "dtype": convolved(terms.computing).dtype}
    case = ConvCase(layer.name, weight, layer.bias, layer.problem, layer.images, pattern, **more)
    options = {"memory": terms.memory, "footprint": footprint, "cache": terms.cache, "native_alone": terms.native}
    choice, _ = choose_conv(case, **options, close=terms.rules == CLOSE)
    if choice.dispatch.names == layer.dispatch.names:
        return layer, None
    prepared = PreparedWeights(choice.layouts.values())
    new = ConvLayer(layer.name, layer.problem, choice.dispatch, prepared, layer.bias, layer.images, layer.dimensions)
    new.residual, new.scale = layer.residual, layer.scale
    return new, choice


def _layer(module: fx.GraphModule, layer: CompiledConv, marked: Convolution) -> ConvLayer:
    prepared, bias, scale = layer.prepared, layer.bias, None
    if marked.norm is not None:
        source = prepared.source()
        dense = dense_of(source)
        norm = _module(module, marked.norm, len(dense))
        (weight, bias), scale = fold_batch_norm(dense, bias, norm), batch_norm_scale(norm)
        prepared = PreparedWeights(held.again(weight) for held in prepared.weights)
    left, right, above, below = marked.pad
    (top, side), (bottom, far) = layer.geometry.before, layer.geometry.after
    geometry = replace(layer.geometry, before=(top + above, side + left), after=(bottom + below, far + right))
    count, height, width = layer.images
    images = count, height - above - below, width - left - right
    if (
        images != layer.images
    ):  # the weight stands in the order for an image with its zeros, which is that of one without
        held = [one for one in prepared.weights if isinstance(one, PreparedConv)]
        prepared = PreparedWeights(replace(one, images=one.images and images) for one in held)
    problem = replace(ConvProblem.of(geometry, marked.activation), quantization=layer.problem.quantization)
    new = ConvLayer(layer.name, problem, layer.dispatch, prepared, bias, images, layer.dimensions)
    new.residual, new.scale = marked.residual, scale
    return new


def _module(module: fx.GraphModule, norm: Norm, channels: int) -> nn.BatchNorm1d:
    """Return the normalisation as a module, its tensors those of the graph."""

    def held(name: str | None) -> Tensor | None:
        return None if name is None else getattr(module, name).float()

    found = nn.BatchNorm1d(channels, norm.eps, affine=False)
    found.running_mean, found.running_var = held(norm.mean), held(norm.variance)
    for part, name in (("weight", norm.weight), ("bias", norm.bias)):
        tensor = held(name)
        setattr(found, part, None if tensor is None else nn.Parameter(tensor.detach(), requires_grad=False))
    return found
