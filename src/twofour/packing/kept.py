"""The kept values of a 2:4 weight whose places stay: out of dense values, and into them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from twofour import native
from twofour.packing.pack import Packed, pack
from twofour.patterns import NM
from twofour.shapes import Bool, Real

_MOVED = (torch.float32, torch.bfloat16)
"""Types that native code moves; others go through the format's own, which is the reference."""


def places_of(keep: Bool[Tensor, "rows columns"]) -> Packed:
    """Return the packed form of a mask that keeps two of every four values along its rows, without values.

    Raises:
        PackingError: The mask keeps more than two values of a group.
    """
    return replace(pack(keep.float(), NM(2, 4)), values=torch.empty(0, dtype=torch.float32, device="cpu"))


def mask_of(places: Packed) -> Bool[Tensor, "rows columns"]:
    """Return the mask of what a packed weight keeps, its zeros too."""
    rows, columns = places.header.shape
    ones = torch.ones(rows, columns // 2, dtype=torch.float32, device="cpu")
    return scatter(replace(places, values=ones)) != 0


def gather(places: Packed, dense: Real[Tensor, "rows columns"]) -> Real[Tensor, "rows kept"]:
    """Return the values of `dense` at the places that a packed 2:4 weight of its shape keeps, in their order."""
    if not (dense.is_cpu and dense.dtype in _MOVED):
        return places.header.format.gather(dense.contiguous(), _positions(places, dense.device))
    dense = dense if dense.stride(-1) == 1 else dense.contiguous()
    values = dense.new_empty(len(dense), dense.shape[1] // 2)
    native.extension().kept_gather(dense, places.indices, values, native.threads())
    return values


def scatter(packed: Packed) -> Real[Tensor, "rows columns"]:
    """Return the dense weight of a packed 2:4 one whose values are real and whose rows are its own.

    As `Packed.unpack`, but for indices that are known to be legal, and for values of any real type, whatever the header
    says.
    """
    values = packed.values
    if not (values.is_cpu and values.dtype in _MOVED):
        dense = values.new_zeros(packed.header.shape)
        return packed.header.format.scatter(dense, _positions(packed, dense.device), values)
    dense = values.new_empty(packed.header.shape)
    native.extension().kept_scatter(values.contiguous(), packed.indices, dense, native.threads())
    return dense


def _positions(packed: Packed, device: torch.device) -> Tensor:
    return packed.header.format.positions(packed.indices).to(device)
