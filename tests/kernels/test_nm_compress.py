import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import isa_levels
from twofour import native
from twofour.packing.indices import encode
from twofour.patterns import project_reference

ROWS = native.extension().nm_compress_rows()


def compress(index: int, weight: torch.Tensor, threads: int) -> tuple[int, torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    values = torch.full((rows, columns // 2), float("nan"))
    indices = torch.full((rows, (columns + 7) // 8), 0xFF, dtype=torch.uint8)
    dropped = native.extension().nm_compress(
        index, weight.data_ptr(), weight.stride(0), rows, columns, values.data_ptr(), indices.data_ptr(), threads
    )
    return dropped, values, indices


@pytest.mark.parametrize(
    "index", [i for i, (_, isa) in enumerate(ROWS) if isa in isa_levels()], ids=lambda index: ROWS[index][0]
)
@given(rows=st.integers(1, 20), groups=st.integers(1, 20), seed=st.integers(0, 2**31), threads=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_every_row_equals_the_reference(index: int, rows: int, groups: int, seed: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randint(-3, 4, (rows, groups * 4 + 4), generator=generator).float()
    weight = wide[:, : groups * 4]  # a row stride larger than the row
    keep = project_reference(weight, 2, 4, absolute=True).view(rows, groups, 4)
    positions = keep.nonzero()[:, -1].view(rows, groups, 2)
    dropped, values, indices = compress(index, weight, threads)
    assert dropped == int(((weight != 0) & ~keep.view(rows, -1)).sum())
    assert torch.equal(values, weight.view(rows, groups, 4).gather(-1, positions).flatten(1))
    assert torch.equal(indices, encode(positions, 4))
