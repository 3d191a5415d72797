"""N:M: every group keeps the same number of values, so that only their positions in the group are stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.packing.formats.base import Format
from twofour.packing.formats.indices import ascending, decode, encode, index_bits
from twofour.patterns import NM, VNM, PairedNM, Pattern
from twofour.shapes import Int64, Shaped, UInt8


@dataclass(frozen=True)
class ConstantCount(Format):
    """N of every M values, or N / 2 of M / 2 pairs; a unit is what one index names: a value, or a pair of them."""

    @staticmethod
    def takes(pattern: Pattern) -> bool:
        """See `Format.takes`; V:N:M is stored as its rows are."""
        return isinstance(pattern, NM | PairedNM | VNM)

    @property
    def _rule(self) -> NM | PairedNM:
        rule = self.pattern.rows
        assert isinstance(rule, NM | PairedNM), rule
        return rule

    @property
    def _width(self) -> int:
        """Values of a unit."""
        return 2 if isinstance(self._rule, PairedNM) else 1

    @property
    def _units(self) -> tuple[int, int, int]:
        """Groups of a row, kept units of a group, units of a group."""
        rule, width = self._rule, self._width
        return self.reduction // rule.m, rule.n // width, rule.m // width

    @property
    def parts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """See `Format.parts`."""
        bits = self.kept // self._width * self.index_bits
        return {
            "values": ((self.rows, self.encoding.width(self.kept)), self.encoding.stored),
            "indices": ((self.rows, (bits + 7) // 8), torch.uint8),
        }

    @property
    def index_bits(self) -> int:
        """Bits of the index of one unit."""
        return index_bits(self._units[2], self.encoding.codes)

    @property
    def kept(self) -> int:
        """See `Format.kept`."""
        return self.reduction // self._rule.m * self._rule.n

    def places(self, weight: Shaped[Tensor, "rows reduction"]) -> Int64[Tensor, "rows groups kept"]:
        """See `Format.places`: int64 (rows, groups, n), ascending."""
        keep = self._rule.project(weight, absolute=True).view(len(weight), -1, self._rule.m)
        return keep.nonzero()[:, -1].view(*keep.shape[:2], -1)

    def write(self, places: Int64[Tensor, "rows groups kept"]) -> UInt8[Tensor, "rows bytes"]:
        """Write places (rows, groups, n) as an index stream; see `formats.indices`."""
        return encode(places[..., :: self._width] // self._width, self._units[2], self.encoding.codes)

    def positions(self, indices: UInt8[Tensor, "rows bytes"]) -> Int64[Tensor, "rows groups kept"]:
        """See `Format.positions`: int64 (rows, groups, n), ascending."""
        found = decode(indices, *self._units, self.encoding.codes)
        if self._width == 1:
            return found
        return (found.unsqueeze(-1) * 2 + torch.arange(2, device=found.device)).flatten(-2)

    def validate(self, indices: UInt8[Tensor, "rows bytes"]) -> None:
        """See `Format.validate`: no positions are built where the pattern is 2:4."""
        groups, *units = self._units
        if units != [2, 4] or not ascending(indices, groups):
            self.positions(indices)  # raises, naming the place
