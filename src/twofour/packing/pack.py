"""Dense weight <-> canonical packed form: kept values in order, and their positions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twofour import native
from twofour.errors import PackingError
from twofour.packing import encodings
from twofour.packing.encodings import Encoding, dequantize
from twofour.packing.formats import Format
from twofour.packing.header import FORMS, Header, has_form, read_pattern
from twofour.packing.validate import require_scale_sizes, require_scales, require_values
from twofour.patterns import NM, VNM, Dense, PairedNM, Pattern
from twofour.patterns.base import is_finite, non_finite, require_groups, require_memory
from twofour.shapes import Int64, Real


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight in the canonical packed form.

    Attributes:
        header: Pattern, dtype, dense shape and reduction axis.
        values: Kept values (rows, kept per row) as `header.encoding` stores them; int4: two a byte, low first.
        indices: uint8 (rows, bytes per row); see `twofour.packing.formats`.
        scales: For whole numbers that stand for real ones: float32 (rows, reduction / header.group), (rows, 1) when
            group is 0; else None. Low bits: also a row of scales for each output, (rows / header.taps, ...).
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

    def positions(self) -> Int64[Tensor, "*places"]:
        """Return the validated positions of the kept values in their groups: int64 (rows, groups, n).

        Raises:
            PackingError: Sizes do not match the header, or an index is illegal.
        """
        form = self.header.format
        form.require_sizes(values=self.values, indices=self.indices)
        return form.positions(self.indices)

    def validate(self) -> None:
        """Check sizes, every value and every index, without building positions where the pattern is 2:4.

        Raises:
            PackingError: Sizes do not match the header, a value is NaN or infinite, or an index is illegal.
        """
        form = self.header.format
        form.require_sizes(values=self.values, indices=self.indices)
        require_values(self.values, form)
        require_scales(self.scales, self.zeros, self.header)
        form.validate(self.indices)

    def transposed(self) -> Packed:
        """Return the same weight with its two axes exchanged, on the same bytes: the packed rows are the same."""
        assert len(self.header.shape) == 2, self.header
        turned = replace(self.header, shape=self.header.shape[::-1], axis=1 - self.header.axis)
        return replace(self, header=turned)

    def unpack(self) -> Tensor:
        """Return the dense weight, exactly as it was packed (-0.0 that was dropped comes back as 0.0).

        With scales it is the float32 weight that the whole numbers stand for.

        Raises:
            PackingError: Sizes do not match the header, those of scales and zero points too, or an index is illegal.
        """
        header, form, positions = self.header, self.header.format, self.positions()
        require_scale_sizes(self.scales, self.zeros, header)
        values, scales, zeros = (
            header.encoding.read(self.values, form.kept),
            self._rows_of("scales"),
            self._rows_of("zeros"),
        )
        if scales is not None and form.of_rows:
            values = dequantize(values, scales, zeros)
        empty = torch.zeros(header.rows, header.reduction, dtype=values.dtype, device=values.device)
        if zeros is not None and not form.of_rows:  # what is left out stands for zero too
            empty += zeros.to(values.dtype).repeat_interleave(header.reduction // header.runs, dim=1)
        last = [size for axis, size in enumerate(header.shape) if axis != header.axis]
        dense = form.scatter(empty, positions, values)
        if scales is not None and not form.of_rows:
            dense = dequantize(dense, scales, zeros)
        return dense.view(*last, header.reduction).movedim(-1, header.axis).contiguous()

    def _rows_of(self, part: str) -> Tensor | None:
        """Return scales or zero points, a row for each row of the weight: those of an output serve its whole kernel."""
        found: Tensor | None = getattr(self, part)
        return found if found is None else found.repeat_interleave(self.header.rows // len(found), dim=0)


def dense_of(weight: Packed | Tensor) -> Tensor:
    """Return the values of a weight: opened where it is packed, detached where it is dense."""
    return weight.unpack() if isinstance(weight, Packed) else weight.detach()


def shape_of(weight: Packed | Tensor) -> tuple[int, ...]:
    """Return the dense shape of a weight, packed or not."""
    return tuple(weight.header.shape if isinstance(weight, Packed) else weight.shape)


def pack(
    weight: Real[Tensor, "*shape"],
    pattern: str | Pattern,
    dtype: str | torch.dtype | None = None,
    *,
    axis: int = -1,
    group: int | None = None,
    symmetric: bool = True,
) -> Packed:
    """Write a weight that obeys `pattern` in the canonical packed form.

    Args:
        weight: Dense weight on the CPU, any shape; float32, bfloat16, float16, or int8 (int4: int8 in -8..7; low bits:
            int8 or int16).
        pattern: N:M, "4:8-pairs", "block:RxC@S", or V:N:M, which is written as its rows' N:M, as is
            "2:4-transposable"; `weight` must obey it along `axis`. "dense" for int8 and low bits.
        dtype: Encoding of the kept values: a float dtype (rounded to it), "int8", "int4", "tf32" (1:2 only), or of low
            bits "u1" to "u8", "s1" to "s8", "b1" to "b8", "ternary" or "ternary5"; default the weight's own. A floating
            weight becomes int8 with one scale per row, int4 with one per `group`, low bits with one of either; whole
            weights are taken as they are, without scales (int4: pairs only).
        axis: Reduction axis: -1 for a Linear, 1 for a convolution.
        group: Inputs that share a scale, a divisor of the reduction: 32, 64 (default) or 128 in int4; in low bits any,
            by default all of a row.
        symmetric: Whether int4 and low bits have no zero points.

    Raises:
        PackingError: The weight does not obey the pattern, or cannot be written in `dtype` (too large for it, say).
        PatternError: The pattern does not divide the axis, or the weight holds NaN or infinity.

    Example:
        >>> packed = pack(torch.tensor([[1.0, 0.0, 0.0, 2.0]]), "2:4")
        >>> packed.values.tolist(), packed.indices.tolist()
        ([[1.0, 2.0]], [[12]])
    """
    rule = packed_rule(read_pattern(pattern))
    require_memory(weight, "a weight")
    moved = weight.detach().resolve_neg().movedim(axis, -1) if weight.ndim else weight
    require_groups(rule, moved, "a weight")
    if moved.device.type != "cpu":
        moved = moved.cpu()
    encoding = _encoding(rule, weight.dtype, dtype)
    rounded = encoding.scaled and weight.is_floating_point()
    group = _group(encoding, rule, moved.shape[-1], group) if rounded else 0
    header = Header(rule.name, encoding.name, tuple(weight.shape), axis % weight.ndim, group=group)
    flat = moved.reshape(-1, moved.shape[-1]).to(torch.float32 if rounded else encoding.dtype)
    if not is_finite(flat):
        raise _overflow(weight, flat.dtype) if is_finite(weight) else non_finite("a weight", weight)
    form, scales, zeros = header.format, None, None
    if rule == NM(2, 4) and flat.dtype == torch.float32 and encoding.has_zero:
        values, indices = _compress_native(flat.contiguous(), moved, form)
    else:
        if not rule.check(moved).ok:
            raise not_legal(moved, rule)
        places = form.places(flat)
        outside = _require_no_zeros(form, flat, places) if not encoding.has_zero else None
        if rounded and not form.of_rows:
            flat, scales, zeros = encoding.quantize(flat, group, symmetric)
        values, indices = form.gather(flat, places), form.write(places)
        values = values if outside is None else values.masked_fill(outside, encoding.bounds[0])
    if rounded and form.of_rows:
        values, scales, zeros = encoding.quantize(values, round(group * rule.density), symmetric)
    return Packed(header, encoding.store(values), indices, scales, zeros)


def packed_rule(pattern: Pattern) -> Pattern:
    """Return the pattern that the header of a packed weight names: V:N:M itself, of others what their rows obey."""
    return pattern if isinstance(pattern, VNM) else pattern.rows


def _compress_native(flat: Tensor, moved: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    values = torch.empty(form.rows, form.kept, dtype=torch.float32, device="cpu")
    shape, dtype = form.parts["indices"]
    indices = torch.empty(shape, dtype=dtype, device="cpu")
    row = native.best("nm_compress").index
    if native.extension().nm_compress(row, flat, values, indices, native.threads()):
        raise not_legal(moved, form.pattern)
    return values, indices


def _encoding(rule: Pattern, weight: torch.dtype, asked: str | torch.dtype | None) -> Encoding:
    name = asked if isinstance(asked, str) else str(asked or weight).removeprefix("torch.")
    encoding = encodings.find(name)
    whole = weight == torch.int8 or (encoding is not None and weight == encoding.dtype)
    if encoding is None or encoding.packed_as or not (weight.is_floating_point or (encoding.scaled and whole)):
        raise PackingError(
            "the weight cannot be written in this dtype",
            got=f"a {weight} weight, dtype {name!r}",
            wanted="float32, bfloat16, float16, tf32, int8, int4 or low bits from a floating weight; int8 or int4 from "
            "int8; low bits from int8 or int16",
        )
    # Whole numbers without scales have the form that hardware reads: of int4, pairs.
    if not has_form(rule, name) or (encoding.groups and isinstance(rule, PairedNM) != whole):
        raise PackingError(
            f"the pattern {rule.name} has no {name} form",
            got=f"pattern {rule.name}, dtype {name}",
            wanted=f"{FORMS}; pairs from int8, groups from floats",
        )
    return encoding


def _group(encoding: Encoding, rule: Pattern, reduction: int, group: int | None) -> int:
    """Return how many inputs share a scale, 0: all of a row."""
    if (encoding.any_group and group is None) or not (encoding.groups or encoding.any_group):
        return 0
    group = 64 if group is None else group
    if (encoding.groups and group not in encoding.groups) or group < 1 or reduction % group or group % rule.group:
        raise PackingError(
            "the weight cannot be cut into groups with a scale each",
            got=f"groups of {group}, a reduction of {reduction}, pattern {rule.name}",
            wanted=f"groups of {', '.join(map(str, encoding.groups)) or 'any size'} that divide the reduction, in "
            f"whole groups of {rule.group}",
            remedy="choose another group size, or dtype int8, which has one scale per row",
        )
    return group


def _require_no_zeros(form: Format, flat: Tensor, places: Tensor) -> Tensor:
    """Refuse kept zeros where the levels have none; return which stored values lie outside the weight, bool.

    A dense weight of floats may have zeros, which round like every other value.
    """
    outside = form.gather(torch.ones_like(flat), places) == 0
    lost = int(((form.gather(flat, places) == 0) & ~outside).sum())
    if lost and not (isinstance(form.pattern, Dense) and flat.is_floating_point()):
        raise PackingError(
            f"the weight cannot be written as {form.encoding.name}",
            got=f"{lost} zeros among the values that {form.pattern.name} keeps",
            wanted="no zero there: the levels have none",
            remedy="two's complement (s1 to s8) and ternary have a zero",
        )
    return outside


def not_legal(weight: Tensor, rule: Pattern) -> PackingError:
    """Build the error for a weight that does not obey a pattern."""
    found = rule.check(weight)
    return PackingError(
        f"the weight does not obey {rule.name}",
        got=f"{found.sentence}: {[round(value, 6) for value in found.values]}",
        wanted=rule.demand,
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
