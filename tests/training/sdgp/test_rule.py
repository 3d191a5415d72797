import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.turns import in_turn
from twofour.errors import PatternError
from twofour.patterns import NM, VNM
from twofour.training.sdgp import MODES, Rule, pruned
from twofour.training.sdgp.rule import largest, largest_reference


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradient(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed))


@given(
    mode=st.sampled_from(MODES),
    nm=st.integers(1, 32).flatmap(lambda m: st.tuples(st.integers(1, m), st.just(m))),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 40)),
    parts=st.sampled_from((1, 2, 3)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float64)),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=80, deadline=None)
def test_at_most_n_of_m_channels_are_left_and_the_tail_is_kept(mode, nm, shape, parts, dtype, seed) -> None:
    n, m = nm
    samples, pixels, channels = shape
    g = gradient(samples, pixels, parts * channels, seed=seed).to(dtype)
    g[g.abs() < 0.3] = 0  # ties, and groups with fewer non-zeros than n
    result = pruned(g, Rule(n, m, mode), parts=parts, generator=generator(seed))
    assert result.shape == g.shape and result.dtype == dtype
    split, before = (t.unflatten(-1, (parts, channels)) for t in (result, g))
    whole = channels // m * m
    assert ((split[..., :whole].unflatten(-1, (-1, m)) != 0).sum(-1) <= n).all()
    assert (result[g == 0] == 0).all()
    torch.testing.assert_close(split[..., whole:], before[..., whole:], rtol=1e-2, atol=0)
    if n == m:
        assert torch.equal(result, g)


def test_magnitude_by_hand_lowest_index_first() -> None:
    g = torch.tensor([[[1.0, -3.0, 2.0, 2.0, -2.0, 2.0, 2.0, -2.0, 0.5]]])
    assert pruned(g, Rule(2, 4, "magnitude")).tolist() == [[[0, -3.0, 2.0, 0, -2.0, 2.0, 0, 0, 0.5]]]


@in_turn("memory_format", [torch.contiguous_format, torch.channels_last])
@in_turn("mode", MODES)
def test_the_memory_format_decides_nothing_and_is_kept(mode: str, memory_format: torch.memory_format) -> None:
    g = gradient(3, 12, 5, 4)
    plain = pruned(g.movedim(1, -1).flatten(1, 2).contiguous(), Rule(2, 4, mode), generator=generator())
    given = g.contiguous(memory_format=memory_format).movedim(1, -1).flatten(1, 2)
    result = pruned(given, Rule(2, 4, mode), generator=generator())
    torch.testing.assert_close(result, plain)
    assert result.stride() == given.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rescaled_keeps_the_l1_norm_of_each_sample_and_channel(dtype: torch.dtype) -> None:
    g = gradient(4, 256, 16).to(dtype) * 100  # sums beyond 65504, where float16 ends
    result = pruned(g, Rule(2, 4, "rescaled"))
    before, after = (t.double().abs().sum(1) for t in (g, result))
    torch.testing.assert_close(after, before, rtol=1e-3 if dtype is torch.float32 else 5e-3, atol=0)
    factor = before / pruned(g, Rule(2, 4, "magnitude")).double().abs().sum(1)
    assert factor.min() > 1.2 and factor.max() < 1.49  # PAPERS: 1.20 to 1.49 on 16 x 16 maps
    assert factor.mean().item() == pytest.approx(1.347, abs=0.02)


def test_rescaling_small_gradients_is_no_shrinking() -> None:
    g = gradient(2, 64, 8) * 1e-6  # a mean over a batch, without a loss scaler
    left = pruned(g, Rule(2, 4)).abs().sum() / g.abs().sum()
    assert left == pytest.approx(1, abs=1e-3)
    assert pruned(g, Rule(2, 4, eps=1e-4)).abs().sum() / g.abs().sum() < 0.5


def test_a_map_that_is_pruned_whole_stays_zero() -> None:
    g = torch.tensor([[[5.0, 4.0, 1.0, 1.0]]]).expand(1, 3, 4)
    result = pruned(g, Rule(2, 4, "rescaled", eps=0.0))
    assert torch.equal(result, torch.tensor([5.0, 4.0, 0, 0]).expand(1, 3, 4))


def mean_of_draws(g: Tensor, rule: Rule, draws: int) -> tuple[Tensor, Tensor]:
    many = g.expand(draws, *g.shape).reshape(draws, 1, -1)
    result = pruned(many, rule, generator=generator(1)).double()
    error = result.std(0) / draws**0.5
    return result.mean(0), error


