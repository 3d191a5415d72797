"""Weights of one input, each with dense groups of its own, as one weight: what is dense in any is dense in all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from twofour.packing.formats import ConstantCount, HybridRows
from twofour.packing.pack import Packed
from twofour.patterns import Hybrid


def one_below_the_other(weights: Sequence[Packed]) -> Packed | None:
    """Return the rows of N:M weights with and without dense groups as one weight, to the bit.

    Where a group of inputs is dense in some of them, the rows of the others hold it dense too, zeros included.

    Args:
        weights: Of one input (out, in), written alike; one at least has dense groups.

    Returns:
        None where they are not of one N:M and one type, or leave no group that is not dense.
    """
    forms = [weight.header.format for weight in weights]
    rules = [form.pattern for form in forms]
    first = next(rule for rule in rules if isinstance(rule, Hybrid))
    regular = first.regular
    alike = {(weight.header.dtype, weight.header.shape[1:], weight.scales is None) for weight in weights}
    grouped = any(weight.header.group or weight.zeros is not None for weight in weights)
    if grouped or len(alike) > 1 or any(getattr(rule, "regular", rule) != regular for rule in rules):
        return None
    groups = forms[0].reduction // regular.m
    dense = torch.zeros(groups, dtype=torch.bool, device="cpu")
    for weight, form in zip(weights, forms, strict=True):
        if isinstance(form, HybridRows):
            dense[form.dense_groups(weight.indices)] = True
    if dense.all():
        return None
    rows = sum(form.rows for form in forms)
    percent = 100 * int(dense.sum()) / groups or first.percent  # a share that is rounded to no group stays that
    name = Hybrid(regular.n, regular.m, percent).name
    header = replace(weights[0].header, pattern=name, shape=(rows, forms[0].reduction))
    form = header.format
    assert isinstance(form, HybridRows), form
    parts = [_opened(weight, ~dense) for weight in weights]
    numbers, inside = (torch.cat(each) for each in zip(*parts, strict=True))
    places = form.columns(inside, dense.nonzero()[:, 0])
    scales = None if weights[0].scales is None else torch.cat([w.scales for w in weights if w.scales is not None])
    values = header.encoding.store(form.gather(numbers, places))
    return replace(weights[0], header=header, values=values, indices=form.write(places), scales=scales)


def _opened(weight: Packed, sparse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers (rows, in) as they are stored, and where rows have those of the groups that are `sparse`."""
    header, form = weight.header, weight.header.format
    positions = weight.positions()
    stored = header.encoding.read(weight.values, form.kept)
    numbers = form.scatter(stored.new_zeros(header.rows, header.reduction), positions, stored)
    if isinstance(form, ConstantCount):
        return numbers, positions[:, sparse]
    assert isinstance(form, HybridRows), form
    rule = form.pattern
    assert isinstance(rule, Hybrid), rule
    own = torch.ones_like(sparse).index_fill_(0, form.dense_groups(weight.indices), False)
    count = rule.n * int(own.sum())
    return numbers, (positions[:, :count] % rule.m).view(header.rows, -1, rule.n)[:, sparse[own]]
