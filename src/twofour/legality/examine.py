"""check: walks a model, or takes named tensors, and says which weights obey which pattern along which axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twofour import layers, masks, patterns
from twofour.compiler import CompiledConv, CompiledLinear
from twofour.errors import LayerError, TwofourError
from twofour.layers import Reduction, whole
from twofour.legality.report import Finding, Report
from twofour.legality.rules import RULES, fit
from twofour.packing import Packed
from twofour.patterns import Pattern

# Tightest first: a weight that is 1:4 is also 2:4 and 4:8.
KNOWN = ("1:4", "1:2", "2:4", "4:8-pairs", "4:8", "8:16")
KINDS = {2: "linear", 3: "conv1d", 4: "conv2d", 5: "conv3d"}
"""What a tensor without a model is taken for, by its number of axes."""
FIRST = {2: "hf_conv1d", 3: "conv_transpose1d", 4: "conv_transpose2d", 5: "conv_transpose3d"}
"""The same where its reduction axis is known to be 0."""
# One group in a hundred may be spoilt by later training before a wrong axis is no longer recognised.
WRONG_AXIS_FRACTION = 0.99

Promise = str | Pattern | None


@dataclass(frozen=True)
class _Subject:
    """A weight to examine: as stored, the axis its product sums over, and what was promised."""

    name: str
    kind: str
    stored: Tensor
    axis: Reduction
    promise: Pattern | None = None
    keep: Tensor | None = None

    @property
    def view(self) -> Tensor:
        """The weight with the reduction axis last."""
        return self.axis.last(self.stored)


def check(model: nn.Module, *, expect: str | Pattern | Mapping[str, str | Pattern] | None = None) -> Report:
    """Say per prunable weight whether it is sparse as promised, along the right axis, and for which runtimes.

    A weight is promised by its mask, by its packed form in a compiled model, or by `expect`. Groups lie along `in`
    of a Linear weight and along the input channels of a convolution, separately for each kernel position; the
    alignment rules are in `RULES`.

    Args:
        model: Any module; its weights are not changed.
        expect: A pattern promised for every eligible weight without a mask, or weight names and their patterns.

    Returns:
        A report. `report.ok` is True when every promise holds and at least one weight is promised or sparse.

    Raises:
        PatternError: `expect` does not parse.
        LayerError: `expect` names a weight that the model does not have, or a weight has no values (meta).
    """
    if not isinstance(model, nn.Module):
        raise LayerError(
            "there is no model to check",
            got=type(model).__name__,
            wanted="a torch.nn.Module",
            remedy="for a dict of tensors use twofour.legality.check_weights",
        )
    named, everywhere = _expectation(expect)
    walk = layers.walk(model)
    eligible = {weight.name for weight in walk.weights}
    subjects, seen = _subjects(model, eligible, named, everywhere)
    _refuse_unknown(named, seen)
    examined = {subject.name for subject in subjects}
    skipped = tuple((skip.name, skip.reason) for skip in walk.skipped if skip.name not in examined)
    return Report(tuple(map(_examine, subjects)), skipped)


def _subjects(
    model: nn.Module, eligible: set[str], named: Mapping[str, Pattern], everywhere: Pattern | None
) -> tuple[list[_Subject], set[str]]:
    """Collect the weights to examine, and every name that a promise may use."""
    attached = masks.of(model)
    subjects: list[_Subject] = []
    seen: set[str] = set()
    for weight in layers.walk(model, eligibility="any", tied="*").weights:
        names = (weight.name, *weight.aliases)
        mask = next((attached[name] for name in names if name in attached), None)
        promise = next((named[name] for name in names if name in named), None)
        seen.update(names)
        if weight.name in eligible or mask or promise:
            promised = mask.pattern if mask else promise or everywhere
            stored, keep = whole(weight.parameter.detach()), whole(mask.keep) if mask else None
            subjects.append(_Subject(weight.name, weight.kind, stored, weight.axis, promised, keep))
    for name, mask in attached.items():  # a mask promises even where the walk would not look
        if name not in seen:
            seen.add(name)
            stored, keep = whole(getattr(mask.module, mask.attribute).detach()), whole(mask.keep)
            subjects.append(_Subject(name, KINDS[stored.ndim], stored, mask.axis, mask.pattern, keep))
    for layer, module in model.named_modules():
        if isinstance(module, CompiledLinear | CompiledConv):
            name, source = f"{layer}.weight".lstrip("."), module.source()
            seen.add(name)
            promise = named.get(name, everywhere)
            if isinstance(source, Packed):  # the packed form is the promise
                promise, source = patterns.parse(source.header.pattern), source.unpack()
            kind = KINDS[source.ndim] if module.axis else "hf_conv1d"
            subjects.append(_Subject(name, kind, source.detach(), Reduction(module.axis), promise))
    return subjects, seen


def check_weights(
    weights: Mapping[str, Tensor],
    *,
    expect: str | Pattern | Mapping[str, str | Pattern] | None = None,
    axes: Mapping[str, int] | None = None,
) -> Report:
    """Say the same about named tensors, for instance the content of a checkpoint.

    Floating tensors with 2 axes are taken as Linear weights (out, in), with 3 to 5 as convolution weights
    (out, in, kernel...), unless `axes` says otherwise. An embedding cannot be told from a Linear weight here.

    Args:
        weights: Tensors by name.
        expect: As in `check`.
        axes: Reduction axes other than 1, by name: 0 for Hugging Face's Conv1D and for transposed convolutions.

    Raises:
        PatternError: `expect` does not parse.
        LayerError: `expect` names a tensor that is not among `weights`, or a tensor has no values (meta).
    """
    named, everywhere = _expectation(expect)
    subjects: list[_Subject] = []
    skipped: list[tuple[str, str]] = []
    for name, tensor in weights.items():
        if tensor.ndim not in KINDS or not tensor.numel():
            skipped.append((name, f"shape {tuple(tensor.shape)} is no Linear or convolution weight"))
        elif not tensor.is_floating_point():
            skipped.append((name, f"dtype {tensor.dtype} is not floating"))
        else:
            axis = (axes or {}).get(name, 1)
            kind = KINDS[tensor.ndim] if axis else FIRST[tensor.ndim]
            subjects.append(_Subject(name, kind, tensor.detach(), Reduction(axis), named.get(name, everywhere)))
    _refuse_unknown(named, {subject.name for subject in subjects})
    return Report(tuple(map(_examine, subjects)), tuple(skipped))


def _expectation(
    expect: str | Pattern | Mapping[str, str | Pattern] | None,
) -> tuple[dict[str, Pattern], Pattern | None]:
    if expect is None:
        return {}, None
    if isinstance(expect, Mapping):
        return {name: patterns.parse(text) for name, text in expect.items()}, None
    return {}, patterns.parse(expect)


def _refuse_unknown(named: Mapping[str, Pattern], seen: set[str]) -> None:
    if missing := sorted(set(named) - seen):
        raise LayerError(
            "a promise names a weight that is not there",
            got=", ".join(missing[:5]),
            wanted=f"names among {', '.join(sorted(seen)[:5])}{', ...' if len(seen) > 5 else ''}",
            remedy="check the model that the promise was made for",
        )


def _examine(subject: _Subject) -> Finding:
    try:
        return _finding(subject)
    except TwofourError as error:
        raise error.for_layer(subject.name) from None


def _finding(subject: _Subject) -> Finding:
    stored, view = subject.stored, subject.view
    if stored.is_meta:
        raise LayerError(
            "a weight on the meta device has no values to check",
            got=f"shape {tuple(stored.shape)} on meta",
            wanted="a weight with values",
            remedy="load the checkpoint first",
        )
    judged = subject.promise or patterns.parse("2:4")
    zeros = float((stored == 0).double().mean())
    found = judged.check(view) if view.shape[-1] % judged.group == 0 else None
    wrong_axis, wrong_fraction = _wrong_axis(subject, judged)
    satisfies = _satisfies(view, zeros, judged)
    rows, columns = view.shape[0], view.shape[-1]
    facts = {
        "legal": found is not None and found.ok,
        "legal_fraction": found.legal / found.groups if found else 0.0,
        "wrong_axis": wrong_axis,
        "wrong_fraction": wrong_fraction,
        "first": subject.axis.stored(found.first, tuple(stored.shape)) if found and found.first else None,
        "values": found.values if found else (),
        "zeros": zeros,
        "outside": None if subject.keep is None else int(((stored != 0) & ~subject.keep).sum()),
        "broken": int((~torch.isfinite(stored)).sum()) if stored.is_floating_point() else 0,
    }
    finding = Finding(
        name=subject.name,
        kind=subject.kind,
        shape=tuple(stored.shape),
        axis=f"{'in' if stored.ndim == 2 else 'input channels per group'} = {columns}",
        promised=subject.promise.name if subject.promise else None,
        judged=judged.name,
        satisfies=satisfies,
        fits=tuple(fit(rule, subject.kind, rows, columns, satisfies) for rule in RULES),
        verdict="",
        **facts,
    )
    object.__setattr__(finding, "verdict", _verdict(finding))
    return finding


def _satisfies(view: Tensor, zeros: float, judged: Pattern) -> tuple[str, ...]:
    names = dict.fromkeys((*KNOWN, judged.name))
    fitting = [pattern for pattern in map(patterns.parse, names) if view.shape[-1] % pattern.group == 0]
    # Too few zeros settle it without looking at the groups.
    return tuple(p.name for p in fitting if zeros >= 1 - p.density - 1e-12 and p.check(view).ok)


def _wrong_axis(subject: _Subject, judged: Pattern) -> tuple[str | None, float | None]:
    others: dict[str, Tensor] = {}
    if subject.stored.ndim == 2:
        others["out (the transposed weight)"] = subject.view.T
    else:
        others["output channels"] = subject.stored.movedim(1 - subject.axis.axis, -1)
        if subject.axis.axis and subject.stored.shape[1] > 1 and subject.stored[0, 0].numel() > 1:
            others["the flattened kernel (C*kh*kw)"] = subject.stored.flatten(1)
    best: tuple[str | None, float | None] = (None, None)
    for axis, view in others.items():
        if view.shape[-1] % judged.group == 0:
            found = judged.check(view.contiguous())
            if best[1] is None or found.legal / found.groups > best[1]:
                best = axis, found.legal / found.groups
    return best


def _verdict(finding: Finding) -> str:
    name = finding.judged
    columns = int(finding.axis.rsplit(" ", 1)[1])
    group = patterns.parse(name).group
    wrong = (finding.wrong_fraction or 0.0) >= WRONG_AXIS_FRACTION and finding.zeros > 0
    start = f"{name} broken: " if finding.promised else ""
    if finding.broken:
        return f"{start}{finding.broken} values are NaN or infinite"
    if finding.legal:
        if finding.outside:
            return f"{start}every group is legal, but {finding.outside} values lie outside the mask"
        if finding.zeros == 1.0:
            return "every value is zero"
        return f"{name} kept" if finding.promised else f"{name}, though nothing promised it"
    if columns % group:
        return f"{start}{finding.axis} is not a multiple of {group}"
    if wrong and (finding.wrong_fraction or 0.0) > finding.legal_fraction:
        return f"{start}pruned along the wrong axis: {name} lies along {finding.wrong_axis}, not along {finding.axis}"
    if finding.promised:
        values = " ".join(f"{value:.4g}" for value in finding.values)
        return f"{start}{1 - finding.legal_fraction:.2%} of groups, the first at {finding.first}: {values}"
    if finding.satisfies:
        return f"{finding.satisfies[0]}, though nothing promised it"
    return "dense" if finding.zeros < 0.01 else f"dense pattern, {finding.zeros:.0%} zeros"
