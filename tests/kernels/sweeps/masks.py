"""Sweeps of rows that make masks, check them, search orders and pack."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import torch
from torch import Tensor

from tests.kernels.sweeps.operands import (
    EXT,
    SHAPES,
    Guarded,
    amid_nan,
    random,
    with_ties,
)
from twofour import native
from twofour.kernels.nm_compress import nm_compress_reference
from twofour.native import NativeRow
from twofour.patterns.nonzero import ties_reference
from twofour.patterns.transposable import project_tiles_reference
from twofour.structure.permutation import reference as stripes_reference
from twofour.structure.permutation.stripes import _columns

WIDTHS = {"8 bits": torch.int8, "16 bits": torch.float16, "32 bits": torch.float32, "64 bits": torch.float64}
PATTERNS = [(2, 4), (1, 2), (1, 4), (2, 5), (4, 8), (8, 16), (3, 64)]


def first_largest(scores: Tensor, n: int, m: int, absolute: bool) -> Tensor:
    """Keep the n largest of every m, the lowest index of equals, in float64."""
    ranked = scores.double().view(-1, m)
    order = (ranked.abs() if absolute else ranked).sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros(ranked.shape, dtype=torch.bool).scatter_(1, order[:, :n], True).view(scores.shape)


def nm_mask(row: NativeRow, count: int) -> None:
    for (n, m), groups in itertools.product(PATTERNS if row.pattern == "any" else [(2, 4)], (1, 3, 17, 64, 4133)):
        for scores, absolute in ((random(groups * m, seed=m), False), (with_ties(groups * m, groups), True)):
            keep = Guarded((groups * m,), torch.bool)
            assert EXT.nm_mask(row.index, scores, keep.view, n, m, absolute, count)
            assert torch.equal(keep.checked(), first_largest(scores, n, m, absolute))
            bad = scores.clone()
            bad[-1] = float("nan")
            assert not EXT.nm_mask(row.index, bad, keep.view, n, m, absolute, count)


def nm_tiles(row: NativeRow, count: int) -> None:
    for shape in ((4, 4), (4, 36), (8, 60), (300, 68)):
        for scores, absolute in ((random(*shape), False), (with_ties(shape[0] * shape[1], 1).view(shape), True)):
            keep = Guarded(shape, torch.bool)
            assert EXT.nm_tiles(row.index, scores, keep.view, absolute, count)
            assert torch.equal(keep.checked(), project_tiles_reference(scores, absolute=absolute))


def nm_nonzero(row: NativeRow, count: int) -> None:
    dtype = WIDTHS[row.dtype]
    magnitude, finite = (-1, 127) if dtype is torch.int8 else masks_of(dtype)
    for size in (1, 7, 8, 63, 64, 65, 1000, 200001):
        values = with_ties(size, size).to(dtype)
        if values.is_floating_point():
            values[::5] = -0.0
            values[-1] = float("nan")
        bits = Guarded(((size + 7) // 8,), torch.uint8)
        found = EXT.nm_nonzero(row.index, values, bits.view, 0, magnitude, finite, count)
        nonzero = values.numpy() != 0
        assert np.array_equal(bits.checked().numpy(), np.packbits(nonzero, bitorder="little"))
        negative = int(((values == 0) & values.signbit()).sum()) if values.is_floating_point() else 0
        assert found == (int(nonzero.sum()), negative, int((~values.isfinite()).sum()))


def masks_of(dtype: torch.dtype) -> tuple[int, int]:
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return torch.iinfo(whole).max, int(torch.tensor(torch.finfo(dtype).max, dtype=dtype).view(whole))


def nm_ties(row: NativeRow, count: int) -> None:
    sign = 1 if WIDTHS[row.dtype] is torch.int8 else 0
    for (n, m), groups in itertools.product(PATTERNS if row.pattern == "any" else [(2, 4)], (1, 9, 130)):
        for inner in (1, 5, 16, 67):
            values = with_ties(3 * groups * m * inner, groups).to(WIDTHS[row.dtype])
            view = values.view(3, groups * m, inner).transpose(1, 2)
            found = EXT.nm_ties(row.index, values, sign, 3, groups * m, inner, n, m)
            assert found == ties_reference(view, n, m)


@cache
def refined(height: int, n: int, m: int, window: int) -> tuple[Tensor, list[list[int]]]:
    """Whole numbers, whose sums are exact, and the stripes that the reference makes of them."""
    scores = torch.randint(0, 50, (height, 4 * m), generator=torch.Generator().manual_seed(7)).float()
    order = stripes_reference.refine(scores.numpy(), np.arange(4 * m), n, m, window, 2, seed=5)
    return scores, sorted(map(sorted, order.reshape(-1, m).tolist()))


def nm_stripes(row: NativeRow, count: int) -> None:
    for (n, m, window), height in itertools.product([(2, 4, 8), (1, 2, 4), (3, 5, 10)], (1, 19, 300)):
        scores, want = refined(height, n, m, window)
        held, order = _columns(scores), torch.arange(4 * m)
        EXT.nm_stripes_refine(row.index, held, order, n, m, 5, count, window, 2, lambda done, of: None)
        assert sorted(map(sorted, order.view(-1, m).tolist())) == want
        dealt, first = torch.arange(4 * m), torch.arange(4 * m)
        EXT.nm_stripes_assign(row.index, held, dealt, n, m, 5, count, 4, 5, 2)
        EXT.nm_stripes_assign(native.rows("nm_stripes")[0].index, held, first, n, m, 5, 1, 4, 5, 2)
        assert torch.equal(dealt, first) and dealt.sort().values.tolist() == list(range(4 * m))
        before, after = (stripes_reference.kept(scores.numpy()[:, o], n, m) for o in (np.arange(4 * m), dealt.numpy()))
        assert after >= before


def nm_compress(row: NativeRow, count: int) -> None:
    for shape, make in itertools.product(SHAPES, (random, lambda *size: with_ties(size[0] * size[1], 0).view(size))):
        weight = amid_nan(make(*shape))
        values = Guarded((shape[0], shape[1] // 2), torch.float32)
        indices = Guarded((shape[0], (shape[1] + 7) // 8), torch.uint8)
        dropped = EXT.nm_compress(row.index, weight, values.view, indices.view, count)
        want = nm_compress_reference(weight)
        assert dropped == want[0]
        assert torch.equal(values.checked(), want[1]) and torch.equal(indices.checked(), want[2])
