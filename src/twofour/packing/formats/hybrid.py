"""N:M and dense in one weight: which groups of inputs are dense, said once for all outputs, and the values of both."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from twofour.packing.formats.base import Format, illegal
from twofour.packing.formats.indices import ascending, decode, encode, index_bits
from twofour.patterns import Hybrid, Pattern
from twofour.shapes import Int64, Shaped, UInt8


@dataclass(frozen=True)
class HybridRows(Format):
    """A row of "values" is an output: what N:M keeps of the groups that are not dense, then the dense groups, in order.

    "indices" is a vector of bytes: one bit for each group of an output, the positions of its kernel one after the
    other, 1 where the group is dense; then for each output the index stream of the others. As many groups are dense as
    the pattern allows, so that the header alone says all sizes.
    """

    @staticmethod
    def takes(pattern: Pattern) -> bool:
        """See `Format.takes`."""
        return isinstance(pattern, Hybrid)

    @property
    def _rule(self) -> Hybrid:
        assert isinstance(self.pattern, Hybrid), self.pattern
        return self.pattern

    @property
    def _shape(self) -> tuple[int, int, int]:
        """Outputs, positions of a kernel, inputs."""
        return self.rows // self.taps, self.taps, self.reduction

    @property
    def _groups(self) -> tuple[int, int]:
        """Groups of an output that are not dense, and that are."""
        groups = self.taps * self.reduction // self._rule.m
        dense = self._rule.dense_of(groups)
        return groups - dense, dense

    @property
    def _bytes(self) -> tuple[int, int]:
        """Bytes that say which groups are dense, and bytes of one output's index stream."""
        sparse, dense = self._groups
        bits = sparse * self._rule.n * index_bits(self._rule.m)
        return -(-(sparse + dense) // 8), -(-bits // 8)

    @property
    def parts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """See `Format.parts`."""
        outputs, (said, stream) = self._shape[0], self._bytes
        return {
            "values": ((outputs, self.encoding.width(self.kept)), self.encoding.stored),
            "indices": ((said + outputs * stream,), torch.uint8),
        }

    @property
    def kept(self) -> int:
        """Stored values of an output."""
        sparse, dense = self._groups
        return sparse * self._rule.n + dense * self._rule.m

    @property
    def of_rows(self) -> bool:
        """See `Format.of_rows`."""
        return self.taps == 1

    def dense_groups(self, indices: UInt8[Tensor, " bytes"]) -> Int64[Tensor, " dense"]:
        """Return the numbers of the dense groups, ascending.

        Raises:
            PackingError: They are not as many as the pattern says, or padding bits are set.
        """
        sparse, dense = self._groups
        bits = np.unpackbits(indices[: self._bytes[0]].numpy(), bitorder="little")
        if bits[sparse + dense :].any():
            raise illegal("padding", "bits behind the last group that are not zero", "zero bits")
        found = torch.as_tensor(np.flatnonzero(bits), dtype=torch.int64, device="cpu")
        if len(found) != dense:
            raise illegal("dense", f"{len(found)} dense groups of {sparse + dense}", f"{dense} by {self._rule.name}")
        return found

    def places(self, weight: Shaped[Tensor, "rows reduction"]) -> Int64[Tensor, "outputs kept"]:
        """Return where each output has its kept values among its groups, those of the dense region last.

        Groups are dense as in `Hybrid.project` of the magnitudes.
        """
        shaped = weight.reshape(self._shape)
        dense = self._rule.dense_groups(shaped, absolute=True).flatten()
        keep = self._rule.regular.project(shaped, absolute=True).view(len(shaped), -1, self._rule.m)
        inside = keep[:, ~dense].nonzero()[:, -1].view(len(shaped), -1, self._rule.n)
        return self.columns(inside, dense.nonzero()[:, 0])

    def columns(self, inside: Tensor, dense: Tensor) -> Tensor:
        """Return the places of kept values in each output of positions (outputs, groups, n) and the dense groups."""
        rule, device = self._rule, inside.device
        other = torch.ones(sum(self._groups), dtype=torch.bool, device=device).index_fill_(0, dense, False)
        first = (inside + other.nonzero() * rule.m).flatten(1)
        last = (dense.unsqueeze(1) * rule.m + torch.arange(rule.m, device=device)).flatten()
        return torch.cat([first, last.expand(len(first), -1)], dim=1)

    def write(self, places: Int64[Tensor, "outputs kept"]) -> UInt8[Tensor, " bytes"]:
        """Write the places as bytes."""
        (sparse, _), rule = self._groups, self._rule
        inside, last = places[:, : sparse * rule.n], places[0, sparse * rule.n :: rule.m]
        said = torch.zeros(sum(self._groups), dtype=torch.uint8, device="cpu").index_fill_(0, last // rule.m, 1)
        written = torch.as_tensor(np.packbits(said.numpy(), bitorder="little"), dtype=torch.uint8, device="cpu")
        stream = encode((inside % rule.m).view(len(places), sparse, rule.n), rule.m)
        return torch.cat([written, stream.flatten()])

    def positions(self, indices: UInt8[Tensor, " bytes"]) -> Int64[Tensor, "outputs kept"]:
        """Return the places of the kept values; see `places` and `Format.positions`."""
        (sparse, _), rule, dense = self._groups, self._rule, self.dense_groups(indices)
        inside = torch.empty(self._shape[0], 0, rule.n, dtype=torch.int64, device="cpu")
        return self.columns(decode(self._stream(indices), sparse, rule.n, rule.m) if sparse else inside, dense)

    def validate(self, indices: UInt8[Tensor, " bytes"]) -> None:
        """See `Format.validate`: no places are made where the pattern is of 2:4."""
        self.dense_groups(indices)
        if (self._rule.n, self._rule.m) != (2, 4) or not ascending(self._stream(indices), self._groups[0]):
            self.positions(indices)  # raises, naming the place

    def _stream(self, indices: Tensor) -> Tensor:
        said, stream = self._bytes
        return indices[said:].view(self._shape[0], stream)

    def gather(
        self, weight: Shaped[Tensor, "rows reduction"], places: Int64[Tensor, "outputs kept"]
    ) -> Shaped[Tensor, "outputs kept"]:
        """Return the values of a weight at the places."""
        return weight.reshape(len(places), -1).gather(1, places)

    def scatter(
        self,
        weight: Shaped[Tensor, "rows reduction"],
        places: Int64[Tensor, "outputs kept"],
        values: Shaped[Tensor, "outputs kept"],
    ) -> Shaped[Tensor, "rows reduction"]:
        """Write values at the places of a weight, in place; return it."""
        weight.view(len(places), -1).scatter_(1, places, values)
        return weight
