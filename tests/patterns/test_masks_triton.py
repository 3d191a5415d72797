"""Masks on the GPU, in Triton's interpreter where there is none, against the masks of the CPU."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twofour.native import gpu
from twofour.patterns import parse
from twofour.patterns.transposable import project_tiles_reference

if reason := gpu.unavailable(triton=True):
    pytest.skip(f"Triton kernels do not run: {reason}", allow_module_level=True)

from twofour.patterns.nm_mask_triton import mask
from twofour.patterns.nm_tiles_triton import tiles

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FEW = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def scores(shape: tuple[int, ...], dtype: torch.dtype, seed: int, ties: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-3, 4, shape, generator=generator) if ties else torch.randn(shape, generator=generator)
    return drawn.to(dtype).to(gpu.device())


@FEW
@given(st.integers(1, 9), st.integers(1, 40), st.sampled_from(DTYPES), st.booleans(), st.booleans(), st.integers(0, 99))
def test_masks_are_those_of_the_cpu(rows, groups, dtype, absolute, ties, seed) -> None:
    given_scores = scores((rows, 4 * groups), dtype, seed, ties)
    want = parse("2:4").project(given_scores.cpu(), absolute=absolute)
    assert torch.equal(mask(given_scores, absolute=absolute).cpu(), want)


@settings(FEW, max_examples=3)
@given(st.integers(1, 3), st.integers(1, 20), st.sampled_from(DTYPES), st.booleans(), st.booleans(), st.integers(0, 99))
def test_tiles_are_those_of_the_reference_also_among_equals(bands, groups, dtype, absolute, ties, seed) -> None:
    given_scores = scores((4 * bands, 4 * groups), dtype, seed, ties)
    want = project_tiles_reference(given_scores.cpu(), absolute=absolute)
    assert torch.equal(tiles(given_scores, absolute=absolute).cpu(), want)


def test_taps_of_a_convolution_are_masked_one_by_one() -> None:
    given_scores = scores((8, 3, 4), torch.float32, 1, False)
    assert torch.equal(
        tiles(given_scores, absolute=True).cpu(), project_tiles_reference(given_scores.cpu(), absolute=True)
    )


def test_nan_and_infinity_are_kept() -> None:
    row = torch.tensor([[1.0, float("nan"), 3.0, float("inf")], [float("nan"), 9.0, 1.0, -float("inf")]])
    want = torch.tensor([[False, True, False, True], [True, False, False, True]])
    assert torch.equal(mask(row.to(gpu.device()), absolute=True).cpu(), want)
