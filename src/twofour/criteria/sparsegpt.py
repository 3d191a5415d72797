"""SparseGPT: prune column by column and let the columns that follow make up for each error.

Frantar and Alistarh 2023, "SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot", algorithm 1. With
H = X^T X + damping and the upper Cholesky factor U of H^-1 (H^-1 = U^T U), column j of W (rows, in) is pruned by

    q = keep_j * w_j,   e = (w_j - q) / U_jj,   W_{:, j:} -= e U_{j, j:}

and of each group of M columns those stay whose w^2 / U_jj^2, the growth of the error if they go, is largest. U_jj^2 is
[H^-1]_jj of the inverse with all columns before j removed: the optimal brain surgeon's formula.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from twofour.calibration import Statistics
from twofour.criteria.activation import live_first
from twofour.criteria.base import Layerwise, Solution
from twofour.errors import RecipeError
from twofour.patterns import VNM, Block, Hybrid, Pattern

_log = logging.getLogger("twofour.criteria")

DOUBLINGS = 20
LARGEST_FLOAT64 = 4096
"""Widest Hessian factored in float64: above, memory and time count more than digits."""


@dataclass(frozen=True)
class SparseGPT(Layerwise):
    """Prune with the update of the remaining weights.

    Attributes:
        dampening: What is added to the Hessian's diagonal, as a fraction of its mean; doubled where the factor fails.
        block: Columns updated at a time; the result does not depend on it but for rounding.
    """

    kind = "sparsegpt"
    need = "hessian"

    dampening: float = 0.01
    block: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.dampening > 0 or self.block < 1:
            raise RecipeError(
                "SparseGPT's options cannot be used",
                got=f"dampening={self.dampening}, block={self.block}",
                wanted="dampening > 0 and block >= 1",
                remedy='"sparsegpt" without options takes dampening=0.01, block=128',
            )

    def solve(self, weight: Tensor, pattern: Pattern, statistics: Statistics | None, name: str) -> Solution:
        """Choose the mask and the values of the kept weights, group by group of a grouped convolution."""
        assert statistics is not None, "asked for by `need`"
        return solve(weight, pattern, statistics, name, self.dampening, self.block)


class SparseGPTMask(SparseGPT):
    """SparseGPT's mask over the original values, options as its: the control that shows what the update brings."""

    kind = "sparsegpt-mask"

    def solve(self, weight: Tensor, pattern: Pattern, statistics: Statistics | None, name: str) -> Solution:
        """Choose the mask as SparseGPT does and leave the values alone."""
        return Solution(super().solve(weight, pattern, statistics, name).keep)


def products(weight: Tensor, pattern: Pattern, statistics: Statistics) -> Tensor:
    """Return what is solved product by product, (products, rows, in): each has its own Hessian.

    Groups of inputs that are dense in all rows make one product of several whose inputs are the same, as of
    self-attention's query, key and value.

    Raises:
        RecipeError: The pattern is V:N:M and V does not divide the rows of one of several products, or its blocks do
            not; or groups of inputs are to be dense in products of different inputs.
    """
    assert statistics.hessian is not None, "asked for by `need`"
    if isinstance(pattern, Hybrid) and all(torch.equal(other, statistics.hessian[0]) for other in statistics.hessian):
        return weight.flatten(0, 1)[None]
    _require_whole(weight, pattern)
    return weight


