"""The weights of a module: prunable ones, masked ones and those of compiled layers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from twofour import layers, masks
from twofour.compiler import CompiledConv, CompiledLinear
from twofour.layers import PrunableWeight, Reduction, whole
from twofour.legality.expectation import Expectation
from twofour.legality.subject import KINDS, Subject
from twofour.masks import Mask
from twofour.packing import Packed
from twofour.patterns import Pattern, parse


def subjects_of(model: nn.Module, expectation: Expectation) -> tuple[list[Subject], list[tuple[str, str]]]:
    """Collect the weights to examine, and the others with their reasons.

    Raises:
        LayerError: A promise names a weight that the model does not have.
        MaskError: A masked module has lost its weight.
    """
    walk = layers.walk(model)
    eligible = {weight.name for weight in walk.weights}
    attached = masks.of(model)
    subjects: list[Subject] = []
    seen: set[str] = set()
    for weight in layers.walk(model, eligibility="any", tied="*").weights:
        names = (weight.name, *weight.aliases)
        seen.update(names)
        mask = next((attached[name] for name in names if name in attached), None)
        promise = expectation.find(*names) or (expectation.everywhere if weight.name in eligible else None)
        if mask is not None:
            subjects.append(_masked(weight.name, weight.kind, mask, promise))
        elif promise is not None or weight.name in eligible:
            subjects.append(_plain(weight, promise))
    # A mask promises even where the walk would not look.
    others = {name: mask for name, mask in attached.items() if name not in seen}
    subjects += [_masked(name, None, mask, expectation.find(name)) for name, mask in others.items()]
    subjects += _compiled(model, expectation)
    seen |= {subject.name for subject in subjects}
    expectation.require_known(seen)
    examined = {subject.name for subject in subjects}
    return subjects, [(skip.name, skip.reason) for skip in walk.skipped if skip.name not in examined]


def _plain(weight: PrunableWeight, promise: Pattern | None) -> Subject:
    return Subject(
        weight.name,
        weight.kind,
        tuple(weight.parameter.shape),
        weight.axis,
        lambda: whole(weight.parameter.detach()),
        promise,
        by="expect" if promise else None,
    )


def _masked(name: str, kind: str | None, mask: Mask, promise: Pattern | None) -> Subject:
    """Hold a weight to what the caller promises, else to its mask's pattern, and to its mask in both cases."""
    weight = getattr(mask.module, mask.attribute, None)  # the value, where something is put over the parameter
    if not isinstance(weight, Tensor):
        weight = mask.parameter
    return Subject(
        name,
        kind or KINDS[weight.ndim],
        tuple(weight.shape),
        mask.axis,
        lambda: whole(weight.detach()),
        promise or mask.pattern,
        lambda: whole(mask.keep),
        by="expect" if promise else "mask",
    )


def _compiled(model: nn.Module, expectation: Expectation) -> Iterator[Subject]:
    for layer, module in model.named_modules():
        if not isinstance(module, CompiledLinear | CompiledConv):
            continue
        name, source = f"{layer}.weight".lstrip("."), module.source()
        shape = tuple(source.header.shape if isinstance(source, Packed) else source.shape)
        eligible = shape[1 - module.axis] % 8 == 0 and shape[module.axis] % 16 == 0  # ASP's rule
        promise, by = expectation.find(name) or (expectation.everywhere if eligible else None), "expect"
        if promise is None and isinstance(source, Packed):
            promise, by = parse(source.header.pattern), "packed form"
        kind = KINDS[len(shape)] if module.axis else "hf_conv1d"
        read = source.unpack if isinstance(source, Packed) else source.detach
        yield Subject(name, kind, shape, Reduction(module.axis), read, promise, by=by if promise else None)
