"""From a weight to a Finding: groups along the right axis and the wrong ones, zeros, ties, runtimes, a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from twofour.checker.runtimes import Fit, fits
from twofour.checker.weights import Weight
from twofour.errors import LayerError, PatternError, TwofourError
from twofour.layers import Reduction
from twofour.patterns import NM, Conformity, GroupStrides, Hybrid, NonzeroBits, PairedNM, Pattern, parse, ties

# Tightest first: a weight that is 1:4 is also 2:4 and 4:8.
KNOWN = ("1:4", "1:2", "2:4", "4:8-pairs", "4:8", "8:16")

WRONG_AXIS_FRACTION = 0.99
"""From here on a wrong axis is recognised: later training may have spoilt one group in a hundred."""

_NARROW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@dataclass(frozen=True)
class Finding:
    """What was found in one prunable weight.

    Attributes:
        name: Name of the weight in the model, for example "encoder.fc1.weight".
        kind: Kind of weight, a name of `layers.KINDS`, "hf_conv1d" or, of an ONNX file, "matmul".
        shape: Shape as stored.
        dtype: Type as stored, "bfloat16".
        axis: Name and size of the reduction axis, for example "in = 768".
        reduction: That axis in the shape as stored.
        promised: Pattern that a mask or the caller promises, or None.
        promised_by: Who promised it: "mask", "expect", "metadata", "packed form", "compressed-tensors", "apex mask",
            or the name of a compressed form, "marlin-24".
        judged: Pattern that the fractions below belong to: the promised one, or "2:4".
        satisfies: Patterns that the weight obeys along the right axis, tightest first.
        legal: Every group obeys the judged pattern.
        legal_fraction: Fraction of groups along the right axis that obey the judged pattern (0 where none fit).
        wrong_axis: The axis, not the reduction axis, along which most groups are legal; None where there is none.
        wrong_fraction: Fraction of legal groups along that axis.
        first: Coordinates in the stored weight of the first value of the first offending group.
        values: Values of that group.
        zeros: Fraction of values that are zero; -0.0 is zero.
        negative_zeros: How many of them are -0.0, which some packers take for a value.
        spare: Groups with fewer values than the judged pattern allows: which zero a mask keeps, the tie rule says.
        ties: Groups where equal magnitudes stand on both sides of the cut: other tools may keep another value there.
            Both None where the judged pattern is neither N:M nor pair-wise (of pairs, ties are not counted).
        outside: Non-zero values where the attached mask says zero; None without a mask.
        broken: Non-finite values.
        fits: One verdict per runtime and type.
        verdict: One sentence.
        notes: What else the reader should know, of the axis or of how the weight was found.
        width: Of a layer of low bits its widths, "w2a8", or how its whole numbers are packed, "s2"; the values are what
            its product multiplies by. None of any other weight.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    axis: str
    reduction: int
    promised: str | None
    promised_by: str | None
    judged: str
    satisfies: tuple[str, ...]
    legal: bool
    legal_fraction: float
    wrong_axis: str | None
    wrong_fraction: float | None
    first: tuple[int, ...] | None
    values: tuple[float, ...]
    zeros: float
    negative_zeros: int
    spare: int | None
    ties: int | None
    outside: int | None
    broken: int
    fits: tuple[Fit, ...]
    verdict: str
    notes: tuple[str, ...] = ()
    width: str | None = None

    @property
    def kept(self) -> bool:
        """Whether a promise was made and holds: every group legal, all values finite, none outside the mask."""
        return self.promised is not None and self.legal and not self.broken and not self.outside

    @property
    def sparse(self) -> bool:
        """Whether the weight obeys some pattern, promised or not; one of zeros alone or with NaN does not."""
        return bool(self.satisfies) and self.zeros < 1.0 and not self.broken


_NONE = Conformity(groups=0, legal=0)


@dataclass(frozen=True)
class _Along:
    """How a pattern is kept along one axis; no groups where it cannot be laid over it."""

    axis: Reduction
    found: Conformity = _NONE
    spare: int | None = None

    @property
    def fraction(self) -> float:
        return self.found.legal / self.found.groups if self.found.groups else 0.0

    @property
    def ok(self) -> bool:
        return self.found.groups > 0 and self.found.ok


def judge(weight: Weight) -> Finding:
    """Examine a weight; its values are read once and left again.

    Raises:
        LayerError: It has no values (meta device).
    """
    try:
        return _judge(weight)
    except TwofourError as error:
        raise error.for_layer(weight.name) from None


