"""Blocks: BSR, the values of those blocks that are kept, their columns, and where each row of blocks begins.

As many blocks are kept as the pattern allows to be non-zero, so that the header alone says the sizes of all parts.
Where fewer are, the first zero blocks are kept beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from twofour.errors import PackingError
from twofour.packing.formats.base import WRITE_AGAIN, Format, illegal
from twofour.patterns import Block, Pattern
from twofour.shapes import Int32, Int64, Shaped

MOST_BLOCKS = (1 << 31) - 1
"""Blocks of a weight at most: columns and row pointers are int32."""


@dataclass(frozen=True)
class BlockRows(Format):
    """Blocks of R outputs by C inputs; R C values of each stand row by row, those outside the weight zero.

    "indices" is int32: the row pointers (rows of blocks + 1), then the column of each kept block.
    """

    @staticmethod
    def takes(pattern: Pattern) -> bool:
        """See `Format.takes`."""
        return isinstance(pattern, Block)

    @property
    def _rule(self) -> Block:
        assert isinstance(self.pattern, Block), self.pattern
        return self.pattern

    @property
    def _shape(self) -> tuple[int, int, int]:
        """Outputs, positions of a kernel, inputs."""
        return self.rows // self.taps, self.taps, self.reduction

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Rows of blocks, columns of blocks, kept blocks."""
        rule = self._rule
        divides = self._shape[0] % rule.parts == 0
        grid = rule.grid(self._shape) if divides else (0, 0, 0, 1)
        blocks = prod(grid)
        if not divides or blocks > MOST_BLOCKS:
            raise PackingError(
                "the blocks of a packed weight are impossible",
                got=f"{self._shape[0]} rows, {blocks} blocks of {rule.name}",
                wanted=f"rows that are a multiple of {rule.parts}, and at most {MOST_BLOCKS} blocks",
                remedy=WRITE_AGAIN,
                code="header-blocks",
            )
        return blocks // grid[3], grid[3], blocks - rule.zeros(blocks)

    @property
    def parts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """See `Format.parts`."""
        rows, _, blocks = self._sizes
        return {
            "values": ((blocks, self.encoding.width(self.kept)), self.encoding.stored),
            "indices": ((rows + 1 + blocks,), torch.int32),
        }

    @property
    def kept(self) -> int:
        """Values of a block."""
        return self._rule.r * self._rule.c

    @property
    def of_rows(self) -> bool:
        """A row of "values" is a block."""
        return False

    def places(self, weight: Shaped[Tensor, "rows reduction"]) -> Int64[Tensor, " blocks"]:
        """Return which blocks are kept, by number: those that are not zero, then the first zero ones; ascending."""
        used = self._rule.blocks(weight.reshape(self._shape) != 0).flatten(-2).any(-1)
        return self._rule.best(used.float()).flatten().nonzero()[:, 0]

    def write(self, places: Int64[Tensor, " blocks"]) -> Int32[Tensor, " numbers"]:
        """Write numbers of blocks as row pointers and columns."""
        rows, across, _ = self._sizes
        counts = torch.bincount(places // across, minlength=rows)
        return torch.cat([counts.new_zeros(1), counts.cumsum(0), places % across]).to(torch.int32)

    def positions(self, indices: Int32[Tensor, " numbers"]) -> Int64[Tensor, " blocks"]:
        """Return the numbers of the kept blocks; see `Format.positions`."""
        rows, across, blocks = self._sizes
        starts, columns = indices[: rows + 1].long(), indices[rows + 1 :].long()
        counts = starts.diff()
        if starts[0] != 0 or starts[-1] != blocks or bool((counts < 0).any()):
            raise illegal(
                "pointers", "row pointers that do not ascend from 0 to the number of blocks", f"0 ... {blocks}"
            )
        if bool(((columns < 0) | (columns >= across)).any()):
            bad = int(((columns < 0) | (columns >= across)).nonzero()[0])
            raise illegal("bound", f"column {int(columns[bad])} of block {bad}", f"columns of blocks below {across}")
        found = torch.arange(rows, device=indices.device).repeat_interleave(counts) * across + columns
        if bool((found.diff() <= 0).any()):
            bad = int((found.diff() <= 0).nonzero()[0])
            raise illegal("order", f"blocks {bad} and {bad + 1} of a row", "ascending columns in each row of blocks")
        return found

    def validate(self, indices: Int32[Tensor, " numbers"]) -> None:
        """See `Format.validate`."""
        self.positions(indices)

    def gather(
        self, weight: Shaped[Tensor, "rows reduction"], places: Int64[Tensor, " blocks"]
    ) -> Shaped[Tensor, "blocks kept"]:
        """Return the values of the blocks: (blocks, R C)."""
        return self._rule.blocks(weight.reshape(self._shape)).reshape(-1, self.kept)[places]

    def scatter(
        self,
        weight: Shaped[Tensor, "rows reduction"],
        places: Int64[Tensor, " blocks"],
        values: Shaped[Tensor, "blocks kept"],
    ) -> Shaped[Tensor, "rows reduction"]:
        """Write the values of blocks into a weight (rows, reduction), in place; return it."""
        grid, rule = self._rule.grid(self._shape), self._rule
        blocks = rule.blocks(weight.reshape(self._shape)).reshape(-1, self.kept)
        blocks[places] = values
        weight.copy_(rule.whole(blocks.view(*grid, rule.r, rule.c), self._shape).view(weight.shape))
        return weight