def _require_whole(weight: Tensor, pattern: Pattern) -> None:
    products, rows, columns = weight.shape
    if isinstance(pattern, Hybrid) and products > 1:
        raise RecipeError(
            f"{pattern.name} cannot be laid over a weight of {products} products by a criterion with a Hessian",
            got=f"{products} products, whose inputs differ",
            wanted="groups of inputs that are dense in all rows of one product",
            remedy=f"choose {pattern.regular.name} for the layer, or a criterion that ranks values, such as wanda",
        )
    if isinstance(pattern, Block) and products > 1:
        blocks = -(-rows // pattern.r) * -(-columns // pattern.c)
        if rows % pattern.r or pattern.zeros(blocks) * products != pattern.zeros(blocks * products):
            raise RecipeError(
                f"{pattern.name} cannot be laid over a weight of {products} products by a criterion with a Hessian",
                got=f"{rows} rows and {blocks} blocks in each product",
                wanted="whole blocks, and a whole number of zero ones, in each product",
                remedy="choose other blocks for the layer, or a criterion that ranks values, such as wanda",
            )
    if isinstance(pattern, VNM) and products > 1 and rows % pattern.v:
        raise RecipeError(
            f"{pattern.name} cannot be laid over a weight of {products} products by a criterion with a Hessian",
            got=f"{rows} rows in each product, which blocks of {pattern.v} rows do not fill",
            wanted=f"V that divides {rows}, or a weight that is one product",
            remedy="choose another V for the layer, the plain N:M, or a criterion that ranks values, such as wanda",
        )


def solve(
    weight: Tensor, pattern: Pattern, statistics: Statistics, name: str, dampening: float, block: int
) -> Solution:
    """Return SparseGPT's mask and values for (groups, rows, in), each group by its own Hessian."""
    assert statistics.hessian is not None, "asked for by `need`"
    parts = products(weight.detach().to(statistics.hessian.dtype), pattern, statistics)
    solved = [
        prune_columns(part, factor(statistics, group, dampening, name), pattern, block)
        for group, part in enumerate(parts)
    ]
    values, keep = (torch.stack(each).view(weight.shape) for each in zip(*solved, strict=True))
    return Solution(keep, values)


@dataclass(frozen=True, eq=False)
class Factor:
    """What pruning needs of one group's Hessian.

    Attributes:
        upper: U (in, in), the upper Cholesky factor of the damped inverse; of the Hessian's dtype.
        live: Bool (in,): inputs that were other than zero at least once.
        damping: What was added to the diagonal.
    """

    upper: Tensor
    live: Tensor
    damping: float


def damped(statistics: Statistics, group: int, dampening: float) -> tuple[Tensor, Tensor, float]:
    """Return H of the live inputs with an identity row for each dead one, the live inputs, and the damping to add.

    The rows are averaged, so that the damping does not depend on how many there are.
    """
    assert statistics.hessian is not None
    exact = statistics.hessian.shape[-1] <= LARGEST_FLOAT64
    hessian = statistics.moments(group, torch.float64 if exact else None)
    diagonal = hessian.diagonal()
    live = diagonal > 0
    mean = diagonal[live].mean().item() if live.any() else 1.0
    diagonal[~live] = mean
    return hessian, live, dampening * mean


def factor(statistics: Statistics, group: int, dampening: float, name: str) -> Factor:
    """Factor the damped inverse Hessian once for all weights that share the statistics.

    Raises:
        RecipeError: Even a damping of a million times the one asked for leaves the Hessian indefinite.
    """
    key = ("factor", group, dampening, statistics.shrunk)
    if key in statistics.memo:
        return statistics.memo[key]
    assert statistics.hessian is not None
    dtype = statistics.hessian.dtype
    hessian, live, damping = damped(statistics, group, dampening)
    added = 0.0
    for _ in range(DOUBLINGS):
        hessian.diagonal().add_(damping - added)
        added = damping
        lower, failed = torch.linalg.cholesky_ex(hessian)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            del lower
            if not failed:
                found = Factor(upper.to(dtype), live, damping)
                statistics.memo[key] = found
                return found
        damping *= 2
        _log.info("`%s`: the Hessian has no Cholesky factor; dampening doubled to %.3g", name, damping)
    raise RecipeError(
        "the Hessian of a layer's inputs has no Cholesky factor",
        got=f"damping up to {added:.3g}",
        wanted="inputs in the range of float32",
        remedy='a larger dampening, "sparsegpt:dampening=0.1", or more calibration samples',
        layer=name,
    )


def prune_columns(weight: Tensor, inverse: Factor, pattern: Pattern, block: int) -> tuple[Tensor, Tensor]:
    """Prune one matrix (rows, in) in the pattern and update what stays; the matrix itself is not changed.

    Returns:
        The new values, 0 where pruned, and the mask.
    """
    weight, upper, group = weight.clone(), inverse.upper, pattern.group
    choose = _choose
    if isinstance(pattern, Block):
        group, choose = max(1, block // pattern.c) * pattern.c, _Strips(weight, pattern).choose
    if isinstance(pattern, Hybrid):
        choose = _Regions(weight, inverse, pattern).choose
    keep = torch.zeros(weight.shape, dtype=torch.bool, device=weight.device)
    width = max(1, block // group) * group
    for start in range(0, weight.shape[1], width):
        end = min(start + width, weight.shape[1])
        local, factor_of_block = weight[:, start:end].clone(), upper[start:end, start:end].contiguous()
        errors = torch.zeros_like(local)
        for first in range(0, end - start, group):
            columns = slice(first, min(first + group, end - start))
            keep[:, start:end][:, columns] = choose(
                local[:, columns], factor_of_block.diagonal()[columns], inverse.live[start:end][columns], pattern
            )
            for column in range(first, columns.stop):
                kept = keep[:, start + column]
                error = local[:, column].masked_fill(kept, 0.0) / factor_of_block[column, column]
                # Within the group the columns after this one, then all that follow in the block.
                local[:, column + 1 :].addr_(error, factor_of_block[column, column + 1 :], alpha=-1)
                errors[:, column] = error
        weight[:, start:end] = local
        weight[:, end:].addmm_(errors, upper[start:end, end:], alpha=-1)
    return weight.masked_fill_(~keep, 0.0), keep


class _Strips:
    """Chooses blocks strip by strip: after each, the share of the zero blocks that its columns have of all is gone.

    Args:
        weight: The matrix (rows, in).
        pattern: Of blocks.
    """

    def __init__(self, weight: Tensor, pattern: Block) -> None:
        self.pattern, self.seen, self.gone = pattern, 0, 0
        self.blocks = prod(pattern.grid(tuple(weight.shape)))

    def choose(self, weight: Tensor, diagonal: Tensor, live: Tensor, pattern: Pattern) -> Tensor:
        """Return the mask of the next columns."""
        scores = self.pattern.scores(_saliency(weight, diagonal, live))
        self.seen += scores.numel()
        going = self.pattern.zeros(self.blocks) * self.seen // self.blocks - self.gone
        self.gone += going
        return self.pattern.spread(self.pattern.best(scores, going), tuple(weight.shape))


class _Regions:
    """Chooses group by group: whole where the group is dense, by N:M elsewhere.

    Args:
        weight: The matrix (rows, in).
        inverse: Of its Hessian. The dense groups are those that lose most by the diagonal of the whole inverse: by what
            a value costs that goes alone, where all others may make up for it.
        pattern: Which share of the groups is dense.
    """

    def __init__(self, weight: Tensor, inverse: Factor, pattern: Hybrid) -> None:
        scores = _saliency(weight, inverse.upper.square().sum(0).sqrt(), inverse.live)
        self.groups = iter(pattern.dense_groups(scores).tolist())

    def choose(self, weight: Tensor, diagonal: Tensor, live: Tensor, pattern: Pattern) -> Tensor:
        """Return the mask of the next group."""
        assert isinstance(pattern, Hybrid), pattern
        if next(self.groups):
            return torch.ones(weight.shape, dtype=torch.bool, device=weight.device)
        return _choose(weight, diagonal, live, pattern.regular)


def _choose(weight: Tensor, diagonal: Tensor, live: Tensor, pattern: Pattern) -> Tensor:
    return pattern.project(_saliency(weight, diagonal, live))


def _saliency(weight: Tensor, diagonal: Tensor, live: Tensor) -> Tensor:
    size = weight.abs()
    return live_first((size / diagonal).square(), size, live)
