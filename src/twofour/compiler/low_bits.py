"""Layers of low bits on measured kernels: products of codes, the same bits as `quantization.in_whole_numbers`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from twofour import masks, quantization
from twofour.compiler.case import Case
from twofour.compiler.choose import Choice, candidates
from twofour.compiler.codes import Codes, codes_of, hold_codes, is_coded
from twofour.compiler.layer import CompiledLinear, PreparedWeights
from twofour.compiler.low_bits_conv import run_conv
from twofour.compiler.plan import LayerPlan, Plan, described
from twofour.compiler.replaceable import IN_FLOATS, no_kernel
from twofour.compiler.terms import Terms
from twofour.compiler.unpacked import Reads
from twofour.errors import KernelError
from twofour.kernels import find
from twofour.kernels.base import Row
from twofour.kernels.bits_matmul import BitWeight
from twofour.kernels.conv import Images
from twofour.kernels.dispatch import DispatchTable
from twofour.kernels.problem import Problem
from twofour.measure.chooser import race
from twofour.patterns import DENSE
from twofour.quantization import LowBits
from twofour.quantization.stored import shared

TIED = "; its float weight stays, which another layer has too"

ZEROS = "; no kernel of codes skips its zeros of {}"
"""What the plan says of a mask whose zeros are multiplied: there is no row for them."""


class LinearOfCodes(CompiledLinear):
    """The product of a Linear of low bits."""

    traced = True

    @classmethod
    def of(
        cls, name: str, module: nn.Linear, dispatch: DispatchTable, prepared: PreparedWeights | None = None
    ) -> LinearOfCodes:
        """Return a layer's product by a dispatch table, its weight prepared unless that is given."""
        low = quantization.held_by(module)
        assert low is not None
        if prepared is None:
            weight = codes_of(name, module, low)
            prepared = PreparedWeights([row.prepare(weight) for row in dispatch.by_layout.values()])  # pyright: ignore
        problem = _problem(name, module, low)
        return cls(name, module.in_features, problem, dispatch, prepared, cast(Tensor | None, module.bias))

    def takes(self, x: Tensor) -> bool:
        """Tell whether kernels read such an input."""
        return x.dtype in self.reads

    def anew(self, module: nn.Linear) -> LinearOfCodes:
        """Return the same for what the layer holds now."""
        return self.of(self.name, module, self.dispatch, self.prepared if is_coded(module) else None)

    def restored(self) -> BitWeight:
        """Return the weight (out, inputs)."""
        return cast(BitWeight, self.prepared.weights[0].restore())


def require_steps(model: nn.Module) -> None:
    """Refuse steps of layers of low bits that scale nothing: of the model, whatever its example.

    Raises:
        QuantizationError: One is zero, NaN or infinite.
    """
    for name, low in quantization.of(model).items():
        low.require_steps(model.get_submodule(name), name)


def run_low_bits(
    fast: nn.Module,
    plan: Plan,
    counts: Mapping[str, int],
    terms: Terms,
    images: Mapping[str, Images] | None = None,
) -> Plan:
    """Let the layers of low bits run on the fastest kernels, measured, where those beat floats; returns their plan.

    Codes take the place of the float weight, as packed weights do in other compiled layers, unless another layer has it
    too.

    Args:
        fast: The compiled copy of a model, with its values; what its layers of low bits run on is put into them.
        plan: What was decided for the layers; those kept dense stay so.
        counts: Token counts of an example, by layer.
        terms: What holds for every layer.
        images: Images of an example, by convolution.

    Raises:
        QuantizationError: A step of a layer is zero, NaN or infinite, or a weight is not finite.
    """
    entries = {layer.name: layer for layer in plan.layers}
    found = {name: low for name, low in quantization.of(fast).items() if name not in plan.kept_dense}
    if terms.computing.device != "cpu":
        why = f"no kernel of codes on a GPU; {IN_FLOATS}"
        said = {name: replace(entries[name], reason=f"dense: {low.widths.name}: {why}") for name, low in found.items()}
        return replace(plan, layers=tuple({**entries, **said}.values()))
    found = {name: low for name, low in found.items() if not no_kernel(low, fast.get_submodule(name))}
    reads, tied = Reads(), shared(fast)
    for name, low in found.items():
        module, entry = fast.get_submodule(name), entries[name]
        mask = masks.of(module).get("weight")
        if isinstance(module, nn.Conv2d):
            codes, entry = run_conv(name, module, low, entry, (images or {}).get(name), terms)
        else:
            codes, entry = _run(name, cast(nn.Linear, module), low, entry, counts.get(name), terms, plan)
        if codes is not None and id(module.weight) in tied:
            sizes = {"bytes_after": entry.bytes_before + entry.bytes_after}
            low.runs, entry = codes, replace(entry, reason=entry.reason + TIED, **sizes)
        elif codes is not None:
            hold_codes(name, module, codes, reads)
        skips = any(find(row, Row).sparse for found in entry.times.values() for row in found)
        if codes is not None and not skips and mask is not None and mask.pattern != DENSE:
            entry = replace(entry, reason=entry.reason + ZEROS.format(mask.pattern.name))
        entries[name] = entry
    seen = {name: counts[name] for name in found if name in counts}
    shown = {name: size for name, size in (images or {}).items() if name in found}
    return replace(plan, layers=tuple(entries.values()), counts={**plan.counts, **seen}, images=shown)


