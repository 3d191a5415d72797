"""Pruning and packing in one pass in Triton, against the canonical form and against torch's own packer."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)

from twofour.kernels.nm_compress import nm_compress_reference
from twofour.native import gpu
from twofour.packing import pack
from twofour.patterns import parse

if reason := gpu.unavailable(triton=True):
    pytest.skip(f"Triton kernels do not run: {reason}", allow_module_level=True)

from twofour.kernels.nm_compress.on_gpu import compress

FEW = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def weight(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype).to(gpu.device())


@FEW
@given(
    st.integers(1, 20),
    st.integers(1, 70),
    st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    st.integers(),
)
def test_values_positions_and_mask_are_the_canonical_ones(rows, groups, dtype, seed) -> None:
    dense = weight(rows, 4 * groups, dtype, seed & 0xFFFF)
    found = compress(dense, mask=True)
    _, values, indices = nm_compress_reference(dense.cpu().float())
    assert torch.equal(found.values.cpu().float(), values)
    assert torch.equal(found.codes.cpu(), indices)
    assert found.mask is not None
    assert torch.equal(found.mask.cpu(), parse("2:4").project(dense.cpu(), absolute=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cutlass_order_is_that_of_torchs_packer(dtype: torch.dtype) -> None:
    dense = weight(64, 192, dtype)
    pruned = dense.cpu() * parse("2:4").project(dense.cpu(), absolute=True)
    found = compress(dense, cutlass=True)
    values, positions = sparse_semi_structured_from_dense_cutlass(pruned)
    assert torch.equal(found.values.cpu(), values)
    assert torch.equal(found.codes.cpu().flatten(), positions.flatten())
    assert torch.equal(sparse_semi_structured_to_dense_cutlass(found.values.cpu(), found.codes.cpu()), pruned)


@pytest.mark.parametrize("turned", [False, True])
def test_a_given_mask_is_obeyed_on_a_weight_and_on_its_transpose(turned: bool) -> None:
    dense = weight(12, 36)
    keep = parse("2:4-transposable").project(dense.cpu(), absolute=True).to(dense.device)
    keep[0, :4] = False  # a group that keeps nothing still names two places
    dense, keep = (dense.t(), keep.t()) if turned else (dense, keep)
    found, want = compress(dense, keep), pack((dense * keep).cpu(), "2:4")
    assert torch.equal(found.values.cpu(), want.values)
    assert torch.equal(found.codes.cpu(), want.indices)


def test_values_are_rounded_to_the_type_asked_for() -> None:
    """To nearest on a GPU; the interpreter cuts the lower bits off."""
    dense = weight(4, 64)
    found, exact = compress(dense, dtype=torch.bfloat16), compress(dense).values
    assert found.values.dtype is torch.bfloat16
    assert ((found.values.float() - exact).abs() <= exact.abs() * 2.0 ** (-7 if gpu.interpreted() else -8)).all()


def test_an_empty_weight_gives_empty_parts() -> None:
    found = compress(weight(0, 8), mask=True)
    assert found.values.shape == (0, 4) and found.mask is not None and found.mask.shape == (0, 8)
