import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import twofour
from twofour import masks
from twofour.errors import PatternError
from twofour.patterns import VNM, parse


def slow(scores: Tensor, v: int, n: int, m: int) -> Tensor:
    """Block by block, row by row, in Python."""
    keep = torch.zeros(scores.shape, dtype=torch.bool)
    rows, columns = scores.shape
    for top, left in itertools.product(range(0, rows, v), range(0, columns, m)):
        block = scores[top : top + v, left : left + m].double().tolist()
        sums = [sum(row[column] for row in block) for column in range(m)]
        chosen = sorted(sorted(range(m), key=lambda column: (-sums[column], column))[: 2 * n])
        for number, row in enumerate(block):
            best = sorted(chosen, key=lambda column: (-row[column], column))[:n]
            keep[top + number, [left + column for column in best]] = True
    return keep


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 9), st.integers(1, 3), st.integers(1, 10), st.integers())
def test_blocks_keep_their_best_columns_and_rows_their_best_values(rows, groups, v, n, more, seed):
    m = 2 * n + more
    scores = torch.rand(rows, groups * m, generator=torch.Generator().manual_seed(seed % 2**31), dtype=torch.float64)
    pattern = VNM(v, n, m)
    keep = pattern.project(scores)
    assert torch.equal(keep, slow(scores, v, n, m))
    assert (keep.unflatten(1, (-1, m)).sum(-1) == n).all()
    assert pattern.check(scores * keep).ok
    assert parse(f"{n}:{m}").check(scores * keep).ok


def test_signs_count_only_where_asked() -> None:
    scores = torch.tensor([[-9.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0]])
    assert parse("1:1:8").project(scores, absolute=True).nonzero().tolist() == [[0, 0]]
    assert parse("1:1:8").project(scores).nonzero().tolist() == [[0, 3]]


def test_check_names_a_row_with_too_many_values_and_a_block_with_too_many_columns() -> None:
    pattern = parse("2:1:4")
    weight = torch.zeros(4, 8)
    weight[3, 4:6] = 1
    found = pattern.check(weight)
    assert (found.groups, found.legal, found.first, found.values) == (4, 3, (3, 4), (1.0, 1.0, 0.0, 0.0))
    spread = torch.zeros(3, 2, 4)  # (out, positions, in): three columns in one block of three rows, one value a row
    spread[0, 1, 0] = spread[1, 1, 1] = spread[2, 1, 2] = 5
    found = parse("3:1:4").check(spread)
    assert (found.groups, found.legal, found.first) == (2, 1, (0, 1, 0))
    assert parse("1:1:4").check(spread).ok
    assert not parse("1:1:4").check(torch.ones(4)).ok


def test_a_convolution_has_blocks_along_its_output_channels() -> None:
    torch.manual_seed(0)
    model = twofour.prune(nn.Sequential(nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(32, 8)), "8:2:8")
    assert set(masks.of(model)) == {"0.weight", "2.weight"}
    weight = model[0].weight.detach()
    for row, column in itertools.product(range(3), range(3)):
        tap = weight[:, :, row, column] != 0
        blocks = tap.unflatten(0, (4, 8)).unflatten(2, (2, 8))  # (blocks, rows, groups, columns)
        assert (blocks.sum(-1) == 2).all() and (blocks.any(1).sum(-1) <= 4).all()
    assert twofour.check(model).ok


@pytest.mark.parametrize("text", ["0:2:8", "64:2:4", "64:0:8", "64:2:65"])
def test_impossible_ones_are_refused(text):
    with pytest.raises(PatternError, match="impossible"):
        parse(text)


def test_values_that_cannot_be_ranked_are_refused() -> None:
    with pytest.raises(PatternError, match="cannot be ranked"):
        parse("4:2:8").project(torch.tensor([[float("nan")] * 8]))
    with pytest.raises(PatternError, match="not a multiple of 8"):
        parse("4:2:8").project(torch.ones(4, 12))


def test_packed_it_keeps_its_name_and_its_bits() -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 32, 3)
    pattern = parse("16:2:8")
    weight = weight.movedim(1, -1).mul(pattern.project(weight.movedim(1, -1), absolute=True)).movedim(-1, 1)
    packed = twofour.packing.pack(weight, pattern, axis=1)
    assert packed.header.pattern == "16:2:8" and packed.values.shape == (40 * 3, 32 * 2 // 8)
    assert torch.equal(packed.unpack(), weight)
    broken = torch.zeros(40, 8)
    broken[0, 0] = broken[1, 1] = broken[2, 2] = broken[3, 3] = broken[4, 4] = 1  # five columns in a block of 16 rows
    with pytest.raises(twofour.errors.PackingError, match="16:2:8"):
        twofour.packing.pack(broken, pattern)
    assert twofour.packing.pack(broken, "2:8").header.pattern == "2:8"
