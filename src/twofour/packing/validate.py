"""What a packed weight must hold: sizes that its header implies, finite values, legal scales and indices."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour.errors import PackingError
from twofour.packing.geometry import Geometry
from twofour.packing.header import WRITE_AGAIN, Header
from twofour.packing.quantize import INT4_LARGEST, INT4_LEAST
from twofour.patterns.base import is_finite

LARGEST_SCALE = torch.finfo(torch.float32).max / 256
"""No whole number of 8 bits times such a scale overflows float32."""


def require_sizes(values: Tensor, indices: Tensor, geometry: Geometry) -> None:
    """Refuse values or indices whose shape or dtype is not what the header implies.

    Raises:
        PackingError: They are not.
    """
    for part, tensor, shape, dtype in (
        ("values", values, geometry.values, geometry.value_dtype),
        ("indices", indices, geometry.indices, torch.uint8),
    ):
        if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
            raise PackingError(
                f"the sizes of a packed weight do not match its header: its {part}",
                got=f"{tuple(tensor.shape)} {tensor.dtype}",
                wanted=f"{shape} {dtype}",
                remedy=WRITE_AGAIN,
                code=f"{part}-size",
            )


def require_values(values: Tensor, geometry: Geometry) -> None:
    """Refuse values that are NaN or infinite, and, behind an odd number of int4 values, a nibble that is not zero.

    Raises:
        PackingError: There is one.
    """
    if not is_finite(values):
        bad = (~torch.isfinite(values)).nonzero()
        where = tuple(bad[0].tolist())
        raise PackingError(
            "the values of a packed weight are not finite",
            got=f"{len(bad)} values that are NaN or infinite, the first {values[where].item()} at {where}",
            wanted="finite values only",
            remedy=WRITE_AGAIN,
            code="values-finite",
        )
    if geometry.int4 and geometry.kept % 2 and bool((values[:, -1] >> 4).any()):
        raise PackingError(
            "the padding of a packed weight's values is not zero",
            got=f"a high nibble behind {geometry.kept} int4 values of a row",
            wanted="zero bits",
            remedy=WRITE_AGAIN,
            code="values-padding",
        )


def require_scales(scales: Tensor | None, zeros: Tensor | None, header: Header) -> None:
    """Refuse scales and zero points that do not belong to the header, or whose numbers mean nothing.

    Raises:
        PackingError: They do not, or one of them is impossible.
    """
    runs = Geometry.of(header).rows, Geometry.of(header).runs
    if scales is None and (header.group or zeros is not None):
        wanted = "scales where the header has groups or the weight zero points"
        raise _scales("missing", f"no scales, zero points {zeros is not None}, group {header.group}", wanted)
    for part, tensor in (("scales", scales), ("zeros", zeros)):
        if tensor is not None and header.dtype not in ("int8", "int4"):
            raise _scales("unwanted", f"{part} beside values in {header.dtype}", "scales with whole numbers only")
        if tensor is not None and (tuple(tensor.shape), tensor.dtype) != (runs, torch.float32):
            raise _scales("size", f"{part} {tuple(tensor.shape)} {tensor.dtype}", f"{runs} torch.float32")
    if scales is not None and not bool(((scales > 0) & (scales <= LARGEST_SCALE)).all()):
        got = "a scale that is not positive, not finite or so large that values overflow"
        raise _scales("value", got, f"positive finite scales, at most {LARGEST_SCALE:.3g}")
    if zeros is not None and not bool(
        ((zeros >= INT4_LEAST) & (zeros <= INT4_LARGEST) & (zeros == zeros.round())).all()
    ):
        raise _scales("zeros", "a zero point outside -8..7 or not whole", "whole zero points from -8 to 7")


def _scales(part: str, got: str, wanted: str) -> PackingError:
    what = "the scales of a packed weight do not fit"
    return PackingError(what, got=got, wanted=wanted, remedy=WRITE_AGAIN, code=f"scales-{part}")


def ascending(stream: Tensor, groups: int) -> bool:
    """Tell whether every nibble of a 2:4 index stream is a legal code, and the padding zero; a few bytes a byte."""
    low = (stream & 3) < (stream >> 2 & 3)
    high = (stream >> 4 & 3) < stream >> 6
    if groups % 2:
        high[:, -1] = stream[:, -1] >> 4 == 0
    return bool((low & high).all())
