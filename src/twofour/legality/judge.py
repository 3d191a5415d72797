"""From a weight to what is found in it: groups along the right axis and the wrong ones, zeros, ties, runtimes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from twofour.errors import LayerError, PatternError, TwofourError
from twofour.layers import Reduction
from twofour.legality.report import Finding
from twofour.legality.rules import fits
from twofour.legality.subject import Subject
from twofour.legality.verdict import WRONG_AXIS_FRACTION, verdict
from twofour.patterns import NM, VNM, Census, Lie, PairedNM, Pattern, Transposable, parse, ties

# Tightest first: a weight that is 1:4 is also 2:4 and 4:8.
KNOWN = ("1:4", "1:2", "2:4", "4:8-pairs", "4:8", "8:16")

_NARROW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@dataclass(frozen=True)
class _Along:
    """How a pattern is kept along one axis; no groups where it cannot be laid over it."""

    axis: Reduction
    groups: int = 0
    legal: int = 0
    spare: int | None = None
    first: tuple[int, ...] | None = None
    values: tuple[float, ...] = ()

    @property
    def fraction(self) -> float:
        return self.legal / self.groups if self.groups else 0.0

    @property
    def ok(self) -> bool:
        return self.groups > 0 and self.legal == self.groups


def judge(subject: Subject) -> Finding:
    """Examine a weight; its values are read once and left again.

    Raises:
        LayerError: It has no values (meta device).
    """
    try:
        return _judge(subject)
    except TwofourError as error:
        raise error.for_layer(subject.name) from None


def _judge(subject: Subject) -> Finding:
    values = _values(subject)
    census, pattern = Census.of(values), subject.promise or parse("2:4")
    found, note = _right(subject, values, census, pattern)
    subject = replace(subject, axis=found.axis)
    zeros = 1 - census.nonzero / census.count
    satisfies = _satisfies(subject, census, pattern, zeros, found)
    wrong_axis, wrong_fraction = _wrong_axis(subject, census, pattern)
    broken = census.broken if values.is_floating_point() else 0
    finding = Finding(
        name=subject.name,
        kind=subject.kind,
        shape=subject.shape,
        dtype=str(values.dtype).removeprefix("torch."),
        axis=f"{'in' if subject.is_matrix else 'input channels per group'} = {subject.columns}",
        reduction=found.axis.axis,
        promised=subject.promise.name if subject.promise else None,
        promised_by=subject.by,
        judged=pattern.name,
        satisfies=satisfies,
        legal=found.ok,
        legal_fraction=found.fraction,
        wrong_axis=wrong_axis,
        wrong_fraction=wrong_fraction,
        first=found.first,
        values=found.values,
        zeros=zeros,
        negative_zeros=census.negative,
        spare=found.spare,
        ties=_ties(values, pattern, found),
        outside=None if subject.keep is None else census.outside(Census.of(subject.keep())),
        broken=broken,
        fits=fits(subject.kind, subject.rows, subject.columns, satisfies, broken),
        verdict="",
        notes=(*subject.notes, *note),
    )
    return replace(finding, verdict=verdict(finding))


def _values(subject: Subject) -> Tensor:
    """Read a weight as it lies in memory, on the CPU."""
    values = subject.read().detach()
    if values.is_meta:
        raise LayerError(
            "a weight on the meta device has no values to check",
            got=f"shape {subject.shape} on meta",
            wanted="a weight with values",
            remedy="load the checkpoint first",
        )
    return values.cpu().contiguous()


def _right(subject: Subject, values: Tensor, census: Census, pattern: Pattern) -> tuple[_Along, tuple[str, ...]]:
    """Judge along the axis of the product; where two may be it, along the one that keeps the pattern."""
    found = _along(subject.shape, values, census, pattern, subject.axis)
    if subject.other is None:
        return found, ()
    other = _along(subject.shape, values, census, pattern, subject.other)
    shares = " and ".join(f"{side.fraction:.1%} along axis {side.axis.axis}" for side in (found, other) if side.groups)
    said = f"its axis is not known, so both were judged: {shares or 'no groups'} of the groups are {pattern.name}"
    takes_other = not found.ok and other.fraction >= WRONG_AXIS_FRACTION and other.fraction > found.fraction
    return (other if takes_other else found), (said,)


def _along(shape: tuple[int, ...], values: Tensor, census: Census, pattern: Pattern, axis: Reduction) -> _Along:
    if axis.length(shape) % pattern.group:
        return _Along(axis)
    if not isinstance(pattern, NM | PairedNM):
        return _by_check(values, pattern, axis)
    lie = Lie.along(shape, axis.axis, axis.parts)
    tally = census.tally(pattern, lie)
    if tally.first is None:
        return _Along(axis, tally.groups, tally.groups, tally.spare)
    group = values.flatten()[tally.first : tally.first + pattern.m * lie.inner : lie.inner].to(torch.float64)
    first = tuple(int(index) for index in np.unravel_index(tally.first, shape))
    legal = tally.groups - tally.offending
    return _Along(axis, tally.groups, legal, tally.spare, first, tuple(group.tolist()))


def _by_check(values: Tensor, pattern: Pattern, axis: Reduction) -> _Along:
    """Judge a pattern that reaches over several rows, in plain torch."""
    view = axis.last(values.float() if values.dtype in _NARROW else values)
    try:
        found = pattern.check(view)
    except PatternError:  # its rows do not divide either
        return _Along(axis)
    first = axis.stored(found.first, tuple(values.shape)) if found.first else None
    return _Along(axis, found.groups, found.legal, None, first, tuple(map(float, found.values)))


def _satisfies(subject: Subject, census: Census, judged: Pattern, zeros: float, found: _Along) -> tuple[str, ...]:
    lie, names = Lie.along(subject.shape, subject.axis.axis, subject.axis.parts), []
    for pattern in map(parse, dict.fromkeys((*KNOWN, judged.name))):
        # Too few zeros settle it without looking at the groups.
        if subject.columns % pattern.group or zeros < 1 - pattern.density - 1e-12:
            continue
        if pattern == judged:
            kept = found.ok
        elif any(parse(tighter).within(pattern) for tighter in names):
            kept = True
        else:
            assert isinstance(pattern, NM | PairedNM), pattern
            kept = census.obeys(pattern, lie)
        names += [pattern.name] if kept else []
    return tuple(names)


def _wrong_axis(subject: Subject, census: Census, judged: Pattern) -> tuple[str | None, float | None]:
    pattern = judged if isinstance(judged, NM | PairedNM) else _rows(judged)
    best: tuple[str | None, float | None] = (None, None)
    for axis, lie in _others(subject).items():
        if lie.length % pattern.group == 0:
            tally = census.tally(pattern, lie)
            fraction = 1 - tally.offending / tally.groups
            if best[1] is None or fraction > best[1]:
                best = axis, fraction
    return best


def _rows(pattern: Pattern) -> NM:
    """Return what every row obeys of a pattern that reaches over several."""
    assert isinstance(pattern, VNM | Transposable), pattern
    return pattern.rows


def _others(subject: Subject) -> dict[str, Lie]:
    """Return the axes that a prune may have taken by mistake."""
    across = Lie.along(subject.shape, subject.out)
    if subject.is_matrix:
        return {"out (the transposed weight)": across}
    others, shape = {"output channels": across}, subject.shape
    if (subject.out, subject.axis.axis) == (0, 1) and shape[1] > 1 and shape[2:].count(1) < len(shape) - 2:
        others["the flattened kernel (C*kh*kw)"] = Lie(shape[0], Lie.along(shape, 0).inner, 1)
    return others


def _ties(values: Tensor, pattern: Pattern, found: _Along) -> int | None:
    if not isinstance(pattern, NM) or not found.groups:
        return None
    # Of a legal group the (n + 1)-th largest magnitude is zero.
    return 0 if found.ok else ties(values, pattern, Lie.along(values.shape, found.axis.axis, found.axis.parts))
