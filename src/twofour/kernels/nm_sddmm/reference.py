"""The sampled product in plain torch: what every fast kernel is compared with."""

from __future__ import annotations

from torch import Tensor

from twofour.packing import Packed
from twofour.shapes import Float32, Real


def nm_sddmm_reference(
    left: Real[Tensor, "tokens out"], right: Real[Tensor, "tokens in"], places: Packed
) -> Float32[Tensor, "out kept"]:
    """Return left^T right at the places that a packed 2:4 weight (out, in) keeps, in its order: (out, in / 2)."""
    form = places.header.format
    return form.gather(left.float().t() @ right.float(), form.positions(places.indices))