def _judge(weight: Weight) -> Finding:
    values = _values(weight)
    bits, pattern = NonzeroBits.of(values), weight.promise or parse("2:4")
    found, note = _right(weight, values, bits, pattern)
    weight = replace(weight, axis=found.axis)
    zeros = 1 - bits.nonzero / bits.count
    satisfies = _satisfies(weight, bits, pattern, zeros, found)
    wrong_axis, wrong_fraction = _wrong_axis(weight, bits, pattern)
    broken = bits.broken if values.is_floating_point() else 0
    finding = Finding(
        name=weight.name,
        kind=weight.kind,
        shape=weight.shape,
        dtype=str(values.dtype).removeprefix("torch."),
        axis=f"{'in' if weight.is_matrix else 'input channels per group'} = {weight.columns}",
        reduction=found.axis.axis,
        promised=weight.promise.name if weight.promise else None,
        promised_by=weight.by,
        judged=pattern.name,
        satisfies=satisfies,
        legal=found.ok,
        legal_fraction=found.fraction,
        wrong_axis=wrong_axis,
        wrong_fraction=wrong_fraction,
        first=found.found.first,
        values=found.found.values,
        zeros=zeros,
        negative_zeros=bits.negative,
        spare=found.spare,
        ties=_ties(values, pattern, found),
        outside=None if weight.keep is None else bits.outside(NonzeroBits.of(weight.keep())),
        broken=broken,
        fits=fits(weight.kind, weight.rows, weight.columns, satisfies, broken),
        verdict="",
        notes=(*weight.notes, *note),
        width=weight.width,
    )
    if weight.unread:
        return _unjudged(finding, weight.unread)
    return replace(finding, verdict=verdict(finding))


def _unjudged(finding: Finding, why: str) -> Finding:
    said = f"{finding.judged} cannot be judged: {why}"
    return replace(finding, satisfies=(), legal=False, legal_fraction=0.0, fits=(), verdict=said)


def _values(weight: Weight) -> Tensor:
    """Read a weight as it lies in memory, on the CPU."""
    values = weight.read().detach()
    if values.is_meta:
        raise LayerError(
            "a weight on the meta device has no values to check",
            got=f"shape {weight.shape} on meta",
            wanted="a weight with values",
            remedy="load the checkpoint first",
        )
    return values.cpu().contiguous()


def _right(weight: Weight, values: Tensor, bits: NonzeroBits, pattern: Pattern) -> tuple[_Along, tuple[str, ...]]:
    """Judge along the axis of the product; where two may be it, along the one that keeps the pattern."""
    found = _along(weight.shape, values, bits, pattern, weight.axis)
    if weight.other is None:
        return found, ()
    other = _along(weight.shape, values, bits, pattern, weight.other)
    shares = " and ".join(
        f"{side.fraction:.1%} along axis {side.axis.axis}" for side in (found, other) if side.found.groups
    )
    said = f"its axis is not known, so both were judged: {shares or 'no groups'} of the groups are {pattern.name}"
    takes_other = not found.ok and other.fraction >= WRONG_AXIS_FRACTION and other.fraction > found.fraction
    return (other if takes_other else found), (said,)


def _along(shape: tuple[int, ...], values: Tensor, bits: NonzeroBits, pattern: Pattern, axis: Reduction) -> _Along:
    if axis.length(shape) % pattern.group:
        return _Along(axis)
    if not isinstance(pattern, NM | PairedNM):
        return _by_check(values, pattern, axis)
    strides = _strides(shape, axis)
    counts = bits.count_groups(pattern, strides)
    legal = counts.groups - counts.offending
    if counts.first is None:
        return _Along(axis, Conformity(counts.groups, legal), counts.spare)
    group = values.flatten()[counts.first : counts.first + pattern.m * strides.inner : strides.inner].to(torch.float64)
    first = tuple(int(index) for index in np.unravel_index(counts.first, shape))
    return _Along(axis, Conformity(counts.groups, legal, first, tuple(group.tolist())), counts.spare)


def _strides(shape: Sequence[int], axis: Reduction) -> GroupStrides:
    return GroupStrides.along(shape, axis.axis, axis.parts)


def _by_check(values: Tensor, pattern: Pattern, axis: Reduction) -> _Along:
    """Judge a pattern that reaches over several rows, in plain torch."""
    view = axis.last(values.float() if values.dtype in _NARROW else values)
    try:
        found = pattern.check(view)
    except PatternError:  # its rows do not divide either
        return _Along(axis)
    first = axis.stored(found.first, tuple(values.shape)) if found.first else None
    return _Along(axis, replace(found, first=first, values=tuple(map(float, found.values))))


