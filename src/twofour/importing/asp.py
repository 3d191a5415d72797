"""apex ASP's checkpoints: a model's own state dict, with a mask beside each weight that ASP knew.

Of each weight `LAYER.weight` apex (contrib/sparsity/asp.py) registers the buffer `LAYER.__weight_mma_mask`, True where
a value is kept, all True until the masks were computed; with allow_recompute_mask also `LAYER.__weight_mma_pruned_p`,
the values that were pruned. Its first releases had the layer's own name in the buffer's, `fc1.__fc1_mma_mask`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twofour.errors import FormatError, TwofourError
from twofour.importing.base import Found, Source, Sparse, malformed, may_be_weight, require_finite, shown
from twofour.layers import Reduction
from twofour.patterns import parse

BUFFER = re.compile(r"(?P<layer>(?:.*\.)?)__(?P<parameter>[^.]+)_mma_(?P<kind>mask|pruned_p)")
"""Names of apex's buffers; `weight_names` says of which weight."""


@dataclass(frozen=True)
class ASP:
    """apex ASP."""

    name: str = "asp"

    def recognises(self, source: Source) -> bool:
        """See `Format`."""
        return any(BUFFER.fullmatch(name) for name in source.tensors)

    def decode(self, source: Source, axes: Mapping[str, Reduction] | None) -> Found:
        """See `Format`."""
        buffers = {name: match for name in source.tensors if (match := BUFFER.fullmatch(name))}
        plain = {name: tensor for name, tensor in source.tensors.items() if name not in buffers}
        sparse: dict[str, Sparse] = {}
        notes: list[str] = []
        stowed = sum(match["kind"] == "pruned_p" for match in buffers.values())
        for buffer, match in buffers.items():
            if match["kind"] != "mask":
                continue
            names = weight_names(match)
            if (name := next((name for name in names if name in plain), None)) is None:
                raise malformed(source, buffer, f"a mask without `{names[0]}`", "the weight that it belongs to")
            found = _masked(source, name, plain[name], source.tensors[buffer], (axes or {}).get(name, Reduction()))
            if found is None:
                notes.append(f"`{name}` is dense: its mask keeps everything")
            elif name in sparse:
                raise malformed(source, name, "two masks", "one")
            else:
                sparse[name] = found
        if not sparse:
            raise FormatError(
                "the checkpoint is not sparse yet",
                got=f"{source.path}: every ASP mask keeps everything",
                wanted="a checkpoint that was saved after ASP.compute_sparse_masks()",
                remedy="load it as a dense model and call twofour.prune",
            )
        if stowed:
            notes.append(f"the pruned values of {stowed} weights are left out: twofour.compat.asp restores them")
        return Found({name: t for name, t in plain.items() if name not in sparse}, sparse, tuple(notes))


def weight_names(buffer: re.Match[str]) -> tuple[str, ...]:
    """Return the names that the weight of a buffer, a match of `BUFFER`, may have: one, or two in apex's first form."""
    layer, parameter = buffer["layer"], buffer["parameter"]
    names = (f"{layer}{parameter}", f"{layer}weight")
    return names if layer.removesuffix(".").rpartition(".")[2] == parameter else names[:1]


def _masked(source: Source, name: str, weight: Any, mask: Any, axis: Reduction) -> Sparse | None:
    """Return a weight with its mask, None where sparsity was off."""
    both = isinstance(weight, Tensor) and isinstance(mask, Tensor)
    if not both or (mask.dtype, mask.shape) != (torch.bool, weight.shape) or not may_be_weight(weight):
        got = f"weight {shown(weight)}, mask {shown(mask)}"
        raise malformed(source, name, got, "a bool mask of the weight's shape")
    require_finite(source, name, weight)
    if bool(mask.all()):
        return None
    if outside := int((weight.ne(0) & ~mask).sum()):
        raise malformed(
            source, name, f"{outside} values where the mask has none", "a weight that its mask was applied to"
        )
    rule = parse("2:4")
    try:
        legal = rule.check(axis.last(mask.to(torch.uint8)))
    except TwofourError as error:
        raise malformed(source, name, error.got or error.what, "a reduction axis that groups of four divide") from error
    if not legal.ok:
        raise malformed(source, name, f"a mask, {legal.sentence}", f"a 2:4 mask along axis {axis.axis}")
    return Sparse(weight, rule.name, axis.axis, mask)
