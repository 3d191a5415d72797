"""Squeeze-and-excite and means over pixels from Python: float64, numbers that are none, operands that do not fit."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tests.conftest import threads
from tests.turns import in_turn
from twofour.errors import KernelError
from twofour.kernels.column_sums import pixel_means
from twofour.kernels.squeeze_excite import GATES, SqueezeExcite, reference

SETTINGS = hypothesis.settings(
    max_examples=25, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)


@SETTINGS
@hypothesis.given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 150), st.integers(1, 12), st.integers(1, 12)),
    squeezed=st.integers(1, 40),
    biased=st.booleans(),
    activation=st.sampled_from(["none", "relu", "silu", "gelu", "gelu_tanh"]),
    gate=st.sampled_from(list(GATES)),
    channels_first=st.booleans(),
)
def test_any_sizes_against_float64(
    isa: str,
    sizes: tuple[int, ...],
    squeezed: int,
    biased: bool,
    activation: str,
    gate: str,
    channels_first: bool,
) -> None:
    torch.manual_seed(sum(sizes) + squeezed)
    x, channels = torch.randn(sizes) + 0.5, sizes[1]
    x = x if channels_first else x.contiguous(memory_format=torch.channels_last)
    first = torch.randn(squeezed, channels), torch.randn(squeezed) if biased else None
    second = torch.randn(squeezed, channels), torch.randn(channels) if biased else None
    exact = [None if one is None else one.double() for one in (*first, *second)]
    want = reference(x.double(), *exact, activation, gate)
    for count in (1, 2):
        with threads(count):
            y = SqueezeExcite(*first, *second, activation, gate)(x)
        assert y.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(y.double(), want, atol=1e-5, rtol=2e-5)


@in_turn("gate", list(GATES))
@in_turn("strange", [float("nan"), float("inf"), -float("inf"), 1e38])
def test_numbers_that_are_none_spread_as_in_torch(isa: str, gate: str, strange: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 20, 9, 9)
    x[0, 3, 4, 4] = strange
    weights = torch.randn(4, 20), torch.randn(4), torch.randn(4, 20), torch.randn(20)
    want = reference(x, *weights, "relu", gate)
    torch.testing.assert_close(SqueezeExcite(*weights, "relu", gate)(x), want, atol=1e-5, rtol=1e-4, equal_nan=True)


def test_operands_that_do_not_fit() -> None:
    scaling = SqueezeExcite(torch.randn(4, 8), None, torch.randn(4, 8), None)
    for x in (torch.randn(2, 9, 3, 3), torch.randn(8, 3, 3), torch.randn(2, 8, 3, 3).double()):
        with pytest.raises(KernelError, match="the input of squeeze-and-excite does not fit"):
            scaling(x)


@SETTINGS
@hypothesis.given(
    sizes=st.tuples(st.integers(0, 3), st.integers(0, 600), st.integers(0, 12), st.integers(0, 12)),
    channels_first=st.booleans(),
    strange=st.sampled_from([None, float("nan"), float("inf"), -float("inf"), 1e38]),
)
def test_means_of_any_sizes_against_float64(
    isa: str, sizes: tuple[int, ...], channels_first: bool, strange: float | None
) -> None:
    torch.manual_seed(sum(sizes))
    x = torch.randn(sizes) + 0.5
    if strange is not None and x.numel():
        x.view(-1)[x.numel() // 2] = strange
    x = x if channels_first else x.contiguous(memory_format=torch.channels_last)
    want = x.double().mean((2, 3))
    for count in (1, 2):
        with threads(count):
            found = pixel_means(x).double()
        torch.testing.assert_close(found, want, atol=1e-6, rtol=2e-6, equal_nan=True)
    with threads(1):
        assert torch.equal(pixel_means(x._neg_view()), -pixel_means(x)) or not want.isfinite().all()


def test_images_of_a_mean_that_do_not_fit() -> None:
    for x in (torch.randn(8, 3, 3), torch.randn(2, 8, 3, 3).bfloat16()):
        with pytest.raises(KernelError, match="the images of a mean over pixels do not fit"):
            pixel_means(x)
