"""The statistics of one weight's inputs, summed batch by batch; nothing of a batch is kept but a few sampled rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from twofour.errors import DataError

Need = Literal["sample", "norms", "hessian", "gradients", "training"]
"""What a criterion asks for; each of the first three includes the ones before it, or makes it unnecessary."""

SAMPLED_ROWS = 512

PER_INPUT = 8
"""Rows wanted for each input of a weight: docs/criteria.md has what more and fewer of them brought."""

JUDGE = 5
"""One row in so many, up to `SAMPLED_ROWS`, is remembered beside a Hessian while it has fewer rows than are wanted."""


@dataclass(eq=False)
class Statistics:
    """What is known of the inputs X (rows, in) of a weight, for each of the weight's groups.

    Attributes:
        need: What is collected.
        rows: How many rows were seen.
        squares: float64 (groups, in): the sum of squares of each input.
        sums: float64 (groups, in): the sum of each input.
        hessian: (groups, in, in): X^T X, in float32, or float64 for a float64 weight.
        sample: (groups, at most 512, in): evenly spaced rows; beside a Hessian those that `parted` leaves out.
        shrunk: By what share `moments` has correlations between inputs smaller than the rows show them.
        gradient: Root mean square of the loss's gradient, laid out as `matrix` does, for need "gradients".
        readers: Names of the weights that read these inputs, in the order of their first calls.
        memo: What criteria computed from these statistics and want to find again for another weight.
    """

    need: Need
    rows: int = 0
    squares: Tensor | None = None
    sums: Tensor | None = None
    hessian: Tensor | None = None
    gradient: Tensor | None = None
    readers: tuple[str, ...] = ()
    shrunk: float = 0.0
    memo: dict[Any, Any] = field(default_factory=dict)
    _kept: list[Tensor] = field(default_factory=list)
    _stride: int = 1

    @property
    def norms(self) -> Tensor:
        """float64 (groups, in): ||X_j||_2 of each input j over all rows."""
        assert self.squares is not None
        return self.squares.sqrt()

    @property
    def dead(self) -> bool:
        """Whether inputs are asked for and none was other than zero: nothing can be ranked by them."""
        return self.need in ("sample", "norms", "hessian") and (self.squares is None or not self.squares.any())

    @property
    def sample(self) -> Tensor | None:
        """(groups, rows, in): the rows that are remembered, or None."""
        return torch.cat(self._kept, dim=1) if self._kept else None

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Add rows (groups, count, in) of any floating dtype."""
        x = x.detach().to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        squares = x.square().sum(1, dtype=torch.float64)
        self.squares = squares if self.squares is None else self.squares.add_(squares)
        sums = x.sum(1, dtype=torch.float64)
        self.sums = sums if self.sums is None else self.sums.add_(sums)
        if self.need == "hessian":
            if self.hessian is None:
                self.hessian = x.new_zeros(x.shape[0], x.shape[2], x.shape[2])
            for hessian, part in zip(self.hessian, x, strict=True):
                hessian.addmm_(part.T, part)
            self._remember(x)
        else:
            self._keep(x)
        self.rows += x.shape[1]

    def _keep(self, x: Tensor) -> None:
        # Of all rows those whose number the stride divides; it doubles when there are too many.
        picked = x[:, -self.rows % self._stride :: self._stride]
        if picked.shape[1]:
            self._kept.append(picked.clone())
        while sum(part.shape[1] for part in self._kept) > SAMPLED_ROWS:
            self._kept = [torch.cat(self._kept, dim=1)[:, ::2].clone()]
            self._stride *= 2

    def _remember(self, x: Tensor) -> None:
        # Counted over all rows and taken from each call's end, so a call of several is never held whole. Rows do not
        # say whose they are: of a call of one sample, and of the first that is held, both sides have some.
        rows = self.rows + x.shape[1]
        if rows >= PER_INPUT * x.shape[2]:
            self._kept.clear()
        elif count := min(rows // JUDGE, SAMPLED_ROWS) - sum(part.shape[1] for part in self._kept):
            self._kept.append(x[:, -count:].clone())

    def moments(self, group: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return X^T X / rows of a group, a new tensor; beside its diagonal smaller by the share `shrunk`."""
        assert self.hessian is not None
        found = self.hessian[group].to(dtype or self.hessian.dtype, copy=True).div_(max(self.rows, 1))
        if self.shrunk:
            diagonal = found.diagonal().clone()
            found.mul_(1 - self.shrunk).diagonal().copy_(diagonal)
        return found

    @torch.no_grad()
    def parted(self) -> tuple[Statistics, Statistics] | None:
        """Return the Hessian without the rows that are remembered, and these; None where no rows are, or too few."""
        rows = self.sample
        if self.hessian is None or rows is None or rows.shape[1] < JUDGE:
            return None
        hessian = self.hessian - rows.transpose(1, 2) @ rows
        hessian.diagonal(dim1=1, dim2=2).clamp_min_(0)
        used = Statistics("hessian", rows=self.rows - rows.shape[1], hessian=hessian)
        return used, Statistics("sample", rows=rows.shape[1], _kept=[rows])

    def require_finite(self) -> None:
        """Refuse inputs that hold NaN or infinity.

        Raises:
            DataError: They do.
        """
        if self.squares is not None and not torch.isfinite(self.squares).all():
            raise DataError(
                "the calibration data make a layer's input infinite",
                got="NaN or infinity",
                wanted="finite inputs at every layer",
                remedy="run the model on the data: if its output is finite, its computing type overflows inside",
            )

    def error(self, before: Tensor, after: Tensor) -> float:
        """Return ||X (W - W')^T|| / ||X W^T|| in the Frobenius norm over these inputs, summed over the groups.

        Args:
            before: W as (groups, out / groups, in).
            after: W' in the same layout.
        """
        return (self.energy(before - after) / max(self.energy(before), torch.finfo(torch.float64).tiny)) ** 0.5

    def energy(self, weight: Tensor) -> float:
        """Return ||X W^T||_F^2 over these inputs (over the sampled rows where there is no Hessian)."""
        total = 0.0
        sample = self.sample if self.hessian is None else None
        for group, part in enumerate(weight):
            if self.hessian is not None:
                hessian = self.hessian[group]
                part = part.to(hessian.dtype)
                total += float(((part @ hessian) * part).sum(dtype=torch.float64))
            elif sample is not None:
                total += float((sample[group] @ part.to(sample.dtype).T).square().sum(dtype=torch.float64))
        return max(total, 0.0)
