"""How many bytes of a file the weight of a compiled layer takes, before anything is written."""

from __future__ import annotations

from twofour.compiler.replaceable import LayerWeight
from twofour.kernels.dense_matmul import group_of
from twofour.packing import Header, Packed, encodings, has_form, packed_bytes, packed_rule
from twofour.patterns import DENSE


def stored_bytes(entry: LayerWeight, sparse: bool) -> int:
    """Return the bytes of the weight in a file: packed by its pattern, of whole numbers dense too, or as floats.

    Args:
        entry: The layer.
        sparse: Whether it runs so.
    """
    name = entry.computing.stored if sparse else entry.computing.dense_stored
    if encodings.get(name).groups:
        return _bytes_of_groups(entry, sparse)
    for rule in (*([] if entry.pattern is None else [packed_rule(entry.pattern)]), DENSE):
        if has_form(rule, name):
            return packed_bytes(Header(rule.rows.name, name, entry.shape, 1))
    return entry.rows * entry.columns * encodings.get(entry.computing.dense_stored).dtype.itemsize


def in_groups(entry: LayerWeight) -> bool:
    """Whether a weight that runs dense has a form in a file whose groups of inputs share a scale."""
    return entry.columns % group_of(entry.columns) == 0


def _bytes_of_groups(entry: LayerWeight, sparse: bool) -> int:
    """Return the bytes in a file of a weight whose groups of inputs share a scale."""
    name = entry.computing.stored
    own = [entry.pattern] if entry.pattern is not None else []
    if not (sparse or in_groups(entry)):
        rule = next((rule for rule in map(packed_rule, own) if has_form(rule, "float32")), None)
        floats = 4 * entry.rows * entry.columns
        return floats if rule is None else packed_bytes(Header(rule.rows.name, "float32", entry.shape, 1))
    rule = next(rule for rule in (*map(packed_rule, own), DENSE) if has_form(rule, name))
    group, zeros = (
        (entry.computing.group, not entry.computing.symmetric) if sparse else (group_of(entry.columns), False)
    )
    if isinstance(entry.weight, Packed) and entry.computing.keeps(entry.weight):
        group, zeros = entry.weight.header.group, entry.weight.zeros is not None
    return packed_bytes(Header(rule.rows.name, name, entry.shape, 1, group=group), zeros=zeros)
