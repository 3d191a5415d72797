"""V:N:M: 2:4 hardware at sparsities beyond one half. Castro et al. 2023, "VENOM" (SC'23, arXiv 2310.02065), section 3.

The weight is cut into blocks of V rows by M columns. Each block keeps 2N whole columns, the same for its V rows; in
those, every row keeps N values. The kept columns, gathered, are N:2N, for N = 2 the 2:4 of Sparse Tensor Cores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from twofour.errors import PatternError
from twofour.patterns.base import Conformity, Pattern, first_true, non_finite, numbers, require_groups
from twofour.patterns.groups import LARGEST_GROUP
from twofour.patterns.nm import NM
from twofour.shapes import Bool, Real, Shaped


@dataclass(frozen=True)
class VNM(Pattern):
    """At most `n` non-zero values of `m` in every row, and these in at most 2 * `n` columns of every `v` rows.

    Rows are those of axis 0 (out), each position of the axes between by itself; the last block may have fewer rows.

    Attributes:
        v: Rows of a block, at least 1.
        n: Kept values per row of a block.
        m: Columns of a block, more than 2 * n and at most 64. A PatternError says so otherwise.
    """

    v: int
    n: int
    m: int

    def __post_init__(self) -> None:
        if not (self.v >= 1 and self.n >= 1 and 2 * self.n < self.m <= LARGEST_GROUP):
            raise PatternError(
                f"the pattern {self.name!r} is impossible",
                got=f"V = {self.v}, N = {self.n}, M = {self.m}",
                wanted=f"V >= 1, N >= 1 and 2 N < M <= {LARGEST_GROUP}, for 2 N of M columns are kept",
                remedy='"64:2:8" keeps a quarter of the values, "64:2:16" an eighth; for half of them, "2:4"',
            )

    @property
    def name(self) -> str:
        """The pattern's text, for example "64:2:8"."""
        return f"{self.v}:{self.n}:{self.m}"

    @property
    def group(self) -> int:
        """Values per group along the reduction axis: m."""
        return self.m

    @property
    def density(self) -> float:
        """Largest fraction of non-zero values: n / m."""
        return self.n / self.m

    @property
    def rows(self) -> NM:
        """What every row obeys by itself: N:M. Packed weights are written so."""
        return NM(self.n, self.m)

    def project(
        self, scores: Real[Tensor, "*rows reduction"], *, absolute: bool = False
    ) -> Bool[Tensor, "*rows reduction"]:
        """Keep in each block the 2 n columns with the largest sums, in those the n largest of every row.

        See `Pattern.project`. The sums are over |scores| if `absolute`, and run in float32 or wider.
        """
        require_groups(self, scores, "a tensor of scores")
        if scores.is_floating_point() and not torch.isfinite(scores).all():
            raise non_finite("a tensor of scores", scores)
        wide = torch.float64 if scores.dtype == torch.float64 or not scores.is_floating_point() else torch.float32
        ranked = scores.detach().to(wide)
        parts = torch.split(_rows(ranked.abs() if absolute else ranked), self.v)
        return torch.cat([self._block(part) for part in parts]).reshape(scores.shape)

    def _block(self, rows: Tensor) -> Tensor:
        groups = torch.unflatten(rows, -1, (-1, self.m))  # (rows of the block, positions, groups, m)
        columns = _best(groups.sum(0), 2 * self.n)
        kept = groups.masked_fill(~columns, -torch.inf)
        return (_best(kept, self.n) & columns).flatten(-2)

    def check(self, weight: Shaped[Tensor, "*rows reduction"]) -> Conformity:
        """Count the blocks whose rows and columns obey; see `Pattern.check`. A group is a block of v rows."""
        require_groups(self, weight, "a weight")
        nonzero = torch.unflatten(_rows(weight.detach() != 0), -1, (-1, self.m))
        blocks = torch.split(nonzero, self.v)
        legal = torch.stack([self._legal(block) for block in blocks])  # (blocks, positions, groups)
        good = int(legal.sum())
        if good == legal.numel():
            return Conformity(good, good)
        block, position, group = first_true(~legal)
        rows = nonzero[block * self.v : (block + 1) * self.v, position, group]
        row = block * self.v + int((rows.sum(-1) > self.n).to(torch.uint8).argmax())  # too many columns: the first row
        between = np.unravel_index(position, weight.shape[1:-1]) if weight.ndim > 2 else ()
        first = (*((row, *(int(index) for index in between)) if weight.ndim > 1 else ()), group * self.m)
        values = weight.detach()[first[:-1]][group * self.m : (group + 1) * self.m]
        return Conformity(legal.numel(), good, first, numbers(values))

    def _legal(self, block: Tensor) -> Tensor:
        rows = (block.sum(-1) <= self.n).all(0)
        return rows & (block.any(0).sum(-1) <= 2 * self.n)


def _rows(tensor: Tensor) -> Tensor:
    """View (out, ..., in) as (out, positions, in); a vector is one row."""
    return tensor.reshape(1, 1, -1) if tensor.ndim == 1 else tensor.reshape(len(tensor), -1, tensor.shape[-1])


def _best(scores: Tensor, count: int) -> Tensor:
    """Mask of the `count` largest along the last axis, the lowest index first among equals."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device).scatter_(-1, order, True)
