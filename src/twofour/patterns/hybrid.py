"""N:M and dense in one weight: a share of its groups of inputs is dense in every row, the others are N:M.

A dial between 2:4 and dense. PATCH (2025, arXiv 2509.23410) learns for each tile of a weight whether it is dense or
2:4; SpenseGPT (2026, arXiv 2606.10445) cuts each weight into a 2:4 and a dense region. Here the dense region is made of
whole groups of inputs: the error of 2:4 gathers there as much as in few outputs, and the product stays one product of
2:4 (docs/hybrid.md has the figures).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.errors import PatternError
from twofour.patterns.base import Conformity, Pattern, numbers, require_groups
from twofour.patterns.nm import NM
from twofour.shapes import Bool, Real, Shaped

_DIGITS = 4
"""Decimals of the percentage in the text of a pattern, which the 12 letters of a layout's header hold."""


@dataclass(frozen=True)
class Hybrid(Pattern):
    """A share of the groups of m inputs, rounded to whole ones, may be dense; of each other group every row keeps n.

    A group of inputs is dense for all rows. Of a convolution each position of the kernel has its groups, and all of
    them are ranked together.

    Attributes:
        n: Kept values of a group that is not dense.
        m: Values per group: 1 <= n < m <= 64.
        percent: Dense groups of 100, above 0 and below 100, to four decimals. A PatternError says so otherwise.
    """

    n: int
    m: int
    percent: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "percent", round(float(self.percent), _DIGITS))
        if not 0 < self.percent < 100:
            raise PatternError(
                f"the pattern {self.name!r} is impossible",
                got=f"{self.percent:g} % of the groups dense",
                wanted="more than 0 % and less than 100 %",
                remedy=f'"{self.regular.name}" has no dense groups; a layer that is "dense" has no others',
            )
        _ = self.regular  # refuses an N:M that is impossible

    @property
    def regular(self) -> NM:
        """What the groups that are not dense obey."""
        return NM(self.n, self.m)

    @property
    def name(self) -> str:
        """The pattern's text, for example "2:4+25%"."""
        share = f"{self.percent:.{_DIGITS}f}".rstrip("0").rstrip(".")
        return f"{self.n}:{self.m}+{share}%"

    @property
    def group(self) -> int:
        """Values per group: m."""
        return self.m

    @property
    def density(self) -> float:
        """Largest fraction of values that may be non-zero, but for the rounding to whole groups of inputs."""
        share = self.percent / 100
        return share + (1 - share) * self.n / self.m

    @property
    def family(self) -> str:
        """One row takes every share of dense groups."""
        return "hybrid"

    @property
    def demand(self) -> str:
        """What a weight must be, for messages."""
        return f"{self.regular.name} in all rows but for {self.percent:g} % of the groups of {self.m} inputs"

    def within(self, other: Pattern) -> bool:
        """Tell whether this hybrid implies another whatever the weight's size; see `Pattern.within`."""
        if not isinstance(other, Hybrid):
            return super().within(other)
        return self.m == other.m and self.n <= other.n and self.percent <= other.percent

    def contains(self, other: Pattern) -> bool:
        """Tell whether every weight of `other` is N:M, and so needs no dense groups."""
        return not isinstance(other, Hybrid) and other.within(self.regular)

    def dense_of(self, groups: int) -> int:
        """Return how many of so many groups of inputs may be dense: the share of them, halves rounded up.

        In whole numbers, of percentages of four decimals: a float's product falls short of some halves.
        """
        parts = 10**_DIGITS
        return (2 * round(self.percent * parts) * groups + 100 * parts) // (200 * parts)

    def dense_groups(
        self, scores: Real[Tensor, "*rows reduction"], *, absolute: bool = False
    ) -> Bool[Tensor, "*positions groups"]:
        """Return the groups of inputs, (..., in / m), that lose most by N:M: sums over all rows of what it leaves out.

        Args:
            scores: (out, ..., in), larger is more important; of a vector, one row.
            absolute: Take |scores|.

        Raises:
            PatternError: They cannot be ranked; see `Pattern.project`.
        """
        return self._dense(scores, self.regular.project(scores, absolute=absolute), absolute)

    def project(
        self, scores: Real[Tensor, "*rows reduction"], *, absolute: bool = False
    ) -> Bool[Tensor, "*rows reduction"]:
        """Keep the groups of inputs that lose most by N:M, and of the others what N:M keeps; see `Pattern.project`.

        Among equals the first groups are dense.
        """
        keep = self.regular.project(scores, absolute=absolute)
        return keep | self._dense(scores, keep, absolute).repeat_interleave(self.m, -1)

    def _dense(self, scores: Tensor, keep: Tensor, absolute: bool) -> Tensor:
        wide = torch.float64 if scores.dtype == torch.float64 or not scores.is_floating_point() else torch.float32
        ranked = scores.detach().to(wide)
        lost = (ranked.abs() if absolute else ranked).masked_fill(keep, 0)
        return self.best(torch.unflatten(_rows(lost), -1, (-1, self.m)).sum((0, -1)))

    def best(self, lost: Real[Tensor, "*positions groups"]) -> Bool[Tensor, "*positions groups"]:
        """Return which groups of inputs are dense by what each of them loses else: the first of equals."""
        flat = lost.flatten()
        order = flat.sort(descending=True, stable=True).indices[: self.dense_of(len(flat))]
        chosen = torch.zeros(len(flat), dtype=torch.bool, device=flat.device)
        return chosen.index_fill_(0, order, True).view(lost.shape)

    def check(self, weight: Shaped[Tensor, "*rows reduction"]) -> Conformity:
        """Count the groups of inputs: those that are not N:M in some row, beyond the number allowed, are not legal."""
        require_groups(self, weight, "a weight")
        values = weight.detach()
        full = torch.unflatten(_rows(values != 0), -1, (-1, self.m)).sum(-1) > self.n  # (rows, ..., groups)
        used = full.any(0)
        groups, over = used.numel(), int(used.sum()) - self.dense_of(used.numel())
        if over <= 0:
            return Conformity(groups, groups)
        *between, group = map(int, used.nonzero()[-over])
        row = int(full[(slice(None), *between, group)].to(torch.uint8).argmax())
        first = (*((row,) if values.ndim > 1 else ()), *between, group * self.m)
        return Conformity(groups, groups - over, first, numbers(values[first[:-1]][first[-1] :][: self.m]))


def _rows(tensor: Tensor) -> Tensor:
    """View a vector as one row."""
    return tensor.unsqueeze(0) if tensor.ndim == 1 else tensor