def _run(
    name: str, module: nn.Linear, low: LowBits, entry: LayerPlan, count: int | None, terms: Terms, plan: Plan
) -> tuple[Codes | None, LayerPlan]:
    """Choose what one layer runs on; return it, None where floats serve, and the layer's plan.

    Its codes take the place of its float weight, so that one of the two serves all calls: where no example says how
    many tokens, the faster one of the fewest and the most that are measured, by the product of both ratios.
    """
    weight, problem = codes_of(name, module, low), _problem(name, module, low)
    bias, widths = module.bias, low.widths.name
    given = None if not isinstance(bias, Tensor) else bias.detach().float()
    activations = torch.bfloat16 if module.weight.dtype is torch.bfloat16 else torch.float32
    options = {"dtype": widths, "activations": activations}
    try:
        candidates(weight, problem=problem)
    except KernelError as error:  # no row runs here
        return None, replace(entry, reason=f"dense: {widths}: {error.what}; {IN_FLOATS}")
    choice = terms.choose(name, weight, given, count, plan.bytes_before, problem, **options)
    prepared = PreparedWeights(choice.layouts.values())
    runs = Codes.of(module, lambda: LinearOfCodes.of(name, module, choice.dispatch, prepared))
    tokens = count or max(choice.times)
    ratio = 1.0
    for some in (tokens,) if count else sorted({min(choice.times), tokens}):
        case = Case(problem, weight.shape[1], given, some, activations)
        key = terms.cache.key(f"{case.text(widths, weight)}/{choice.dispatch.to_text()}/floats")
        x = torch.zeros(some, weight.shape[1], dtype=activations, device="cpu")
        calls = {"kernels": partial(runs, module, x), "floats": partial(module, x)}
        seconds = terms.cache.times(key, tuple(calls), partial(race, calls, seconds=0.1))
        ratio *= seconds["floats"] / seconds["kernels"]
    if ratio < 1:
        return None, replace(entry, reason=f"dense: {widths}: floats are faster here; {IN_FLOATS}")
    dtype = str(activations).removeprefix("torch.")
    options = {"dtype": dtype, "activations": activations, "among": (tokens,)}
    floats = module.weight.detach()
    dense = terms.choose(name, floats, given, count, plan.bytes_before, Problem(len(floats)), **options)
    return runs, _described(entry, choice, dense.times[tokens], tokens, (widths, dtype), prepared.nbytes)


def _described(
    entry: LayerPlan,
    choice: Choice,
    dense: Mapping[str, float],
    tokens: int,
    names: tuple[str, str],
    nbytes: int,
) -> LayerPlan:
    """Return the plan of a layer: how fast it is beside the best dense product of the dtype, `names`: widths, dtype."""
    (widths, dtype), row = names, choice.runs(tokens)
    design = row.layout.removeprefix("bits_").replace("2x4_", "2:4 ")
    ratio = min(dense.values()) / choice.times[tokens][row.name]
    reason = f"{widths} {design}: {ratio:.2f}x the speed of the best dense {dtype} product"
    kept, whole = (choice.at(tokens, sparse=sparse) for sparse in (True, False))
    if kept is not None and whole is not None:
        both = f", {whole / kept:.2f}x that of the best dense product of codes"
        reason += both if row.sparse else f"; skipping the zeros of 2:4 takes {kept / whole:.2f}x its time here"
    reason += f" ({choice.origin})" if choice.origin else ""
    sizes = entry.bytes_before, nbytes, entry.bytes_in_file
    made = described(entry.name, entry.kind, entry.shape, tokens, choice, reason, sizes)
    return replace(made, times={n: {**found, **dense} if n == tokens else found for n, found in made.times.items()})


def _problem(name: str, module: nn.Linear, low: LowBits) -> Problem:
    return Problem(module.out_features, quantization=low.range(module, name))
