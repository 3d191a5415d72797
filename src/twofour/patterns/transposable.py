"""Transposable 2:4: a mask that is 2:4 along both axes, so that a weight and its transpose both run on 2:4 kernels.

Hubara et al. 2021, "Accelerated Sparse Neural Training: A Provable and Efficient Method to Find N:M Transposable Masks"
(arXiv 2102.08124). A tile of 4 x 4 values has 90 masks that keep two values in each row and each column; the one with
the largest sum of scores is found exactly.

Two upper rows keep 0, 1 or 2 values in each column, the two lower ones the rest, so the 90 masks fall into 19 kinds
(by the columns' counts), and in each kind upper and lower rows are chosen apart: 36 sums on either side, then 19.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from twofour import native
from twofour.errors import PatternError
from twofour.native import gpu
from twofour.patterns.base import Conformity, Pattern, first_true, non_finite, numbers, require_groups
from twofour.patterns.nm import HALF_OR_SINGLE, NM, fits_float32
from twofour.shapes import Bool, Real, Shaped

PAIRS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
"""The columns that a row of a tile may keep; pair p and pair 5 - p have no column in common."""


@dataclass(frozen=True)
class Transposable(Pattern):
    """At most `n` non-zero values in every `m` consecutive ones along axis 0 (out) and along the last axis (in).

    Positions of the axes between (the taps of a convolution) are masked one by one. Only 2:4 is built; a PatternError
    says that others are planned.
    """

    n: int = 2
    m: int = 4

    def __post_init__(self) -> None:
        if (self.n, self.m) != (2, 4):
            raise PatternError(
                f"the pattern {self.name!r} is planned, not built yet",
                got=f"N = {self.n}, M = {self.m}",
                wanted='"2:4-transposable"',
                remedy=f'"{self.n}:{self.m}" is sparse along the reduction axis alone',
            )

    @property
    def name(self) -> str:
        """The pattern's text: "2:4-transposable"."""
        return f"{self.n}:{self.m}-transposable"

    @property
    def group(self) -> int:
        """Values per group along either axis: m."""
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
        self, scores: Real[Tensor, "out *between reduction"], *, absolute: bool = False
    ) -> Bool[Tensor, "out *between reduction"]:
        """Keep in every tile the mask with the largest sum of scores; see `Pattern.project`.

        The sums run in float32 (float64 and wide integers: float64). Among equal sums the choice is the first in a
        fixed order, the same for every instruction set.

        Args:
            scores: (out, ..., in), out and in multiples of 4.
            absolute: Rank by |scores|.
        """
        _require_tiles(self, scores, "a tensor of scores")
        scores = scores.detach().resolve_neg()
        if scores.is_cuda and scores.dtype in HALF_OR_SINGLE and gpu.runs(scores):
            return _project_on_gpu(scores, absolute)
        if scores.device.type != "cpu" or not fits_float32(scores):
            return project_tiles_reference(scores, absolute=absolute)
        return _project_native(scores, absolute)

    def check(self, weight: Shaped[Tensor, "out *between reduction"]) -> Conformity:
        """Count the groups of four, along both axes, with at most two non-zeros; see `Pattern.check`."""
        _require_tiles(self, weight, "a weight")
        nonzero = weight.detach() != 0
        across = torch.unflatten(nonzero, -1, (-1, self.m)).sum(-1, dtype=torch.uint8) <= self.n  # (out, ..., in / 4)
        down = torch.unflatten(nonzero, 0, (-1, self.m)).sum(1, dtype=torch.uint8) <= self.n  # (out / 4, ..., in)
        total, legal = across.numel() + down.numel(), int(across.sum()) + int(down.sum())
        if legal == total:
            return Conformity(total, legal)
        if not across.all():
            *rows, group = first_true(~across)
            first = (*rows, group * self.m)
            values = weight.detach()[tuple(rows)][first[-1] : first[-1] + self.m]
        else:
            band, *rest = first_true(~down)
            first = (band * self.m, *rest)
            values = weight.detach()[band * self.m : (band + 1) * self.m][(slice(None), *rest)]
        return Conformity(total, legal, first, numbers(values))


