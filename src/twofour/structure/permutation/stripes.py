"""Search for an order of a weight's input channels in which an N:M mask keeps more of the scores.

Sources: groups of stripes and escapes: Pool and Yu 2021, "Channel Permutations for N:M Sparsity" (NeurIPS), section 4;
rounds of linear assignment: Zhang et al. 2024, "Plug-and-Play" (RIA, ICLR), section 3.3, here in random blocks, again
and again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import comb, factorial
from typing import Any

import torch
from torch import Tensor

from twofour import native
from twofour.errors import PatternError
from twofour.patterns import NM, PairedNM, Pattern, parse
from twofour.patterns.base import is_finite, non_finite, require_groups
from twofour.progress import Lines

MOST_PERMUTATIONS = 10**10
"""Distinct orders of one window beyond which it is refused, as apex does: 20 columns of 2:4 have 2,546,168,625."""
_MOST_SUBSETS = 20_000
_WINDOW_LIMIT = 24  # kStripeMaxWindow
_BLOCK = 256  # stripes of one assignment: at 1024 columns the best of 16 to 256 after 4 s, at 4096 within 0.1 of 512
_ESCAPES = 100  # the default, where there is one
_ESCAPE_STRIPES = 64  # beyond, rounds of assignment gain more in the time that escapes take: none unless asked for
_PASS = 2e10  # choices of a part in one pass over the groups of stripes: some 30 s on one core
_REFINED_STRIPES = 64  # stripes whose groups are all looked at, where there are more than 128 of them
_WORK = 1.8e11  # values compared by the rounds at most: some 20 s on one core with AVX-512
_LANES = 16
_MOST = 2.0**96  # a score that the search takes as it is: what it sums stays finite, pairs of columns too


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
    escapes: int | None = None,
    seed: int = 0,
    window: int | None = None,
    rounds: int | None = None,
    absolute: bool = False,
    progress: bool | Callable[[str], None] = True,
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
            Default 100 where there are up to 64 stripes and windows of up to 3. Where the stripes are looked at in
            parts, so often in each part.
        seed: Of the escapes and rounds.
        window: Columns dealt anew together, a multiple of M; default two stripes: 8 for 2:4. 12 finds more in 50 times
            the time, 16 and 20 a little more in hours: docs/permutation.md. One stripe leaves the search to the rounds.
        rounds: Rounds of assignment at most; default as above.
        absolute: Search by |scores|: for a weight by magnitude.
        progress: Show how far a pass of many seconds is, on standard error, or tell it to this function.

    Raises:
        PatternError: `scores` does not divide into groups, is negative, NaN or infinite; no N:M pattern; `escapes` or
            `rounds` is negative; a window that is no multiple of M or has more permutations than can be tried.
    """
    pattern = parse(pattern)
    if any(count is not None and (type(count) is not int or count < 0) for count in (escapes, rounds)):
        raise PatternError(
            "the search cannot be made so long",
            got=f"escapes={escapes!r}, rounds={rounds!r}",
            wanted="whole numbers, at least 0, or None",
            remedy="leave them out; escapes=0 is the paper's search",
        )
    require_groups(pattern, scores, "a matrix of scores")
    matrix = _matrix(scores, absolute)
    unit = 2.0**32 if matrix.max() > _MOST else 1.0
    sought = matrix / unit if unit > 1 else matrix
    if isinstance(pattern, PairedNM):
        pairs = sought.unflatten(1, (-1, 2)).sum(2)
        found = _search(pairs, pattern.n // 2, pattern.m // 2, escapes, seed, window, rounds, progress)
        order = (found[:, None] * 2 + torch.arange(2, device="cpu")).ravel()
    elif isinstance(pattern, NM):
        order = _search(sought, pattern.n, pattern.m, escapes, seed, window, rounds, progress)
    else:
        raise PatternError(
            "no order of channels is searched for this pattern",
            got=pattern.name,
            wanted="N:M or pair-wise N:M",
            remedy="keep the order as it is, or search for the N:M inside the pattern",
        )
    before, after = kept(sought, pattern) * unit, kept(sought[:, order], pattern) * unit
    if after <= before:
        order, after = torch.arange(matrix.shape[1], device="cpu"), before
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


def _search(
    matrix: Tensor,
    n: int,
    m: int,
    escapes: int | None,
    seed: int,
    window: int | None,
    rounds: int | None,
    progress: bool | Callable[[str], None],
) -> Tensor:
    order = torch.arange(matrix.shape[1], device="cpu")
    stripes = len(order) // m
    width = _window(window, m, stripes)
    if stripes < 2:
        return order
    held = _columns(matrix)
    padded = held.shape[1]
    extension, row = native.extension(), native.best("nm_stripes").index

    def call(verb: str, part: Tensor, *options: Any) -> None:
        getattr(extension, verb)(row, held, part, n, m, seed % 2**64, native.threads(), *options)

    rounds = _rounds(stripes, padded, escapes, width > m) if rounds is None else rounds
    if rounds:
        call("nm_stripes_assign", order, _BLOCK, rounds, 20)
    if width > m:
        many = (stripes > 2 * _REFINED_STRIPES and width > 2 * m) or stripes > 512 or (rounds and stripes > 128)
        parts = order.split(min(_REFINED_STRIPES if many else stripes, _most_stripes(width, m, stripes)) * m)
        leaps = _escapes(stripes, width // m) if escapes is None else escapes
        with _Progress(len(parts), progress) as shown:
            for part in parts:
                if len(part) > m:
                    call("nm_stripes_refine", part, min(width, len(part)), leaps, shown.tell)
                shown.part += 1
    return _canonical(order, m)


def _columns(matrix: Tensor) -> Tensor:
    """Return one contiguous run of rows per column, aligned and padded with zeros to whole vectors."""
    rows, columns = matrix.shape
    padded = -(-rows // _LANES) * _LANES
    memory = torch.zeros(columns * padded + _LANES, dtype=torch.float32, device="cpu")
    start = (-memory.data_ptr() // memory.element_size()) % _LANES
    held = memory[start : start + columns * padded].view(columns, padded)
    held[:, :rows] = matrix.T
    return held


def _escapes(stripes: int, parts: int) -> int:
    return _ESCAPES if stripes <= _ESCAPE_STRIPES and parts <= 3 else 0


def _most_stripes(width: int, m: int, stripes: int) -> int:
    """Return how many of `stripes` are looked at together, so that a pass over all their groups ends."""
    parts = width // m
    # As `Deals` counts them: sets of k parts that are left have no column below parts - k.
    choices = sum(comb(width - parts + k, k * m) * comb(k * m - 1, m - 1) for k in range(2, parts + 1))
    while stripes > parts and comb(stripes, parts) * choices > _PASS:
        stripes -= 1
    return stripes


class _Progress:
    """A line about the pass that runs, while the search takes seconds: rewritten on a terminal, see `Lines` elsewhere.

    No bar: the search runs inside steps that have one.
    """

    def __init__(self, parts: int, shown: bool | Callable[[str], None]) -> None:
        self.parts, self.part = parts, 0
        self._told = shown if callable(shown) else None
        self._shown, self._wrote = shown is True and sys.stderr.isatty(), False
        self._lines = Lines("permuting", shown=shown is True and not self._shown)

    def __enter__(self) -> _Progress:
        self._lines.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        self._lines.__exit__(None, None, None)
        if self._wrote:
            print(file=sys.stderr)

    def tell(self, done: int, of: int) -> None:
        """Say how many of how many groups of stripes were looked at."""
        where = f"part {self.part + 1} of {self.parts}, " if self.parts > 1 else ""
        self._lines.move(done, of, f"{where}groups of stripes")
        if self._told is not None:
            self._told(f"{where}{done:,} of {of:,} groups of stripes")
        if self._shown:
            print(
                f"\rpermuting: {where}{done:,} of {of:,} groups of stripes", end="\033[K", file=sys.stderr, flush=True
            )
            self._wrote = True


def _rounds(stripes: int, rows: int, escapes: int | None, refined: bool) -> int:
    if refined and (stripes <= _ESCAPE_STRIPES or escapes == 0):
        return 0
    return max(8, min(100, int(_WORK / (stripes * min(stripes, _BLOCK) * rows))))


def _canonical(order: Tensor, m: int) -> Tensor:
    """Sort the columns of each stripe and the stripes by their first column: neither changes what is kept."""
    stripes = order.view(-1, m).sort(dim=1).values
    return stripes[stripes[:, 0].argsort()].ravel()