@pytest.mark.parametrize(("n", "m"), [(1, 2), (2, 4), (1, 4), (4, 8), (3, 7)])
def test_unbiased_has_the_gradient_as_its_mean(n: int, m: int) -> None:
    g = gradient(1, 1, 2 * m, seed=3)
    g[..., 0] *= 30  # a value that must be kept for certain
    mean, error = mean_of_draws(g, Rule(n, m, "unbiased"), 20_000)
    assert ((mean - g[0]).abs() <= 5 * error + 1e-5).all()
    biased, _ = mean_of_draws(g, Rule(n, m, "random"), 20_000)
    torch.testing.assert_close(biased, g[0].double() * n / m, rtol=0.05, atol=0.05 * g.abs().max().item())


def test_unbiased_1_of_2_is_the_mask_of_chmiel() -> None:
    a, b = 3.0, -1.0
    draws = pruned(torch.tensor([a, b]).expand(20_000, 1, 2), Rule(1, 2, "unbiased"), generator=generator())[:, 0]
    rows = {tuple(row) for row in draws.tolist()}
    assert rows == {(4.0, 0.0), (0.0, -4.0)}
    assert (draws[:, 0] != 0).double().mean().item() == pytest.approx(0.75, abs=0.02)


def test_unbiased_has_the_least_variance_of_the_unbiased_choices() -> None:
    """Against n of m at random times m / n, and the formula sum g^2 (1 / p - 1)."""
    g = torch.tensor([[[5.0, -1.0, 0.5, 2.0]]])
    p = torch.tensor([1, 1 / 3.5, 0.5 / 3.5, 2 / 3.5]).double()  # 5 > (5 + 1 + 0.5 + 2) / 2 is capped
    expected = (g.double().square() * (1 / p - 1)).sum().item()
    draws = pruned(g.expand(20_000, 1, 4), Rule(2, 4, "unbiased"), generator=generator()).double()
    assert draws.var(0).sum().item() == pytest.approx(expected, rel=0.05)
    chance = 2 * pruned(g.expand(20_000, 1, 4), Rule(2, 4, "random"), generator=generator()).double()
    assert draws.var(0).sum() < 0.3 * chance.var(0).sum()


def test_unbiased_groups_with_few_values_are_exact() -> None:
    g = torch.tensor([[[0, 2.0, 0, 0, 0, 0, 0, 0, 1.0, 0, -7.0, 0]]])
    assert torch.equal(pruned(g, Rule(2, 4, "unbiased"), generator=generator()), g)


@pytest.mark.parametrize("mode", ["random", "unbiased"])
def test_random_modes_follow_their_generator(mode: str) -> None:
    g = gradient(2, 8, 16)
    one, same, other = (pruned(g, Rule(2, 4, mode), generator=generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_gets_through(bad: float) -> None:
    """A loss scaler looks for it."""
    g = gradient(1, 4, 8)
    g[0, 2, 5] = bad
    for mode in ("magnitude", "rescaled", "unbiased"):
        result = pruned(g, Rule(1, 4, mode), generator=generator())
        assert not torch.isfinite(result).all()
        assert torch.isfinite(result[0, :, :4]).all()


def test_every_instruction_set_chooses_as_the_reference(isa: str) -> None:
    scores = torch.randint(-3, 4, (3, 5, 6, 4), generator=generator()).float()
    for n, m in ((2, 4), (1, 4), (4, 8)):
        groups = scores.reshape(3, -1, m)
        assert torch.equal(largest(groups, n), largest_reference(groups, n))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("3:2", "magnitude", 0.0), "impossible"),
        (("0:4", "magnitude", 0.0), "impossible"),
        (("2:64", "magnitude", 0.0), "1 <= N <= M <= 32"),
        ((VNM(64, 2, 8), "magnitude", 0.0), "not N:M"),
        (("block", "magnitude", 0.0), '"2:4"'),
        (("2:4", "maxnorm", 0.0), "one of magnitude, rescaled, random, unbiased"),
        (("2:4", "magnitude", -1.0), "`eps` is impossible"),
    ],
)
def test_impossible_rules_are_refused(arguments, message: str) -> None:
    with pytest.raises(PatternError, match=message):
        Rule.parse(*arguments)


def test_a_rule_is_read_from_text_or_pattern() -> None:
    assert Rule.parse(" 2:4 ", "rescaled", 0.0) == Rule.parse(NM(2, 4), "rescaled", 0.0) == Rule(2, 4, eps=0.0)
    assert Rule.parse("4:4", "magnitude", 0.0).pattern == "4:4"
