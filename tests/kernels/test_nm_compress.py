import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import case
from twofour import native
from twofour.kernels.nm_compress import nm_compress_reference

ROWS = native.rows("nm_compress")


def compress(index: int, weight: torch.Tensor, threads: int) -> tuple[int, torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    values = torch.full((rows, columns // 2), float("nan"))
    indices = torch.full((rows, (columns + 7) // 8), 0xFF, dtype=torch.uint8)
    dropped = native.extension().nm_compress(index, weight, values, indices, threads)
    return dropped, values, indices


@pytest.mark.parametrize("index", [case(row.index, row.name, native.unavailable(row.isa)) for row in ROWS])
@given(rows=st.integers(1, 20), groups=st.integers(1, 20), seed=st.integers(0, 2**31), threads=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_every_row_equals_the_reference(index: int, rows: int, groups: int, seed: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randint(-3, 4, (rows, groups * 4 + 4), generator=generator).float()
    weight = wide[:, : groups * 4]  # a row stride larger than the row
    dropped, values, indices = compress(index, weight, threads)
    expected = nm_compress_reference(weight)
    assert dropped == expected[0]
    assert torch.equal(values, expected[1])
    assert torch.equal(indices, expected[2])


def test_the_reference_by_hand() -> None:
    weight = torch.tensor([[1.0, -3.0, 0.0, 2.0, 0.0, 0.0, -5.0, 0.0, 4.0, 4.0, -4.0, 4.0]])
    dropped, values, indices = nm_compress_reference(weight)
    assert dropped == 1 + 0 + 2
    # Kept: 1 and 3; 0 (the lowest of three zeros) and 2; 0 and 1 (the lowest of four equals).
    assert values.tolist() == [[-3.0, 2.0, 0.0, -5.0, 4.0, 4.0]]
    assert indices.tolist() == [[(1 | 3 << 2) | (0 | 2 << 2) << 4, 0 | 1 << 2]]
