"""ADMM: SparseGPT's mask searched further, and the kept values solved for exactly.

After Meng et al. 2024, "ALPS: Improved Optimization for Highly Sparse One-Shot Pruning", with W~ the original matrix,
and all scaled so that H has a diagonal of ones:

    W <- (H + rho I)^-1 (H W~ - V + rho D),  D <- projection of W + V / rho on the pattern,  V <- V + rho (W - D)

with rho growing until D settles. The search starts at SparseGPT's solution. On its mask, and on SparseGPT's, the values
that minimise the error are found by conjugate gradients, all rows at once, and the better of the two is kept: it is
never worse than SparseGPT, whose values the second one starts from (both with the damping in the error).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.calibration import Statistics
from twofour.criteria.activation import live_first
from twofour.criteria.base import Layerwise, Solution
from twofour.criteria.sparsegpt import factor, products, prune_columns
from twofour.errors import RecipeError
from twofour.patterns import Pattern

RHO, GROWTH, EVERY = 0.1, 1.3, 3
"""The paper's: rho starts at 0.1 and grows by 1.3 every third step while the mask still changes."""

TOLERANCE = 1e-5
"""Conjugate gradients end when the residual is this much smaller than at the start."""


@dataclass(frozen=True)
class ADMM(Layerwise):
    """Refine SparseGPT's solution; keep what has the least error.

    Attributes:
        dampening: As SparseGPT's.
        block: As SparseGPT's.
        steps: Steps of the search at most; 0 leaves SparseGPT's mask and solves for its values alone.
        refine: Steps of conjugate gradients at most.
    """

    kind = "admm"
    need = "hessian"

    dampening: float = 0.01
    block: int = 128
    steps: int = 40
    refine: int = 60

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.dampening > 0 or self.block < 1 or self.steps < 0 or self.refine < 0:
            raise RecipeError(
                "ADMM's options cannot be used",
                got=f"dampening={self.dampening}, block={self.block}, steps={self.steps}, refine={self.refine}",
                wanted="dampening > 0, block >= 1, steps >= 0 and refine >= 0",
                remedy='"admm" without options takes dampening=0.01, block=128, steps=40, refine=60',
            )

    def solve(self, weight: Tensor, pattern: Pattern, statistics: Statistics | None, name: str) -> Solution:
        """Choose mask and values, group by group of a grouped convolution."""
        assert statistics is not None and statistics.hessian is not None, "asked for by `need`"
        matrix = weight.detach().to(statistics.hessian.dtype)
        keeps, values, starts = [], [], []
        for group, part in enumerate(products(matrix, pattern, statistics)):
            start, keep, best = self._group(part, pattern, statistics, group, name)
            starts.append(start)
            keeps.append(keep)
            values.append(best)
        start, solution, keep = (torch.stack(each).view(weight.shape) for each in (starts, values, keeps))
        before, after = (statistics.error(matrix, each) for each in (start, solution))
        return Solution(keep, solution, _note(before, after))

    def _group(
        self, weight: Tensor, pattern: Pattern, statistics: Statistics, group: int, name: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return SparseGPT's values, then the mask and values that are best."""
        inverse = factor(statistics, group, self.dampening, name)
        start, keep = prune_columns(weight, inverse, pattern, self.block)
        hessian = _hessian(statistics, group, inverse.live, inverse.damping)
        found = search(weight, start, hessian, inverse.live, pattern, self.steps)
        options = [(keep, on_support(weight, start, keep, hessian, self.refine))]
        if not torch.equal(found != 0, start != 0):
            mask = pattern.project(_scores(found, weight, inverse.live))
            options.append((mask, on_support(weight, found.masked_fill(~mask, 0.0), mask, hessian, self.refine)))
        best = min(options, key=lambda option: _loss(weight - option[1], hessian))
        return start, *best


def _note(before: float, after: float) -> str:
    less = 1 - after / before if before else 0.0
    return (
        f"SparseGPT alone: {before:.4f}; this is {less:.1%} less"
        if after < before
        else f"SparseGPT alone: {before:.4f}"
    )


def _hessian(statistics: Statistics, group: int, live: Tensor, damping: float) -> Tensor:
    hessian = statistics.moments(group)
    diagonal = hessian.diagonal()
    diagonal[~live] = diagonal[live].mean() if live.any() else 1.0
    diagonal += damping
    return hessian


def _loss(difference: Tensor, hessian: Tensor) -> float:
    return float(((difference @ hessian) * difference).sum(dtype=torch.float64))


def _scores(values: Tensor, weight: Tensor, live: Tensor) -> Tensor:
    return live_first(values.square(), weight.abs(), live)


def search(weight: Tensor, start: Tensor, hessian: Tensor, live: Tensor, pattern: Pattern, steps: int) -> Tensor:
    """Return the sparse values (rows, in) that the alternating steps lead to from `start`.

    Args:
        weight: The original matrix (rows, in).
        start: Sparse values to begin at.
        hessian: The damped Hessian (in, in).
        live: Bool (in,): inputs that are not always zero.
        pattern: The pattern along the last axis.
        steps: At most so many.
    """
    scale = hessian.diagonal().sqrt()
    unit = hessian / scale / scale.unsqueeze(1)
    target, sparse = weight * scale @ unit, start * scale
    dual, rho, factored, settled = torch.zeros_like(sparse), RHO, None, 0
    for step in range(steps):
        if factored is None:
            factored = torch.linalg.cholesky(unit + rho * torch.eye(len(unit), dtype=unit.dtype, device=unit.device))
        dense = torch.cholesky_solve((target - dual + rho * sparse).T, factored).T
        moved = dense + dual / rho
        mask = pattern.project(_scores(moved, weight, live))
        settled = settled + 1 if torch.equal(mask, sparse != 0) else 0
        sparse = moved.masked_fill(~mask, 0.0)
        dual += rho * (dense - sparse)
        if settled == EVERY:
            break
        if step % EVERY == EVERY - 1:
            rho, factored = rho * GROWTH, None
    return sparse / scale


def on_support(weight: Tensor, start: Tensor, keep: Tensor, hessian: Tensor, steps: int) -> Tensor:
    """Return the values (rows, in) on the mask `keep` that minimise the error, from `start` by conjugate gradients.

    Each row is a system of its own; the steps are preconditioned with the Hessian's diagonal.
    """
    pruned, diagonal = ~keep, hessian.diagonal()
    values = start.clone()
    residual = ((weight - values) @ hessian).masked_fill_(pruned, 0.0)
    direction = residual / diagonal
    size = (residual * direction).sum(1, keepdim=True)
    enough = TOLERANCE**2 * size.sum()
    tiny = torch.finfo(weight.dtype).tiny
    for _ in range(steps):
        if size.sum() <= enough:
            break
        image = (direction @ hessian).masked_fill_(pruned, 0.0)
        length = size / (direction * image).sum(1, keepdim=True).clamp_min(tiny)
        values.addcmul_(length, direction)
        residual.addcmul_(length, image, value=-1)
        scaled = residual / diagonal
        new = (residual * scaled).sum(1, keepdim=True)
        direction = scaled.addcmul_(new / size.clamp_min(tiny), direction)
        size = new
    return values
