"""What the time of a whole model follows from beside its calls: sizes, kernels and ranges of all that it holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import MethodType

from torch import Tensor, nn

from twofour.compiler.conv import CompiledConv
from twofour.compiler.graph_bits_linear import BitsLinear
from twofour.compiler.graph_low_bits import BitsConvChain, widths_and_kernels
from twofour.compiler.layer import CompiledLinear, MeasuredLayer
from twofour.compiler.low_bits_conv import ConvOfCodes
from twofour.compiler.recurrent import HeldWeight
from twofour.graph import Program
from twofour.kernels.quantization import DYNAMIC

_Timed = MeasuredLayer | HeldWeight | BitsLinear | BitsConvChain


def held_by_model(fast: nn.Module) -> list[str]:
    """Return what the layers of a model are timed with, each by itself."""
    tensors = [*fast.parameters(), *fast.buffers()]
    return [*_layers(fast.modules()), *map(_tensor, tensors), *widths_and_kernels(fast)]


def held_by_program(program: Program) -> list[str]:
    """Return the same of a rewritten graph, whose products have kernels of their own; they may stand inside others."""
    bound = [one.__self__ if isinstance(one, MethodType) else one for one in program.names.values()]
    roots = [one for one in bound if isinstance(one, nn.Module)]
    tensors = [one for one in bound if isinstance(one, Tensor)]
    return [*_layers(module for root in roots for module in root.modules()), *map(_tensor, tensors)]


def _layers(modules: Iterable[nn.Module]) -> list[str]:
    return [repr(_layer(module)) for module in modules if isinstance(module, _Timed)]


def _layer(layer: _Timed) -> tuple[object, ...]:
    if isinstance(layer, BitsLinear):  # what it does beside its product, which is a module of its own
        kept = [weight.nbytes for weight in layer.layer.prepared.weights]  # which widths decide beside sizes
        coded, answer = (getattr(layer.problem, name, None) for name in ("coded", "answer"))
        return layer.label, kept, coded, answer and (answer.after.bits, answer.steps is None)
    if isinstance(layer, BitsConvChain):
        return layer.label, *map(_link, layer.links)
    facts = layer.dispatch_text, layer.weight_shape
    if isinstance(layer, CompiledConv):
        ranged = layer.problem.quantization
        return *facts, replace(layer.problem, quantization=DYNAMIC), ranged.dynamic, ranged.y_dtype
    if isinstance(layer, CompiledLinear):  # whether there is a static range counts, not its numbers
        ranged = layer.problem.quantization
        return *facts, layer.problem.epilogue, ranged.dynamic, ranged.y_dtype, ranged.bits, ranged.levels
    return facts


def _link(link: ConvOfCodes) -> tuple[object, ...]:
    ranged, answer = link.problem.quantization, link.problem.answer
    codes = answer and (answer.bits, answer.planes, answer.pool)
    inputs = ranged.dynamic, ranged.bits, ranged.levels
    return link.dispatch_text, link.prepared.nbytes, link.problem.geometry, inputs, codes


def _tensor(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
