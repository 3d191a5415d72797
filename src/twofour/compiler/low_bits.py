"""Layers of low bits on measured kernels: products of codes, the same bits as `quantization.in_whole_numbers`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch._C import _is_tracing, _len_torch_dispatch_stack
from torch.compiler import is_compiling

from twofour import quantization
from twofour.compiler.case import Case
from twofour.compiler.choose import Choice
from twofour.compiler.layer import CompiledLinear, PreparedWeights
from twofour.compiler.low_bits_conv import run_conv
from twofour.compiler.plan import LayerPlan, Plan, described
from twofour.compiler.replaceable import IN_FLOATS, no_kernel
from twofour.compiler.stamps import Stamp, has_changed, stamp_of
from twofour.compiler.terms import Terms
from twofour.errors import KernelError
from twofour.kernels.base import FLOATS
from twofour.kernels.bits_matmul import BitWeight
from twofour.kernels.conv import Images
from twofour.kernels.dispatch import DispatchTable
from twofour.kernels.problem import Problem
from twofour.measure.chooser import race
from twofour.quantization import LowBits
from twofour.quantization.carried import WEIGHT_ZERO, over


@dataclass
class Codes:
    """What a layer of low bits runs on: its weight in codes, prepared anew where something it was made from changes.

    Attributes:
        layer: The product, no submodule of the layer.
        stamp: What it was prepared from. What is written through `.data` or numpy, or to tensors made in
            inference mode, leaves no trace and is not seen; nor is, while the model is traced, what was written since
            its last call: call it once before.
    """

    layer: CompiledLinear
    stamp: Stamp

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """Return the answer, None for inputs that floats serve: another dtype or device, or a gradient asked for."""
        if x.dtype not in FLOATS or not x.is_cpu or (x.requires_grad and torch.is_grad_enabled()):
            return None
        if not (is_compiling() or _is_tracing() or _len_torch_dispatch_stack()) and has_changed(self.stamp, module):
            made = _prepared(self.layer.name, module, self.layer.dispatch)
            self.layer, self.stamp = made.layer, made.stamp
        return self.layer(x)


def run_low_bits(
    fast: nn.Module,
    plan: Plan,
    counts: Mapping[str, int],
    terms: Terms,
    images: Mapping[str, Images] | None = None,
) -> Plan:
    """Let the layers of low bits run on the fastest kernels, measured, where those beat floats; returns their plan.

    The float weight stays beside its codes: files hold it, and training goes on from it.

    Args:
        fast: The compiled copy of a model, with its values; what its layers of low bits run on is put into them.
        plan: What was decided for the layers.
        counts: Token counts of an example, by layer.
        terms: What holds for every layer.
        images: Images of an example, by convolution.

    Raises:
        QuantizationError: A step of a layer is zero, NaN or infinite, or a weight is not finite.
    """
    entries = {layer.name: layer for layer in plan.layers}
    found = quantization.of(fast) if terms.computing.device == "cpu" else {}
    found = {name: low for name, low in found.items() if not no_kernel(low, fast.get_submodule(name))}
    for name, low in found.items():
        module, entry = fast.get_submodule(name), entries[name]
        if isinstance(module, nn.Conv2d):
            entries[name] = run_conv(name, module, low, entry, (images or {}).get(name), terms)
        else:
            entries[name] = _run(name, module, low, entry, counts.get(name), terms, plan)
    seen = {name: counts[name] for name in found if name in counts}
    return replace(plan, layers=tuple(entries.values()), counts={**plan.counts, **seen})


def _run(
    name: str, module: nn.Module, low: LowBits, entry: LayerPlan, count: int | None, terms: Terms, plan: Plan
) -> LayerPlan:
    """Choose what one layer runs on, let it run so, and return its plan."""
    weight, problem = _codes(name, module, low), _problem(module, low)
    bias, widths = module.bias, low.widths.name
    given = None if not isinstance(bias, Tensor) else bias.detach().float()
    activations = torch.bfloat16 if module.weight.dtype is torch.bfloat16 else torch.float32
    options = {"dtype": widths, "activations": activations}
    try:
        choice = terms.choose(name, weight, given, count, plan.bytes_before, problem, **options)
    except KernelError as error:  # no row runs here
        return replace(entry, reason=f"dense: {widths}: {str(error).partition(chr(10))[0]}; {IN_FLOATS}")
    runs = _prepared(name, module, choice.dispatch, PreparedWeights(choice.layouts.values()))
    tokens = count or max(choice.times)
    case = Case(problem, weight.shape[1], given, tokens, activations)
    key = terms.cache.key(f"{case.text(widths, weight)}/{choice.dispatch.to_text()}/floats")
    x = torch.zeros(tokens, weight.shape[1], dtype=activations, device="cpu")
    calls = {"kernels": lambda: runs(module, x), "floats": lambda: module(x)}
    seconds = terms.cache.times(key, tuple(calls), lambda: race(calls, seconds=0.1))
    if seconds["floats"] < seconds["kernels"]:
        return replace(entry, reason=f"dense: {widths}: floats are faster here; {IN_FLOATS}")
    low.runs = runs
    dtype = str(activations).removeprefix("torch.")
    options = {"dtype": dtype, "activations": activations, "among": (tokens,)}
    floats = cast(Tensor, module.weight).detach()
    dense = terms.choose(name, floats, given, count, plan.bytes_before, Problem(len(floats)), **options)
    return _described(entry, choice, dense.times[tokens], tokens, (widths, dtype), runs.layer)


def _described(
    entry: LayerPlan,
    choice: Choice,
    dense: Mapping[str, float],
    tokens: int,
    names: tuple[str, str],
    layer: CompiledLinear,
) -> LayerPlan:
    """Return the plan of a layer: how fast it is beside the best dense product of the dtype, `names`: widths, dtype."""
    (widths, dtype), design = names, choice.runs(tokens).layout.removeprefix("bits_")
    ratio = min(dense.values()) / choice.times[tokens][choice.runs(tokens).name]
    reason = f"{widths} {design}: {ratio:.2f}x the speed of the best dense {dtype} product"
    reason += f" ({choice.origin})" if choice.origin else ""
    sizes = entry.bytes_before, entry.bytes_after + layer.prepared.nbytes, entry.bytes_in_file
    made = described(entry.name, entry.kind, entry.shape, tokens, choice, reason, sizes)
    return replace(made, times={n: {**found, **dense} if n == tokens else found for n, found in made.times.items()})


def _prepared(name: str, module: nn.Module, dispatch: DispatchTable, prepared: PreparedWeights | None = None) -> Codes:
    """Return a layer's product by a dispatch table, its weight prepared unless that is given."""
    low, stamp = quantization.held_by(module), stamp_of(module)
    assert low is not None
    if prepared is None:
        weight = _codes(name, module, low)
        prepared = PreparedWeights([row.prepare(weight) for row in dispatch.by_layout.values()])  # pyright: ignore
    bias = module.bias if isinstance(module.bias, Tensor) else None
    problem = _problem(module, low)
    return Codes(CompiledLinear(name, module.weight.shape[1], problem, dispatch, prepared, bias), stamp)  # pyright: ignore


def _codes(name: str, module: nn.Module, low: LowBits) -> BitWeight:
    whole, scales = low.whole_weight(module, name)
    scales, zeros = scales.detach().float(), None
    if low.shifted:
        zeros = module.get_buffer(WEIGHT_ZERO).view_as(scales)
        whole = whole + over(zeros, whole).to(whole.dtype)
        zeros = zeros.to(torch.int8)
    return BitWeight(low.widths.weights.codes_of(whole), low.widths.levels, scales, zeros)


def _problem(module: nn.Module, low: LowBits) -> Problem:
    return Problem(len(module.weight), quantization=low.range(module))  # pyright: ignore[reportArgumentType]
