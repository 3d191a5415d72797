"""What a header implies: how many values, indices and scales a packed weight has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from twofour.errors import PackingError
from twofour.packing.header import DTYPES, WRITE_AGAIN, Header
from twofour.packing.indices import row_bytes
from twofour.patterns import NM, VNM, PairedNM


@dataclass(frozen=True)
class Geometry:
    """Sizes of a packed weight; a unit is what one index names: a value, or a pair of them.

    Attributes:
        rows: Reductions of the weight.
        group: Values of a group of the pattern.
        groups: Groups of a row.
        units: Units of a group.
        kept_units: Units of a group that are kept.
        width: Values of a unit: 1, or 2 in pair-wise patterns.
        tf32: Whether indices are written as the hardware's 4-bit codes.
        int4: Whether two values share a byte.
        value_dtype: dtype of the stored values.
        runs: Scales of a row, where the weight has scales.
    """

    rows: int
    group: int
    groups: int
    units: int
    kept_units: int
    width: int
    tf32: bool
    int4: bool
    value_dtype: torch.dtype
    runs: int

    @classmethod
    def of(cls, header: Header) -> Geometry:
        """Compute the sizes.

        Raises:
            PackingError: The reduction axis is no multiple of the pattern's group.
        """
        rule = header.parsed()
        assert isinstance(rule, NM | PairedNM | VNM), rule
        if header.reduction % rule.m:
            raise PackingError(
                "the header of a packed weight contradicts itself",
                got=f"pattern {rule.name}, shape {header.shape}, reduction axis {header.axis} of {header.reduction}",
                wanted=f"a reduction axis that is a multiple of {rule.m}",
                remedy=WRITE_AGAIN,
                code="header-reduction",
            )
        width = 2 if isinstance(rule, PairedNM) else 1
        sizes = header.rows, rule.m, header.reduction // rule.m, rule.m // width, rule.n // width, width
        int4, runs = header.dtype == "int4", header.reduction // header.group if header.group else 1
        return cls(*sizes, header.dtype == "tf32", int4, torch.uint8 if int4 else DTYPES[header.dtype], runs)

    @property
    def kept(self) -> int:
        """Kept values of a row."""
        return self.groups * self.kept_units * self.width

    @property
    def values(self) -> tuple[int, int]:
        """Shape of the stored values."""
        return self.rows, (self.kept + 1) // 2 if self.int4 else self.kept

    @property
    def indices(self) -> tuple[int, int]:
        """Shape of the index stream, uint8."""
        return self.rows, row_bytes(self.groups, self.kept_units, self.units, self.tf32)


def packed_bytes(header: Header, *, zeros: bool = False) -> int:
    """Return the bytes of a weight in the canonical form: values, indices, scales and zero points.

    Args:
        header: Of a floating-point weight that was packed in this encoding: int8 and int4 have scales.
        zeros: Whether int4 has zero points beside its scales.
    """
    geometry = Geometry.of(header)
    scales = header.dtype in ("int8", "int4") and (2 if zeros and header.dtype == "int4" else 1)
    bytes_of_values = geometry.values[0] * geometry.values[1] * geometry.value_dtype.itemsize
    return bytes_of_values + geometry.indices[0] * geometry.indices[1] + 4 * scales * geometry.rows * geometry.runs
