"""Search for an order of a weight's input channels in which an N:M mask keeps more of the scores.

Sources: groups of stripes and escapes: Pool and Yu 2021, "Channel Permutations for N:M Sparsity" (NeurIPS), section 4;
rounds of linear assignment: Zhang et al. 2024, "Plug-and-Play" (RIA, ICLR), section 3.3, here in random blocks, again
and again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb, factorial

import torch
from torch import Tensor

from twofour import native
from twofour.errors import PatternError
from twofour.patterns import NM, PairedNM, Pattern, parse
from twofour.patterns.base import is_finite, non_finite, require_groups

MOST_PERMUTATIONS = 3_000_000
"""Distinct orders of one window beyond which it is refused: 16 columns of 2:4 have 2,627,625."""
_MOST_SUBSETS = 20_000
_WINDOW_LIMIT = 24  # kStripeMaxWindow
_BLOCK = 256  # stripes of one assignment: at 1024 columns the best of 16 to 256 after 4 s, at 4096 within 0.1 of 512
_ESCAPE_STRIPES = 64  # beyond, rounds of assignment gain more in the time that escapes take
_REFINED_STRIPES = 64  # stripes whose groups are all looked at, where there are more than 128 of them
_WORK = 1.8e11  # values compared by the rounds at most: some 20 s on one core with AVX-512
_LANES = 16


@dataclass(frozen=True, eq=False)
class Permutation:
    """A better order of the columns of a matrix of scores.

    Attributes:
        order: LongTensor (in,), new position -> old column: `scores[:, order]` is what the pattern fits better. Where
            nothing is gained it is 0, 1, 2 ...
        before: What the mask keeps of the scores in their own order: a sum in float64.
        after: What it keeps of `scores[:, order]`.
        total: Sum of all scores.
        bound: Sum of the best n / m of each row, wherever they stand: what no order can exceed.
    """

    order: Tensor
    before: float
    after: float
    total: float
    bound: float

    @property
    def efficacy(self) -> float:
        """Share of the loss against `bound` that the order wins back (Pool and Yu 2021): 0 = default, 1 = all."""
        room = self.bound - self.before
        return (self.after - self.before) / room if room > 0 else 0.0


def search(
    scores: Tensor,
    pattern: str | Pattern,
    *,
    escapes: int = 100,
    seed: int = 0,
    window: int | None = None,
    rounds: int | None = None,
    absolute: bool = False,
) -> Permutation:
    """Search for an order of the columns of `scores` in which `pattern` keeps a larger sum.

    Columns that share groups form a stripe. Matrices of more than 64 stripes begin with rounds of assignment: every
    stripe gives one column and a block of stripes gets its columns back in the best of all ways. Then every window (a
    few stripes) is dealt anew in the best way until nothing gains. Up to 64 stripes, `escapes` times swaps at random
    leave the local optimum, and a better one is kept. The result depends on the arguments alone, not on
    threads or processor.

    Args:
        scores: (rows, in) of any floating dtype, not negative, larger is more important; computed in float32. The
            consumers of one tensor are searched together: concatenate their matrices along the rows.
        pattern: N:M, or its pair-wise form, whose pairs stay together.
        escapes: How often to leave a local optimum; 0 is the paper's search from the order as it is, without rounds.
        seed: Of the escapes and rounds.
        window: Columns dealt anew together, a multiple of M; default two stripes: 8 for 2:4. 12 finds more in 50 times
            the time. One stripe leaves the search to the rounds.
        rounds: Rounds of assignment at most; default as above.
        absolute: Search by |scores|: for a weight by magnitude.

    Raises:
        PatternError: `scores` does not divide into groups, is negative, NaN or infinite; no N:M pattern; a window that
            is no multiple of M or has more permutations than can be tried.
    """
    pattern = parse(pattern)
    require_groups(pattern, scores, "a matrix of scores")
    matrix = _matrix(scores, absolute)
    if isinstance(pattern, PairedNM):
        found = _search(
            matrix.unflatten(1, (-1, 2)).sum(2), pattern.n // 2, pattern.m // 2, escapes, seed, window, rounds
        )
        order = (found[:, None] * 2 + torch.arange(2)).ravel()
    elif isinstance(pattern, NM):
        order = _search(matrix, pattern.n, pattern.m, escapes, seed, window, rounds)
    else:
        raise PatternError(
            "no order of channels is searched for this pattern",
            got=pattern.name,
            wanted="N:M or pair-wise N:M",
            remedy="keep the order as it is, or search for the N:M inside the pattern",
        )
    before, after = kept(matrix, pattern), kept(matrix[:, order], pattern)
    if after <= before:
        order, after = torch.arange(matrix.shape[1]), before
    return Permutation(order, before, after, matrix.sum(dtype=torch.float64).item(), _bound(matrix, pattern))


def kept(scores: Tensor, pattern: Pattern) -> float:
    """Return the sum, in float64, of the scores (rows, in) that the pattern's mask keeps; they are not negative."""
    return torch.where(pattern.project(scores), scores, 0).sum(dtype=torch.float64).item()


