"""A packed weight in the form of another pattern: the same numbers, scales and zero points, other places for zeros."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from twofour.errors import PackingError
from twofour.packing.header import FORMS, has_form
from twofour.packing.pack import Packed, not_legal, packed_rule
from twofour.patterns import Pattern


def rewrite(packed: Packed, pattern: Pattern) -> Packed:
    """Return the same weight in the packed form of another pattern that it obeys, to the bit.

    Kernels of 2:4 run a 1:4 weight whose groups are written with a second place that holds zero; in a file it takes
    half of that. Whole numbers are not rounded again: their scales and zero points stay.

    Args:
        packed: Any packed weight.
        pattern: What it obeys; of V:N:M and transposable patterns the form of their rows is written.

    Raises:
        PackingError: The weight does not obey `pattern`, or that has no form in its encoding.
    """
    header, rule = packed.header, pattern.rows
    written = replace(header, pattern=packed_rule(pattern).name)
    if header.parsed().rows == rule:
        return replace(packed, header=written)
    if not has_form(rule, header.dtype):
        raise PackingError(
            f"the pattern {rule.name} has no {header.dtype} form",
            got=f"a weight packed as {header.pattern}, dtype {header.dtype}",
            wanted=FORMS,
        )
    real = packed.unpack().movedim(header.axis, -1).flatten(0, -2)
    if not rule.check(real).ok:
        raise not_legal(real, rule)
    form, encoding = written.format, written.encoding
    places = form.places(real)
    values = form.gather(_numbers(packed, real), places)
    return replace(packed, header=written, values=encoding.store(values), indices=form.write(places))


def _numbers(packed: Packed, real: Tensor) -> Tensor:
    """Return the dense weight (rows, reduction) of the numbers as they are stored, zero points where it is zero."""
    if packed.scales is None:
        return real
    header, form = packed.header, packed.header.format
    numbers = header.encoding.read(packed.values, form.kept)
    empty = torch.zeros_like(packed.scales) if packed.zeros is None else packed.zeros
    empty = empty.repeat_interleave(header.rows // len(empty), dim=0)
    dense = empty.to(numbers.dtype).repeat_interleave(header.reduction // header.runs, dim=1)
    return form.scatter(dense, packed.positions(), numbers)
