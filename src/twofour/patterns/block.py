"""Blocks: whole R x C blocks of a weight are zero.

Narang, Undersander and Diamos 2017, "Block-Sparse Recurrent Neural Networks" (arXiv 1711.02782), section 3. A weight is
cut into blocks of R outputs by C inputs from its first row and column on. Where a side is no multiple of the block, the
last blocks are smaller; they are blocks like the others, and their scores are means, so that a block is ranked by what
its values are and not by how many. Kernels read them as padded with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, prod

import torch
from torch import Tensor

from twofour.errors import PatternError
from twofour.patterns.base import Conformity, Pattern, non_finite, numbers, require_groups
from twofour.shapes import Bool, Float, Real, Shaped

LARGEST_SIDE = 1024
"""Largest R and C."""

MOST_PARTS = 64
"""Largest number of parts of the rows."""

_DIGITS = 9
"""Decimals of S in the text of a pattern."""


@dataclass(frozen=True)
class Block(Pattern):
    """At least the share `sparsity` of the blocks, rounded to whole blocks, is zero; one block of a weight may stay.

    Rows are those of axis 0 (out), each position of the axes between by itself; all blocks of a weight are ranked
    together.

    Attributes:
        r: Rows (outputs) of a block, 1 to 1024.
        c: Columns (inputs) of a block, 1 to 1024; a block has more than one value.
        sparsity: S, 0 <= S < 1, to nine decimals.
        parts: Equal stretches of the rows that no block reaches over: the gates of a recurrent layer.
    """

    r: int
    c: int
    sparsity: float
    parts: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "sparsity", round(float(self.sparsity), _DIGITS))
        sides = 1 <= self.r <= LARGEST_SIDE and 1 <= self.c <= LARGEST_SIDE and self.r * self.c > 1
        if not (sides and 0 <= self.sparsity < 1 and 1 <= self.parts <= MOST_PARTS):
            raise PatternError(
                f"the pattern {self.name!r} is impossible",
                got=f"blocks of {self.r} x {self.c}, a share of {self.sparsity:g} zero, rows in {self.parts} parts",
                wanted=f"sides from 1 to {LARGEST_SIDE}, more than one value in a block, 0 <= S < 1, "
                f"1 to {MOST_PARTS} parts",
                remedy='"block:16x16@0.9": nine tenths of the 16 x 16 blocks are zero',
            )

    @classmethod
    def of_text(cls, r: str, c: str, sparsity: str, parts: str | None = None) -> Block:
        """Return the pattern of the parts of its text."""
        return cls(int(r), int(c), float(sparsity), int(parts or 1))

    @property
    def name(self) -> str:
        """The pattern's text, for example "block:16x16@0.9", or "block:16x16@0.9/4" for rows in four parts."""
        share = f"{self.sparsity:.{_DIGITS}f}".rstrip("0").rstrip(".")
        return f"block:{self.r}x{self.c}@{share}" + (f"/{self.parts}" if self.parts > 1 else "")

    @property
    def group(self) -> int:
        """1: a reduction axis of any length is cut into blocks, the last one smaller."""
        return 1

    @property
    def density(self) -> float:
        """Fraction of the blocks that may be non-zero, but for the rounding to whole ones."""
        return 1 - self.sparsity

    @property
    def family(self) -> str:
        """One row takes blocks of every size."""
        return "block"

    @property
    def demand(self) -> str:
        """What a weight must be, for messages."""
        return f"a share of {self.sparsity:g} of its {self.r} x {self.c} blocks zero"

    def within(self, other: Pattern) -> bool:
        """Tell whether these blocks obey another pattern whatever their number; see `Pattern.within`."""
        if not isinstance(other, Block):
            return False
        return other.at(self.sparsity) == self and self.sparsity >= other.sparsity

    def on_parts(self, parts: int, rows: int) -> Block:
        """Return the pattern for a weight whose `rows` are `parts` gates: as it is where no block would cross them."""
        apart = rows % parts == 0 and (rows // parts) % self.r != 0
        return Block(self.r, self.c, self.sparsity, parts) if apart else self

    def at(self, sparsity: float) -> Block:
        """Return the same blocks with another share of zeros."""
        return Block(self.r, self.c, sparsity, self.parts)

    def zeros(self, blocks: int) -> int:
        """Return how many of so many blocks are zero at least; nine decimals of S say it of 5e8 blocks exactly."""
        return min(floor(self.sparsity * blocks + 0.5), blocks - 1)

    def reached(self, shape: tuple[int, ...]) -> float:
        """Return the share of a weight's blocks (out, ..., in) that are zero: whole blocks, and one stays at least."""
        blocks = prod(self.grid(shape))
        return self.zeros(blocks) / blocks

    def unfit(self, positions: int, reduction: int) -> str:
        """Return why a weight cannot carry the pattern: criteria see the positions of a kernel side by side."""
        if positions == 1 or reduction % self.c == 0:
            return ""
        return f"{reduction} inputs at each of {positions} positions are no multiple of {self.c} ({self.name})"

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Return how a weight (out, ..., in) is cut: parts, rows of blocks in each, positions, columns of blocks.

        Raises:
            PatternError: The rows do not divide into `parts`.
        """
        out, reduction = _sides(shape)
        if out % self.parts:
            raise PatternError(
                f"a weight cannot carry the pattern {self.name}",
                got=f"shape {shape}: {out} rows",
                wanted=f"rows that are a multiple of {self.parts}",
                remedy="leave the part out of the pattern's text; recurrent layers get theirs by themselves",
            )
        return self.parts, -(-(out // self.parts) // self.r), prod(shape[1:-1]), -(-reduction // self.c)

    def blocks(self, values: Shaped[Tensor, "*rows reduction"]) -> Shaped[Tensor, "parts down positions across r c"]:
        """Return a weight's values (out, ..., in) block by block, the smaller ones padded with zeros: a copy."""
        parts, down, positions, across = self.grid(tuple(values.shape))
        matrix = values.reshape(parts, -1, positions, values.shape[-1])
        below, beside = down * self.r - matrix.shape[1], across * self.c - matrix.shape[3]
        padded = torch.nn.functional.pad(matrix, (0, beside, 0, 0, 0, below))
        cut = padded.reshape(parts, down, self.r, positions, across, self.c)
        return cut.permute(0, 1, 3, 4, 2, 5)

    def whole(
        self, blocks: Shaped[Tensor, "parts down positions across r c"], shape: tuple[int, ...]
    ) -> Shaped[Tensor, "*rows reduction"]:
        """Return the weight of `shape` (out, ..., in) that `blocks` was given: a copy without the padding."""
        out, reduction = _sides(shape)
        matrix = blocks.permute(0, 1, 4, 2, 3, 5).flatten(1, 2).flatten(-2)
        return matrix[:, : out // self.parts, :, :reduction].reshape(shape)

    def spread(
        self, chosen: Shaped[Tensor, "parts down positions across"], shape: tuple[int, ...]
    ) -> Shaped[Tensor, "*rows reduction"]:
        """Return one value per block as one per value of a weight of `shape`: the inverse of a sum over blocks."""
        out, reduction = _sides(shape)
        tall = chosen.repeat_interleave(self.r, 1)[:, : out // self.parts]
        return tall.repeat_interleave(self.c, 3)[..., :reduction].reshape(shape)

    def scores(
        self, values: Real[Tensor, "*rows reduction"], norm: str = "mean"
    ) -> Float[Tensor, "parts down positions across"]:
        """Return the score of each block: the mean of its values, or a norm of them.

        Args:
            values: (out, ..., in), any real dtype.
            norm: "mean" of the values as they are; of their magnitudes "l1" (the mean), "l2" (the root of the mean
                square) or "max", as Narang et al. 2017, section 3.1, choose it.
        """
        wide = torch.float64 if values.dtype == torch.float64 or not values.is_floating_point() else torch.float32
        cut = self.blocks(values.detach().to(wide))
        if norm == "max":
            return cut.abs().amax((-2, -1))
        summed = {"mean": cut, "l1": cut.abs(), "l2": cut.square()}[norm].sum((-2, -1))
        parts, down, _, across = self.grid(tuple(values.shape))
        out, reduction = (values.shape[0] if values.ndim > 1 else 1), values.shape[-1]
        tall = _lengths(out // parts, self.r, down, values.device)
        wide_ = _lengths(reduction, self.c, across, values.device)
        mean = summed / (tall.view(1, -1, 1, 1) * wide_)
        return mean.sqrt() if norm == "l2" else mean

    def ranks(
        self, scores: Real[Tensor, "*rows reduction"], norm: str = "l1", *, absolute: bool = False
    ) -> Float[Tensor, "parts down positions across"]:
        """Return what blocks are ranked by: "l1", "l2" or "max" of the scores of their values, as in `scores`.

        Args:
            scores: (out, ..., in), larger is more important.
            norm: Which.
            absolute: Take |scores|. Else what is negative counts as 0, but between blocks that have nothing above 0
                their means decide: criteria score dead inputs so. "l1" is the mean of all, negative ones included.

        Raises:
            PatternError: They cannot be ranked; see `Pattern.project`.
        """
        require_groups(self, scores, "a tensor of scores")
        if scores.is_floating_point() and not torch.isfinite(scores).all():
            raise non_finite("a tensor of scores", scores)
        if absolute:
            return self.scores(scores, norm)
        means = self.scores(scores)
        if norm == "l1":
            return means
        found = self.scores(scores.clamp(min=0), norm)
        return torch.where(found > 0, found, means.clamp(max=0))

    def project(
        self, scores: Real[Tensor, "*rows reduction"], *, absolute: bool = False, norm: str = "l1"
    ) -> Bool[Tensor, "*rows reduction"]:
        """Keep the blocks that rank first; see `ranks` and `Pattern.project`."""
        return self.spread(self.best(self.ranks(scores, norm, absolute=absolute)), tuple(scores.shape))

    def best(self, scores: Float[Tensor, "*blocks"], zeros: int | None = None) -> Bool[Tensor, "*blocks"]:
        """Return which blocks stay by their scores: all but the lowest, the first in order among equals.

        Args:
            scores: One for each block.
            zeros: How many go; None: as the pattern says.
        """
        flat = scores.flatten()
        going = self.zeros(len(flat)) if zeros is None else zeros
        order = flat.sort(descending=True, stable=True).indices[: len(flat) - going]
        kept = torch.zeros(len(flat), dtype=torch.bool, device=flat.device).index_fill_(0, order, True)
        return kept.view(scores.shape)

    def check(self, weight: Shaped[Tensor, "*rows reduction"]) -> Conformity:
        """Count the blocks: those that are non-zero beyond the number allowed are not legal; see `Pattern.check`."""
        require_groups(self, weight, "a weight")
        values = weight.detach()
        used = self.blocks(values != 0).flatten(-2).any(-1)
        most = used.numel() - self.zeros(used.numel())
        over = int(used.sum()) - most
        if over <= 0:
            return Conformity(used.numel(), used.numel())
        place = used.nonzero()[most]
        part, row, position, column = map(int, place)
        out = (weight.shape[0] if weight.ndim > 1 else 1) // self.parts
        rows = values.reshape(self.parts, out, -1, values.shape[-1])[part, row * self.r :, position]
        first = (part * out + row * self.r, *_unravelled(position, tuple(weight.shape[1:-1])), column * self.c)
        shown = rows[: self.r, column * self.c : (column + 1) * self.c].flatten()
        return Conformity(used.numel(), used.numel() - over, first[-weight.ndim :], numbers(shown[:16]))


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return outputs and inputs of a weight (out, ..., in); a vector is one row."""
    *others, reduction = shape
    return (others[0] if others else 1), reduction


def _lengths(whole: int, side: int, count: int, device: torch.device) -> Tensor:
    """Return the lengths of `count` stretches of `side`, the last one what is left of `whole`."""
    lengths = torch.full((count,), side, dtype=torch.float32, device=device)
    lengths[-1] = whole - side * (count - 1)
    return lengths


def _unravelled(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    found: list[int] = []
    for size in reversed(shape):
        index, place = divmod(index, size)
        found.append(place)
    return tuple(reversed(found))