def _matrix(scores: Tensor, absolute: bool) -> Tensor:
    if scores.ndim != 2:
        raise PatternError(
            "a search takes a matrix of scores",
            got=f"shape {tuple(scores.shape)}",
            wanted="(rows, in), the reduction axis last",
            remedy="for a convolution: scores.movedim(1, -1).flatten(0, -2)",
        )
    matrix = scores.detach().to("cpu", torch.float32)
    matrix = matrix.abs() if absolute else matrix
    if not is_finite(matrix):
        raise non_finite("a matrix of scores", matrix)
    if matrix.min() < 0:
        raise PatternError(
            "a search takes scores that are not negative",
            got=f"the smallest is {matrix.min().item():g}",
            wanted="larger = more important, from 0",
            remedy="absolute=True searches by |scores|, as magnitude does",
        )
    return matrix


def _bound(matrix: Tensor, pattern: Pattern) -> float:
    """Sum of the largest n / m of each row."""
    count = round(matrix.shape[1] * pattern.density)
    return sum(
        part.topk(count, dim=1, sorted=False).values.sum(dtype=torch.float64).item() for part in matrix.split(1024)
    )


def _window(window: int | None, m: int, stripes: int) -> int:
    """Return how many columns are dealt anew together; m where that is left to the rounds."""
    if window is None:
        small = 2 * m <= _WINDOW_LIMIT and comb(2 * m, m) <= _MOST_SUBSETS
        return 2 * m if small and stripes > 1 else m
    parts = window // m
    if window % m or parts < 1:
        raise PatternError(
            "a window is whole stripes",
            got=f"window={window}",
            wanted=f"a multiple of {m}",
            remedy=f"window={2 * m}, or leave it out",
        )
    permutations = factorial(window) // (factorial(m) ** parts * factorial(parts))
    if window > m and (permutations > MOST_PERMUTATIONS or window > _WINDOW_LIMIT or comb(window, m) > _MOST_SUBSETS):
        raise PatternError(
            "the window has more permutations than can be tried",
            got=f"window={window}: {permutations:.3g} permutations of {comb(window, m):,} stripes",
            wanted=f"at most {MOST_PERMUTATIONS:,} of at most {_MOST_SUBSETS:,}, up to {_WINDOW_LIMIT} columns",
            remedy=f"window={2 * m}, or window={m} to leave the search to the rounds of assignment",
        )
    return min(window, stripes * m)


def _search(matrix: Tensor, n: int, m: int, escapes: int, seed: int, window: int | None, rounds: int | None) -> Tensor:
    rows, columns = matrix.shape
    stripes = columns // m
    width = _window(window, m, stripes)
    order = torch.arange(columns)
    if stripes < 2:
        return order
    # One contiguous run of rows per column, aligned and padded with zeros to whole vectors.
    padded = -(-rows // _LANES) * _LANES
    memory = torch.zeros(columns * padded + _LANES)
    start = (-memory.data_ptr() // memory.element_size()) % _LANES
    held = memory[start : start + columns * padded].view(columns, padded)
    held[:, :rows] = matrix.T
    extension, row = native.extension(), native.best_row("nm_stripes")

    def call(verb: str, part: Tensor, *options: int) -> None:
        getattr(extension, verb)(
            row, held.data_ptr(), padded, len(part), n, m, seed % 2**64, native.threads(), part.data_ptr(), *options
        )

    rounds = _rounds(stripes, padded, escapes, width > m) if rounds is None else rounds
    if rounds:
        call("nm_stripes_assign", order, _BLOCK, rounds, 20)
    if width > m:
        many = (stripes > 2 * _REFINED_STRIPES and width > 2 * m) or stripes > 512 or (rounds and stripes > 128)
        for part in order.split(_REFINED_STRIPES * m if many else columns):
            if len(part) > m:
                call("nm_stripes_refine", part, min(width, len(part)), escapes if stripes <= _ESCAPE_STRIPES else 0)
    return _canonical(order, m)


def _rounds(stripes: int, rows: int, escapes: int, refined: bool) -> int:
    if refined and (stripes <= _ESCAPE_STRIPES or not escapes):
        return 0
    return max(8, min(100, int(_WORK / (stripes * min(stripes, _BLOCK) * rows))))


def _canonical(order: Tensor, m: int) -> Tensor:
    """Sort the columns of each stripe and the stripes by their first column: neither changes what is kept."""
    stripes = order.view(-1, m).sort(dim=1).values
    return stripes[stripes[:, 0].argsort()].ravel()
