"""The layout of a ragged batch in plain torch: what `lay_out` has to find."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour.shapes import Int, Shaped


def reference(
    mask: Shaped[Tensor, "sequences length"], room: int
) -> tuple[Int[Tensor, " room"], Int[Tensor, " ends"], Int[Tensor, "sequences length"]]:
    """Return rows, offsets and places of a mask as `Layout` has them; arguments as in `lay_out`."""
    real = mask != 0
    found = real.flatten().nonzero().flatten()
    rows = torch.cat([found, found[:1].expand(room - len(found))])
    ends = real.sum(1).cumsum(0)
    offsets = torch.cat([ends.new_zeros(1), ends, ends.new_tensor([room])])
    places = torch.full(mask.shape, -1, dtype=torch.int64, device=mask.device)
    places.view(-1)[found] = torch.arange(len(found), device=mask.device)
    return rows, offsets, places
