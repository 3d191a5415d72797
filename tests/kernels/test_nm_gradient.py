"""Gradients pruned along their channels: every instruction set against the reference in torch."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import threads
from tests.turns import in_turn
from twofour.kernels.epilogue import ACTIVATIONS
from twofour.kernels.nm_gradient import (
    MODES,
    nm_gradient,
    nm_gradient_packed,
    nm_gradient_reference,
    nm_gradient_through,
    packed_bytes,
    refuses,
)
from twofour.kernels.nm_matmul.layout import from_layout

DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-9
THROUGH = [name for name in ACTIVATIONS if name != "none"]


def gradient(samples: int, tokens: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(samples, tokens, columns, generator=generator) ** 3
    found[torch.rand(found.shape, generator=generator) < 0.3] = 0  # groups with three, one and no value too
    ties = torch.rand(found.shape, generator=generator) < 0.3
    found[ties] = found[ties].sign()
    return found.to(dtype)


def same(found: Tensor, want: Tensor, mode: str) -> None:
    if mode != "rescaled":
        assert torch.equal(found, want)
        return
    assert torch.equal(found != 0, want != 0)
    torch.testing.assert_close(found, want, rtol=2**-7 if want.dtype is torch.bfloat16 else 1e-5, atol=0)


@in_turn("dtype", DTYPES)
@in_turn("mode", MODES)
@in_turn("shape", [(1, 1, 4), (2, 7, 64), (1, 400, 68), (3, 130, 516)])
def test_dense_and_packed_equal_the_reference_on_every_isa(
    isa: str, shape: tuple[int, int, int], mode: str, dtype: torch.dtype
) -> None:
    given = gradient(*shape, dtype)
    want = nm_gradient_reference(given, mode, eps=EPS, seed=2**32 - 1)
    same(nm_gradient(given, mode, eps=EPS, seed=2**32 - 1), want, mode)
    packed = from_layout(nm_gradient_packed(given, mode, eps=EPS, seed=2**32 - 1))
    packed.validate()
    same(packed.unpack().view(shape), want, mode)


@given(
    samples=st.integers(1, 4),
    tokens=st.integers(1, 30),
    groups=st.integers(1, 40),
    mode=st.sampled_from(MODES),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_odd_sizes(samples: int, tokens: int, groups: int, mode: str, dtype: torch.dtype, seed: int) -> None:
    given = gradient(samples, tokens, 4 * groups, dtype, seed)
    want = nm_gradient_reference(given, mode, eps=EPS, seed=seed)
    found = nm_gradient(given, mode, eps=EPS, seed=seed)
    same(found, want, mode)
    packed = from_layout(nm_gradient_packed(given, mode, eps=EPS, seed=seed))
    assert torch.equal(packed.unpack().view(given.shape), found)


def test_every_instruction_set_rescales_to_the_same_bits(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = gradient(2, 700, 132, torch.float32)
    found = nm_gradient(given, "rescaled", eps=EPS)
    monkeypatch.setenv("TWOFOUR_ISA", "scalar")
    assert torch.equal(found, nm_gradient(given, "rescaled", eps=EPS))


@pytest.mark.parametrize("mode", MODES)
def test_rows_may_be_far_apart_the_buffer_used_again_and_threads_many(mode: str) -> None:
    wide = gradient(3, 150, 900, torch.float32)
    given = wide[..., 100:600]
    size = packed_bytes(450, 500, torch.float32)
    buffer = torch.full((size + 1000,), 255, dtype=torch.uint8)
    want = nm_gradient_packed(given.contiguous(), mode, seed=7)
    with threads(3):
        found = nm_gradient_packed(given, mode, seed=7, out=buffer)
        turned = nm_gradient(given.transpose(1, 2).contiguous().transpose(1, 2), mode, seed=7)
    assert torch.equal(found, want) and found.data_ptr() == buffer.data_ptr()
    assert (buffer[size:] == 255).all()
    assert torch.equal(turned, nm_gradient(given, mode, seed=7))


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8)])
def test_nothing_to_prune(shape: tuple[int, int, int]) -> None:
    assert nm_gradient(torch.empty(shape), "rescaled").shape == shape


@in_turn("mode", MODES)
@in_turn("bad", [float("nan"), float("inf"), float("-inf")])
@in_turn("dtype", DTYPES)
def test_what_is_not_finite_gets_through_and_stays_in_its_column(
    isa: str, mode: str, bad: float, dtype: torch.dtype
) -> None:
    for place in range(4):
        given = torch.ones(2, 3, 12, dtype=dtype)
        given[1, 1, 4 + place] = bad
        found = from_layout(nm_gradient_packed(given, mode, eps=EPS, seed=3)).unpack().view(given.shape)
        assert found[0].isfinite().all() and found[1, :, :4].isfinite().all() and found[1, :, 8:].isfinite().all()
        if mode != "random":  # which may drop it
            assert not found[1, :, 4:8].isfinite().all()
        assert torch.equal(nm_gradient(given, mode, eps=EPS, seed=3).isfinite(), found.isfinite())


def test_pairs_at_random_are_equally_likely() -> None:
    found = nm_gradient(torch.ones(1, 1, 240_000), "random", seed=5).view(-1, 4).long()
    counts = (found * torch.tensor([1, 2, 4, 8])).sum(1).bincount(minlength=16)
    assert (counts > 0).sum() == 6 and found.sum(1).unique().tolist() == [2]
    torch.testing.assert_close(counts[counts > 0].double(), torch.full((6,), 10_000).double(), rtol=0.05, atol=0)


def test_what_it_refuses() -> None:
    assert refuses(torch.empty(2, 8)) is None
    assert "float64" in str(refuses(torch.empty(2, 8, dtype=torch.float64)))
    assert "6 output channels" in str(refuses(torch.empty(2, 6)))
    assert "meta" in str(refuses(torch.empty(2, 8, device="meta")))


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that nobody has written holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def exact(upstream: Tensor, z: Tensor, activation: str) -> Tensor:
    """dL/dz in float64."""
    at = z.double().requires_grad_()
    return torch.autograd.grad(ACTIVATIONS[activation](at), at, upstream.double())[0]


def holds(upstream: Tensor, z: Tensor, activation: str, mode: str, seed: int) -> None:
    """dL/dz within rounding of the exact one, its pruned form to the bit that of the kernel it replaces."""
    found, pruned = nm_gradient_through(upstream, z, activation, mode, eps=EPS, seed=seed)
    limit = 4e-7 * upstream.double().abs() + (2**-8 * exact(upstream, z, activation).abs() if z.itemsize == 2 else 0)
    assert ((found.double() - exact(upstream, z, activation)).abs() <= limit + 1e-37).all()
    assert pruned is not None and torch.equal(pruned, nm_gradient(found, mode, eps=EPS, seed=seed))
    buffer = torch.full((packed_bytes(z.shape[:-1].numel(), z.shape[-1], z.dtype) + 64,), 255, dtype=torch.uint8)
    again, packed = nm_gradient_through(upstream, z, activation, mode, eps=EPS, seed=seed, packed=True, out=buffer)
    assert packed is not None and torch.equal(again, found) and (buffer[-64:] == 255).all()
    assert torch.equal(packed, nm_gradient_packed(found, mode, eps=EPS, seed=seed))
    alone, nothing = nm_gradient_through(upstream, z, activation, None)
    assert torch.equal(alone, found) and nothing is None


@in_turn("dtype", DTYPES)
@in_turn("activation", THROUGH)
def test_through_an_activation_on_every_isa(isa: str, poisoned: None, activation: str, dtype: torch.dtype) -> None:
    shapes = ((1, 1, 4), (1, 70, 1100), (1, 70, 68), (2, 9, 132), (2, 200, 8))  # the last: two blocks of panels
    for mode, shape in zip((*MODES, "unbiased"), shapes, strict=True):
        z = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
        holds(gradient(*shape, dtype), z.to(dtype), activation, mode, seed=9)


@given(
    samples=st.integers(1, 4),
    tokens=st.integers(1, 30),
    groups=st.integers(1, 40),
    mode=st.sampled_from(MODES),
    activation=st.sampled_from(THROUGH),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=30, deadline=None)
def test_through_an_activation_in_odd_sizes(
    samples: int, tokens: int, groups: int, mode: str, activation: str, dtype: torch.dtype, seed: int
) -> None:
    z = 4 * torch.randn(samples, tokens, 4 * groups, generator=torch.Generator().manual_seed(seed % 2**31))
    holds(gradient(samples, tokens, 4 * groups, dtype, seed), z.to(dtype), activation, mode, seed)


@in_turn("activation", THROUGH)
def test_derivatives_at_the_ends(isa: str, activation: str) -> None:
    z = torch.tensor([0.0, -0.0, 1e-30, 12.9, 50.0, 1e30, float("inf"), -9.9, -12.9, -50.0, -1e30, float("-inf")])
    found = nm_gradient_through(torch.ones(1, 1, 12), z.view(1, 1, 12), activation, None)[0].flatten()
    half = 0.0 if activation == "relu" else 0.5
    want = torch.tensor([half, half, 1.0 if activation == "relu" else half, *[1.0] * 4, *[0.0] * 5])
    torch.testing.assert_close(found, want, rtol=0, atol=4e-7 if activation != "silu" else 5e-4)
    at = z.clone().requires_grad_()  # torch's are NaN where a page and a docstring say so, and nowhere else
    nans = torch.autograd.grad(ACTIVATIONS[activation](at).sum(), at)[0].isnan()
    beyond = z.isinf() if activation != "gelu_tanh" else z.abs() >= 1e30
    assert torch.equal(nans, beyond & (activation != "relu"))
    bad = torch.tensor([float("nan"), float("inf"), 1.0, 1.0]).view(1, 1, 4)
    for upstream, at in ((bad, torch.ones(1, 1, 4)), (torch.ones(1, 1, 4), bad)):
        through = nm_gradient_through(upstream, at, activation, None)[0].flatten()
        assert through[0].isnan() or (activation == "relu" and at is bad)
        assert through[2:].isfinite().all()


@in_turn("dtype", DTYPES)
def test_relu_has_the_bits_of_torch(isa: str, dtype: torch.dtype) -> None:
    z, upstream = gradient(2, 5, 36, dtype, seed=1), gradient(2, 5, 36, dtype)
    upstream[0, 0, :9] = float("nan")
    z[0, 1, :9] = float("nan")
    want = torch.ops.aten.threshold_backward(upstream, z.relu(), 0)
    for at in (z, z.relu()):
        torch.testing.assert_close(
            nm_gradient_through(upstream, at, "relu", None)[0], want, rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("mode", MODES)
def test_threads_and_strides_change_nothing(mode: str) -> None:
    upstream, z = gradient(3, 150, 500, torch.float32), gradient(3, 150, 500, torch.float32, seed=1)
    want = nm_gradient_through(upstream, z, "gelu", mode, seed=7)
    turned = upstream.transpose(1, 2).contiguous().transpose(1, 2)
    with threads(3):
        found = nm_gradient_through(turned, z, "gelu", mode, seed=7)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
