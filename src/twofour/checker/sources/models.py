"""The weights of a module: prunable ones, masked ones and those of compiled layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from twofour import layers, masks, quantization
from twofour.checker.weights import KINDS, Expectation, Skipped, Weight, unaligned
from twofour.compiler import CompiledConv, CompiledLinear
from twofour.compiler.codes import is_coded
from twofour.errors import QuantizationError, TrainingError
from twofour.layers import PrunableWeight, Reduction, full_tensor
from twofour.masks import Mask
from twofour.packing import Packed, shape_of
from twofour.patterns import Pattern, parse
from twofour.patterns.base import is_finite
from twofour.quantization import LowBits
from twofour.quantization.carried import over


def weights_of(model: nn.Module, expectation: Expectation) -> tuple[list[Weight], Skipped]:
    """Collect the weights to examine, and the others with their reasons.

    Raises:
        LayerError: A promise names a weight that the model does not have.
        MaskError: A masked module has lost its weight.
        TrainingError: Layers hold kept values alone.
    """
    if stored := layers.describe_stored(model):
        raise TrainingError(
            "a model in training that holds kept values alone cannot be checked",
            got=stored,
            wanted="a plain and masked model",
            remedy="finish() of the handle, or of a copy twofour.training.both_ways.finish(copy), then check",
        )
    walk = layers.walk(model)
    eligible = {weight.name for weight in walk.weights}
    attached = masks.of(model)
    found: list[Weight] = []
    seen: set[str] = set()
    for weight in layers.walk(model, eligibility="any", tied="*").weights:
        seen.update(weight.names)
        mask = next((attached[name] for name in weight.names if name in attached), None)
        promise = expectation.find(*weight.names) or (expectation.everywhere if weight.name in eligible else None)
        if mask is not None:
            found.append(_masked(weight.name, weight.kind, mask, promise))
        elif promise is not None or weight.name in eligible:
            found.append(_plain(weight, promise))
    # A mask promises even where the walk would not look.
    others = {name: mask for name, mask in attached.items() if name not in seen}
    found += [_masked(name, None, mask, expectation.find(name)) for name, mask in others.items()]
    found += _compiled(model, expectation)
    found = list(_low_bits(model, found))
    seen |= {one.name for one in found}
    expectation.require_known(seen)
    examined = {one.name for one in found}
    return found, [(skip.name, skip.reason) for skip in walk.skipped if skip.name not in examined]


def _low_bits(model: nn.Module, found: Iterable[Weight]) -> Iterator[Weight]:
    """Yield weights, those of layers of low bits as their products read them, also where the walk would not look."""
    low = {f"{name}.weight".lstrip("."): (name, held) for name, held in quantization.of(model).items()}
    for one in found:
        yield _rounded(model, one, *low.pop(one.name)) if one.name in low else one
    for key, (name, held) in low.items():
        module = model.get_submodule(name)
        weight, pattern = module.weight, module.pattern if is_coded(module) else None
        assert isinstance(weight, Tensor) and (pattern is None or isinstance(pattern, Pattern))
        shape, by = tuple(weight.shape), None if pattern is None else "packed form"
        plain = Weight(key, KINDS[len(shape)], shape, Reduction(1), weight.detach, pattern, by=by)
        yield _rounded(model, plain, name, held)


def _rounded(model: nn.Module, weight: Weight, name: str, held: LowBits) -> Weight:
    """Return a weight whose values are the whole numbers times their scales; NaN where a step scales nothing."""
    module, notes = model.get_submodule(name), weight.notes
    if not any(tensor.is_meta for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
        try:
            held.require_steps(module, name)
        except QuantizationError as error:
            notes = *notes, f"{error.what}: {error.got}; wanted {error.wanted}"

    def read() -> Tensor:
        try:
            whole, scales = held.whole_weight(module, name)
        except QuantizationError:
            values = weight.read()  # a weight that is not finite has these values itself
            return values if not is_finite(values) else torch.full_like(values, torch.nan)
        return whole.float() * over(scales.detach(), whole)

    return replace(weight, read=read, width=held.widths.name, notes=notes)


def _plain(weight: PrunableWeight, promise: Pattern | None) -> Weight:
    return Weight(
        weight.name,
        weight.kind,
        tuple(weight.parameter.shape),
        weight.axis,
        lambda: full_tensor(weight.parameter.detach()),
        promise,
        by="expect" if promise else None,
    )


def _masked(name: str, kind: str | None, mask: Mask, promise: Pattern | None) -> Weight:
    """Hold a weight to what the caller promises, else to its mask's pattern, and to its mask in both cases."""
    weight = getattr(mask.module, mask.attribute, None)  # the value, where something is put over the parameter
    if not isinstance(weight, Tensor):
        weight = mask.parameter
    return Weight(
        name,
        kind or KINDS[weight.ndim],
        tuple(weight.shape),
        mask.axis,
        lambda: full_tensor(weight.detach()),
        promise or mask.pattern,
        lambda: full_tensor(mask.keep),
        by="expect" if promise else "mask",
    )


def _compiled(model: nn.Module, expectation: Expectation) -> Iterator[Weight]:
    for layer, module in model.named_modules():
        if not isinstance(module, CompiledLinear | CompiledConv):
            continue
        name, source = f"{layer}.weight".lstrip("."), module.source()
        shape = shape_of(source)
        refused = unaligned(shape[1 - module.axis], shape[module.axis])
        promise, by = expectation.find(name) or (None if refused else expectation.everywhere), "expect"
        if promise is None and isinstance(source, Packed) and source.header.sparse:
            promise, by = parse(source.header.pattern), "packed form"
        kind = KINDS[len(shape)] if module.axis else "hf_conv1d"
        read = source.unpack if isinstance(source, Packed) else source.detach
        yield Weight(name, kind, shape, Reduction(module.axis), read, promise, by=by if promise else None)