def _satisfies(weight: Weight, bits: NonzeroBits, judged: Pattern, zeros: float, found: _Along) -> tuple[str, ...]:
    strides, names = _strides(weight.shape, weight.axis), []
    for pattern in map(parse, dict.fromkeys((*KNOWN, judged.name))):
        # Too few zeros settle it without looking at the groups.
        few = weight.columns % pattern.group or zeros < 1 - pattern.density - 1e-12
        if few and pattern != judged:
            continue
        if pattern == judged:
            kept = found.ok
        else:  # what a tighter pattern implies is not counted again
            implied = any(parse(tighter).within(pattern) for tighter in names)
            kept = implied or (isinstance(pattern, NM | PairedNM) and bits.obeys(pattern, strides))
        names += [pattern.name] if kept else []
    return tuple(names)


def _wrong_axis(weight: Weight, bits: NonzeroBits, judged: Pattern) -> tuple[str | None, float | None]:
    pattern = judged.rows  # what every row obeys of a pattern that reaches over several
    best: tuple[str | None, float | None] = (None, None)
    if not isinstance(pattern, NM | PairedNM):
        return best
    for axis, strides in _others(weight).items():
        if strides.length % pattern.group == 0:
            counts = bits.count_groups(pattern, strides)
            fraction = 1 - counts.offending / counts.groups
            if best[1] is None or fraction > best[1]:
                best = axis, fraction
    return best


def _others(weight: Weight) -> dict[str, GroupStrides]:
    """Return the axes that a prune may have taken by mistake."""
    across = GroupStrides.along(weight.shape, weight.out)
    if weight.is_matrix:
        return {"out (the transposed weight)": across}
    others, shape = {"output channels": across}, weight.shape
    if (weight.out, weight.axis.axis) == (0, 1) and shape[1] > 1 and shape[2:].count(1) < len(shape) - 2:
        others["the flattened kernel (C*kh*kw)"] = GroupStrides(shape[0], GroupStrides.along(shape, 0).inner, 1)
    return others


def _ties(values: Tensor, pattern: Pattern, found: _Along) -> int | None:
    if not isinstance(pattern, NM) or not found.found.groups:
        return None
    # Of a legal group the (n + 1)-th largest magnitude is zero.
    return 0 if found.ok else ties(values, pattern, _strides(values.shape, found.axis))


def verdict(finding: Finding) -> str:
    """Say what was found, the gravest first."""
    if finding.width is not None:
        return f"{finding.width}: {verdict(replace(finding, width=None))}"
    name = finding.judged
    start = f"{name} broken: " if finding.promised else ""
    if finding.broken:
        return f"{start}{finding.broken} values are NaN or infinite"
    if finding.legal:
        return _kept(finding, start)
    if finding.promised and (columns := _does_not_divide(finding)):
        return f"{start}{columns}"
    wrong = finding.wrong_fraction or 0.0
    if wrong >= WRONG_AXIS_FRACTION and finding.zeros > 0 and wrong > finding.legal_fraction:
        return f"{start}pruned along the wrong axis: {name} lies along {finding.wrong_axis}, not along {finding.axis}"
    if finding.promised:
        values = " ".join(f"{value:.4g}" for value in finding.values)
        return f"{start}{1 - finding.legal_fraction:.2%} of groups, the first at {finding.first}: {values}"
    if finding.satisfies:
        return f"{finding.satisfies[0]}, though nothing promised it"
    return "dense" if finding.zeros < 0.01 else f"dense pattern, {finding.zeros:.0%} zeros"


def _kept(finding: Finding, start: str) -> str:
    if finding.outside:
        return f"{start}every group is legal, but {finding.outside} values lie outside the mask"
    if finding.zeros == 1.0:
        return "every value is zero"
    judged = parse(finding.judged)
    regular = judged.regular.name if isinstance(judged, Hybrid) else ""
    which = f": it is {regular}, without dense groups" if regular in finding.satisfies else ""
    return f"{judged.name} kept{which}" if finding.promised else f"{judged.name}, though nothing promised it{which}"


def _does_not_divide(finding: Finding) -> str:
    group = parse(finding.judged).group
    if int(finding.axis.rsplit(" ", 1)[1]) % group:
        return f"{finding.axis} is not a multiple of {group}"
    return "" if finding.first else f"the rows of {finding.shape} are not a multiple of {group}"
