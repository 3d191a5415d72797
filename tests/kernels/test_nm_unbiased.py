import torch

from tests.conftest import threads
from tests.turns import in_turn
from twofour.kernels.nm_matmul.layout import from_layout
from twofour.kernels.nm_unbiased import nm_unbiased, nm_unbiased_reference

DTYPES = [torch.float32, torch.bfloat16]


def gradient(tokens: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens + columns)
    found = torch.randn(tokens, columns, generator=generator) ** 3
    found[torch.rand(found.shape, generator=generator) < 0.3] = 0  # groups with three, one and no value too
    return found.to(dtype)


@in_turn("dtype", DTYPES)
@in_turn(("tokens", "columns"), [(4, 1), (64, 16), (68, 37), (200, 401)])
def test_packed_estimate_equals_the_reference_on_every_isa(
    isa: str, tokens: int, columns: int, dtype: torch.dtype
) -> None:
    given = gradient(tokens, columns, dtype)
    for seed in (0, 12345, 2**32 - 1):
        packed = from_layout(nm_unbiased(given, seed, dtype))
        packed.validate()
        assert torch.equal(packed.unpack(), nm_unbiased_reference(given, seed).T.to(dtype))


def test_rows_may_be_far_apart_the_buffer_used_again_and_threads_many() -> None:
    given = gradient(64, 900, torch.float32)
    buffer = nm_unbiased(gradient(64, 500, torch.float32), 1, torch.float32)
    want = nm_unbiased(given[:, 100:600].contiguous(), 7, torch.float32)
    with threads(3):
        assert torch.equal(nm_unbiased(given[:, 100:600], 7, torch.float32, buffer), want)


def test_the_expectation_is_the_gradient_and_the_variance_the_least() -> None:
    # 4096 copies of eight groups: every copy has uniform numbers of its own.
    groups = torch.tensor(
        [
            [1, 1, 1, 1],
            [4, 3, 2, 1],
            [-8, 1, 1, 2],
            [1e-3, 5, 0, -1],
            [0, 0, 0, -3],
            [0, 2, -1, 0],
            [1, 1e-4, 1, 1],
            [0] * 4,
        ]
    ).float()
    copies = 4096
    given = groups.T.repeat(1, copies)
    found = torch.cat([nm_unbiased_reference(given, seed) for seed in range(4)], 1).view(4, -1, 8).double()
    a = groups.abs().double().T
    half = torch.minimum(a.sum(0) / 2, a.sum(0) - a.amax(0))
    chance = torch.where(half > 0, torch.minimum(a, half) / half, 1.0)
    variance = torch.where(a > 0, a.square() * (1 / chance - 1), 0.0)
    error = (found.mean(1) - groups.T).abs()
    assert (error <= 5 * (variance / found.shape[1]).sqrt() + 1e-6 * a).all(), error  # five standard errors
    assert torch.allclose(found.var(1), variance, rtol=0.1, atol=1e-5)
    assert ((found != 0).sum(0) <= 2).all()
    # Least: moving the probabilities of a group that no cut binds makes the sum larger.
    other = torch.tensor([0.7, 0.6, 0.45, 0.25]).double()
    assert variance[:, 1].sum() < (a[:, 1].square() * (1 / other - 1)).sum()


@in_turn("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so(isa: str, bad: float) -> None:
    for place in range(4):
        given = torch.ones(4, 3)
        given[place, 1] = bad
        found = from_layout(nm_unbiased(given, 3, torch.float32)).unpack()
        assert not found[1].isfinite().all() and found[0].isfinite().all() and found[2].isfinite().all()
