"""What the values and scales of a packed weight must be; sizes and indices are checked by its format."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour.errors import PackingError
from twofour.packing.formats import WRITE_AGAIN, Format
from twofour.packing.header import Header
from twofour.patterns.base import is_finite

LARGEST_SCALE = torch.finfo(torch.float32).max / 256
"""No whole number of 8 bits times such a scale overflows float32."""


def require_values(values: Tensor, form: Format) -> None:
    """Refuse values that are NaN or infinite, and bits that no value of the encoding is written with.

    Raises:
        PackingError: There is one.
    """
    if not is_finite(values):
        bad = (~torch.isfinite(values)).nonzero()
        where = tuple(map(int, bad[0]))
        raise PackingError(
            "the values of a packed weight are not finite",
            got=f"{len(bad)} values that are NaN or infinite, the first {values[where].item()} at {where}",
            wanted="finite values only",
            remedy=WRITE_AGAIN,
            code="values-finite",
        )
    if flaw := form.encoding.flaw(values, form.kept):
        raise PackingError(
            "the padding of a packed weight's values is not zero"
            if flaw.part == "padding"
            else "the values of a packed weight are illegal",
            got=flaw.got,
            wanted=flaw.wanted,
            remedy=WRITE_AGAIN,
            code=f"values-{flaw.part}",
        )


def require_scales(scales: Tensor | None, zeros: Tensor | None, header: Header) -> None:
    """Refuse scales and zero points that do not belong to the header, or whose numbers mean nothing.

    Raises:
        PackingError: They do not, or one of them is impossible.
    """
    require_scale_sizes(scales, zeros, header)
    if scales is not None and not bool(((scales > 0) & (scales <= LARGEST_SCALE)).all()):
        got = "a scale that is not positive, not finite or so large that values overflow"
        raise _scales("value", got, f"positive finite scales, at most {LARGEST_SCALE:.3g}")
    least, most = header.encoding.bounds
    if zeros is not None and not bool(((zeros >= least) & (zeros <= most) & (zeros == zeros.round())).all()):
        got = f"a zero point outside {least}..{most} or not whole"
        raise _scales("zeros", got, f"whole zero points from {least} to {most}")


def require_scale_sizes(scales: Tensor | None, zeros: Tensor | None, header: Header) -> None:
    """Refuse scales and zero points whose shape or dtype is not what the header implies, whatever their numbers.

    Raises:
        PackingError: They are such.
    """
    outputs = header.rows // header.taps if header.encoding.any_group else header.rows
    sizes = dict.fromkeys(((header.rows, header.runs), (outputs, header.runs)))
    if scales is None and (header.group or zeros is not None):
        wanted = "scales where the header has groups or the weight zero points"
        raise _scales("missing", f"no scales, zero points {zeros is not None}, group {header.group}", wanted)
    for part, tensor in (("scales", scales), ("zeros", zeros)):
        if tensor is not None and not header.encoding.scaled:
            raise _scales("unwanted", f"{part} beside values in {header.dtype}", "scales with whole numbers only")
        if tensor is not None and (tuple(tensor.shape) not in sizes or tensor.dtype is not torch.float32):
            wanted = f"{' or '.join(map(str, sizes))} torch.float32"
            raise _scales("size", f"{part} {tuple(tensor.shape)} {tensor.dtype}", wanted)
    if scales is not None and zeros is not None and scales.shape != zeros.shape:
        raise _scales("size", f"zeros {tuple(zeros.shape)}", f"{tuple(scales.shape)}, as the scales")


def _scales(part: str, got: str, wanted: str) -> PackingError:
    what = "the scales of a packed weight do not fit"
    return PackingError(what, got=got, wanted=wanted, remedy=WRITE_AGAIN, code=f"scales-{part}")
