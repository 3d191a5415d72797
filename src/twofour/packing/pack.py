"""Dense weight <-> canonical packed form: kept values in order, and their positions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twofour import native
from twofour.errors import PackingError
from twofour.packing.geometry import Geometry
from twofour.packing.header import DTYPES, FORMS, Header, has_form
from twofour.packing.indices import decode, encode, row_bytes
from twofour.packing.quantize import GROUPS, dequantize, to_int4, to_int8
from twofour.packing.validate import ascending, require_scales, require_sizes, require_values
from twofour.patterns import NM, VNM, PairedNM, Pattern, parse
from twofour.patterns.base import is_finite, non_finite, require_groups, require_memory


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight in the canonical packed form.

    Attributes:
        header: Pattern, dtype, dense shape and reduction axis.
        values: Kept values (rows, kept per row) in the dtype of `DTYPES`; int4: uint8, two values a byte, low first.
        indices: uint8 (rows, bytes per row); see `twofour.packing.indices`.
        scales: For whole numbers that stand for real ones: float32 (rows, reduction / header.group), (rows, 1) when
            group is 0; else None.
        zeros: Whole numbers in float32 that stand for zero, of the scales' shape; None: zero stands for zero.
    """

    header: Header
    values: Tensor
    indices: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of values, indices, scales and zero points."""
        parts = (self.values, self.indices, self.scales, self.zeros)
        return sum(part.nbytes for part in parts if part is not None)

    def positions(self) -> Tensor:
        """Return the validated positions of the kept values in their groups: int64 (rows, groups, n).

        Raises:
            PackingError: Sizes do not match the header, or an index is illegal.
        """
        geometry = Geometry.of(self.header)
        require_sizes(self.values, self.indices, geometry)
        found = decode(self.indices, geometry.groups, geometry.kept_units, geometry.units, geometry.tf32)
        if geometry.width == 1:
            return found
        return (found.unsqueeze(-1) * 2 + torch.arange(2, device=found.device)).flatten(-2)

    def validate(self) -> None:
        """Check sizes, every value and every index, without building positions where the pattern is 2:4.

        Raises:
            PackingError: Sizes do not match the header, a value is NaN or infinite, or an index is illegal.
        """
        geometry = Geometry.of(self.header)
        require_sizes(self.values, self.indices, geometry)
        require_values(self.values, geometry)
        require_scales(self.scales, self.zeros, self.header)
        if (geometry.kept_units, geometry.units) != (2, 4):
            self.positions()
            return
        if not ascending(self.indices, geometry.groups):
            self.positions()  # raises, naming the place

    def transposed(self) -> Packed:
        """Return the same weight with its two axes exchanged, on the same bytes: the packed rows are the same."""
        assert len(self.header.shape) == 2, self.header
        turned = replace(self.header, shape=self.header.shape[::-1], axis=1 - self.header.axis)
        return replace(self, header=turned)

    def unpack(self) -> Tensor:
        """Return the dense weight, exactly as it was packed (-0.0 that was dropped comes back as 0.0).

        With scales it is the float32 weight that the whole numbers stand for.

        Raises:
            PackingError: Sizes do not match the header, or an index is illegal.
        """
        header, geometry = self.header, Geometry.of(self.header)
        positions = self.positions()
        values = read_int4(self.values, geometry.kept) if header.dtype == "int4" else self.values
        if self.scales is not None:
            values = dequantize(values, self.scales, self.zeros)
        dense = torch.zeros(header.rows, geometry.groups, geometry.group, dtype=values.dtype, device=values.device)
        dense.scatter_(-1, positions, values.view(positions.shape))
        last = [size for axis, size in enumerate(header.shape) if axis != header.axis]
        return dense.view(*last, header.reduction).movedim(-1, header.axis).contiguous()


def pack(
    weight: Tensor,
    pattern: str | Pattern,
    dtype: str | torch.dtype | None = None,
    *,
    axis: int = -1,
    group: int = 64,
    symmetric: bool = True,
) -> Packed:
    """Write a weight that obeys `pattern` in the canonical packed form.

    Args:
        weight: Dense weight on the CPU, any shape; float32, bfloat16, float16, or int8 (int4: int8 in -8..7).
        pattern: N:M, "4:8-pairs", or V:N:M, which is written as its rows' N:M, as is "2:4-transposable"; `weight`
            must obey it along `axis`.
        dtype: Encoding of the kept values: a float dtype (rounded to it), "int8", "int4" or "tf32" (1:2 only); default
            the weight's own. A floating weight becomes int8 with one scale per row, int4 with one per `group`; int8
            weights are taken as they are, without scales (int4: pairs only).
        axis: Reduction axis: -1 for a Linear, 1 for a convolution.
        group: Inputs that share a scale in int4: 32, 64 or 128, a divisor of the reduction.
        symmetric: Whether int4 has no zero points.

    Raises:
        PackingError: The weight does not obey the pattern, or cannot be written in `dtype` (too large for it, say).
        PatternError: The pattern does not divide the axis, or the weight holds NaN or infinity.

    Example:
        >>> packed = pack(torch.tensor([[1.0, 0.0, 0.0, 2.0]]), "2:4")
        >>> packed.values.tolist(), packed.indices.tolist()
        ([[1.0, 2.0]], [[12]])
    """
    rule = packed_rule(parse(pattern))
    require_memory(weight, "a weight")
    moved = weight.detach().resolve_neg().movedim(axis, -1) if weight.ndim else weight
    require_groups(rule, moved, "a weight")
    if moved.device.type != "cpu":
        moved = moved.cpu()
    name = _encoding(rule, weight.dtype, dtype)
    rounded = name in ("int8", "int4") and weight.is_floating_point()
    per_scale = _scaled(rule, moved.shape[-1], group) if rounded and name == "int4" else 0
    header = Header(rule.name, name, tuple(weight.shape), axis % weight.ndim, group=group if per_scale else 0)
    flat = moved.reshape(-1, moved.shape[-1]).to(torch.float32 if rounded else DTYPES[name])
    if not is_finite(flat):
        raise _overflow(weight, flat.dtype) if is_finite(weight) else non_finite("a weight", weight)
    if rule == NM(2, 4) and flat.dtype == torch.float32:
        values, indices = _compress_native(flat.contiguous(), moved, rule)
    else:
        if not rule.check(moved).ok:
            raise not_legal(moved, rule)
        values, indices = _compress(flat, rule.rows, header)
    scales = zeros = None
    if per_scale:
        values, scales, zeros = to_int4(values, per_scale, symmetric)
    elif rounded:
        values, scales = to_int8(values)
    return Packed(header, write_int4(values) if name == "int4" else values, indices, scales, zeros)


def packed_rule(pattern: Pattern) -> Pattern:
    """Return the pattern that the header of a packed weight names: V:N:M itself, of others what their rows obey."""
    return pattern if isinstance(pattern, VNM) else pattern.rows


def _compress_native(flat: Tensor, moved: Tensor, rule: Pattern) -> tuple[Tensor, Tensor]:
    rows, columns = flat.shape
    values = torch.empty(rows, columns // 2, dtype=torch.float32, device="cpu")
    indices = torch.empty(rows, row_bytes(columns // 4, 2, 4), dtype=torch.uint8, device="cpu")
    row = native.best("nm_compress").index
    if native.extension().nm_compress(row, flat, values, indices, native.threads()):
        raise not_legal(moved, rule)
    return values, indices


def _compress(flat: Tensor, rule: Pattern, header: Header) -> tuple[Tensor, Tensor]:
    geometry = Geometry.of(header)
    places = kept_places(flat, rule, geometry)
    values = flat.view(len(flat), geometry.groups, geometry.group).gather(-1, places).flatten(1)
    units = places[..., :: geometry.width] // geometry.width
    return values, encode(units, geometry.units, geometry.tf32)


def kept_places(flat: Tensor, rule: Pattern, geometry: Geometry) -> Tensor:
    """Return where the kept values of a weight (rows, reduction) lie in their groups: int64 (rows, groups, n)."""
    keep = rule.project(flat, absolute=True).view(len(flat), geometry.groups, geometry.group)
    return keep.nonzero()[:, -1].view(len(flat), geometry.groups, -1)


def _encoding(rule: Pattern, weight: torch.dtype, asked: str | torch.dtype | None) -> str:
    name = asked if isinstance(asked, str) else str(asked or weight).removeprefix("torch.")
    whole = name in ("int8", "int4")
    if name not in DTYPES or not (weight.is_floating_point or (whole and weight == torch.int8)):
        raise PackingError(
            "the weight cannot be written in this dtype",
            got=f"a {weight} weight, dtype {name!r}",
            wanted="float32, bfloat16, float16, tf32, int8 or int4 from a floating weight; int8 or int4 from int8",
        )
    pairs = weight == torch.int8  # whole numbers without scales have the form that hardware reads
    if not has_form(rule, name) or (name == "int4" and isinstance(rule, PairedNM) != pairs):
        raise PackingError(
            f"the pattern {rule.name} has no {name} form",
            got=f"pattern {rule.name}, dtype {name}",
            wanted=f"{FORMS}; pairs from int8, groups from floats",
        )
    return name


def _scaled(rule: Pattern, reduction: int, group: int) -> int:
    """Return how many kept values share a scale."""
    assert isinstance(rule, NM | VNM), rule
    if group not in GROUPS or reduction % group or group % rule.m:
        raise PackingError(
            "the weight cannot be cut into groups with a scale each",
            got=f"groups of {group}, a reduction of {reduction}, pattern {rule.name}",
            wanted=f"groups of {', '.join(map(str, GROUPS))} that divide the reduction, in whole groups of {rule.m}",
            remedy="choose another group size, or dtype int8, which has one scale per row",
        )
    return group // rule.m * rule.n


def not_legal(weight: Tensor, rule: Pattern) -> PackingError:
    """Build the error for a weight that does not obey a pattern."""
    found = rule.check(weight)
    return PackingError(
        f"the weight does not obey {rule.name}",
        got=f"{found.sentence}: {[round(value, 6) for value in found.values]}",
        wanted=f"at most {rule.density:.0%} non-zeros in each group of {rule.group} along the reduction axis",
        remedy="prune first: twofour.prune(model, ...), or weight *= pattern.project(weight, absolute=True)",
    )


def _overflow(weight: Tensor, dtype: torch.dtype) -> PackingError:
    name = str(dtype).removeprefix("torch.")
    return PackingError(
        f"the weight's values overflow {name}",
        got=f"{weight.abs().max().item():g} as the largest magnitude",
        wanted=f"magnitudes <= {torch.finfo(dtype).max:g}",
        remedy="dtype bfloat16 reaches as far as float32; or scale the weight down" if name == "float16" else None,
    )


def write_int4(values: Tensor) -> Tensor:
    """Return whole numbers from -8 to 7 (rows, count), two a byte, the first in the low half.

    Raises:
        PackingError: A number is outside.
    """
    if int(values.min()) < -8 or int(values.max()) > 7:
        raise PackingError(
            "the weight cannot be written as int4",
            got=f"values from {int(values.min())} to {int(values.max())}",
            wanted="whole numbers from -8 to 7",
        )
    nibbles = values.to(torch.uint8) & 0xF
    nibbles = torch.nn.functional.pad(nibbles, (0, nibbles.shape[1] % 2))
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4


def read_int4(stored: Tensor, kept: int) -> Tensor:
    """Return the first `kept` numbers of each row of what `write_int4` returned, int8."""
    nibbles = torch.stack((stored & 0xF, stored >> 4), -1).flatten(1)[:, :kept].to(torch.int8)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)