def _require_tiles(pattern: Transposable, tensor: Tensor, role: str) -> None:
    require_groups(pattern, tensor, role)
    if tensor.ndim < 2 or tensor.shape[0] % pattern.group:
        raise PatternError(
            f"{role} cannot carry the pattern {pattern.name}",
            got=f"shape {tuple(tensor.shape)}",
            wanted="(out, ..., in) with out and in multiples of 4",
            remedy='leave this layer dense (skip=...), pad the layer, or use "2:4", which divides in alone',
        )


def project_tiles_reference(
    scores: Real[Tensor, "out *between reduction"], *, absolute: bool = False
) -> Bool[Tensor, "out *between reduction"]:
    """Search every 4 x 4 tile in plain torch: the reference of the native kernels, any device.

    Args:
        scores: Real (out, ..., in), out and in multiples of 4.
        absolute: Rank by |scores|.

    Raises:
        PatternError: A score is NaN or infinite.
    """
    if scores.is_floating_point() and not torch.isfinite(scores).all():
        raise non_finite("a tensor of scores", scores)
    wide = scores.to(torch.float32 if fits_float32(scores) else torch.float64)
    tiles = (wide.abs() if absolute else wide).reshape(len(scores) // 4, 4, -1, 4)  # (bands, row, tiles, column)
    pair = [[tiles[:, row, :, i] + tiles[:, row, :, j] for i, j in PAIRS] for row in range(4)]
    value, chosen = _best_of_kind(pair, *_kinds()[0])
    for kind in _kinds()[1:]:
        other, way = _best_of_kind(pair, *kind)
        better = other > value
        value = torch.where(better, other, value)
        chosen = torch.where(better.unsqueeze(-1), way, chosen)
    keeps = torch.tensor(
        [[column in kept for column in range(4)] for kept in PAIRS], dtype=torch.bool, device=scores.device
    )
    return keeps[chosen].movedim(2, 1).reshape(scores.shape)


@cache
def _kinds() -> list[tuple[list[tuple[int, int]], list[tuple[int, int]]]]:
    """Return the 19 kinds: the pairs that the two upper rows may keep, and those of the two lower rows."""
    same = [([(p, p)], [(5 - p, 5 - p)]) for p in range(6)]
    apart = [(p, 5 - p) for p in range(6)]
    mixed = [
        ([(p, q), (q, p)], [(5 - p, 5 - q), (5 - q, 5 - p)]) for p in range(6) for q in range(p + 1, 6) if p + q != 5
    ]
    return [*same, (apart, apart), *mixed]


def _best_of_kind(
    pair: list[list[Tensor]], upper: list[tuple[int, int]], lower: list[tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    above, below = _first_best(pair, 0, upper), _first_best(pair, 2, lower)
    return above[0] + below[0], torch.cat((above[1], below[1]), -1)  # a pair for each row


def _first_best(pair: list[list[Tensor]], row: int, ways: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Return the largest sum over rows `row` and `row` + 1, and the first way that has it."""
    value = pair[row][ways[0][0]] + pair[row + 1][ways[0][1]]
    chosen = torch.tensor(ways[0], dtype=torch.long, device=value.device).expand(*value.shape, 2)
    for way in ways[1:]:
        other = pair[row][way[0]] + pair[row + 1][way[1]]
        better = other > value
        value = torch.where(better, other, value)
        chosen = torch.where(better.unsqueeze(-1), torch.tensor(way, dtype=torch.long, device=value.device), chosen)
    return value, chosen


def _project_on_gpu(scores: Tensor, absolute: bool) -> Tensor:
    if not torch.isfinite(scores).all():
        raise non_finite("a tensor of scores", scores)
    from twofour.patterns.nm_tiles_triton import tiles

    return tiles(scores, absolute=absolute)


def _project_native(scores: Tensor, absolute: bool) -> Tensor:
    ranked = scores.to(torch.float32).contiguous()
    keep = torch.empty(scores.shape, dtype=torch.bool, device="cpu")
    finite = native.extension().nm_tiles(tiles_row(), ranked, keep, absolute, native.threads())
    if not finite:
        raise non_finite("a tensor of scores", scores)
    return keep


def tiles_row() -> int:
    """Return the index of the fastest native search that may run here (TWOFOUR_ISA caps it)."""
    return native.best("nm_tiles").index
