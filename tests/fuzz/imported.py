"""What must hold of a foreign checkpoint that was decoded."""

from __future__ import annotations

import torch

from twofour.importing import Imported
from twofour.packing import Packed
from twofour.patterns import parse


def require_sound(found: Imported, draw: int) -> str:
    """Require finite weights that obey their patterns and have packed forms, of one in four; return the format."""
    if draw % 4:
        return found.format
    weights = found.weights()
    for name, entry in found.sparse.items():
        if isinstance(entry.weight, Packed):
            entry.weight.validate()
        dense = weights[name]
        assert bool(torch.isfinite(dense.float()).all()), name
        assert parse(entry.pattern).check(dense.movedim(entry.axis, -1).float()).ok, name
        assert entry.keep is None or not bool((dense.ne(0) & ~entry.keep).any()), name
    assert found.contents().packed.keys() == found.sparse.keys()
    return found.format
