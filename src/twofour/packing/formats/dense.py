"""Dense: every value of every output in order, nothing that says where."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.packing.formats.base import Format
from twofour.patterns import Dense, Pattern
from twofour.shapes import Int64, Shaped, UInt8


@dataclass(frozen=True)
class DenseRows(Format):
    """All values of an output, the positions of its kernel one after the other; "indices" has no bytes.

    So a convolution of few channels pads each output to whole bytes, and not each position.
    """

    @staticmethod
    def takes(pattern: Pattern) -> bool:
        """See `Format.takes`."""
        return isinstance(pattern, Dense)

    @property
    def parts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """See `Format.parts`."""
        values = (self.rows // self.taps, self.encoding.width(self.kept)), self.encoding.stored
        return {"values": values, "indices": ((self.rows, 0), torch.uint8)}

    @property
    def kept(self) -> int:
        """See `Format.kept`."""
        return self.taps * self.reduction

    @property
    def of_rows(self) -> bool:
        """See `Format.of_rows`."""
        return self.taps == 1

    def places(self, weight: Shaped[Tensor, "rows reduction"]) -> Int64[Tensor, "rows groups kept"]:
        """Return no places: int64 (rows, 1, 0)."""
        return torch.empty(len(weight), 1, 0, dtype=torch.int64, device=weight.device)

    def write(self, places: Int64[Tensor, "rows groups kept"]) -> UInt8[Tensor, "rows bytes"]:
        """Return no bytes: uint8 (rows, 0)."""
        return torch.empty(len(places), 0, dtype=torch.uint8, device=places.device)

    def positions(self, indices: UInt8[Tensor, "rows bytes"]) -> Int64[Tensor, "rows groups kept"]:
        """See `places`."""
        return torch.empty(len(indices), 1, 0, dtype=torch.int64, device=indices.device)

    def validate(self, indices: UInt8[Tensor, "rows bytes"]) -> None:
        """Nothing can be wrong with no bytes; their size is checked before."""

    def gather(
        self, weight: Shaped[Tensor, "rows reduction"], places: Int64[Tensor, "rows groups kept"]
    ) -> Shaped[Tensor, "outputs values"]:
        """Return all values of a weight."""
        return weight.reshape(-1, self.kept)

    def scatter(
        self,
        weight: Shaped[Tensor, "rows reduction"],
        places: Int64[Tensor, "rows groups kept"],
        values: Shaped[Tensor, "outputs values"],
    ) -> Shaped[Tensor, "rows reduction"]:
        """Write all values of a weight, in place; return it."""
        return weight.copy_(values.view(weight.shape))
