"""Rising thresholds: the schedule against a hand table, masks that never grow back, group lasso, resume, the search."""

import itertools

import pytest
import torch
from torch import nn

from twofour import masks
from twofour.errors import TrainingError
from twofour.patterns import Block
from twofour.training import block_thresholds

BlockThresholds, Rise = block_thresholds.BlockThresholds, block_thresholds.Rise
find_factor, group_lasso, quantiles_of = (
    block_thresholds.find_factor,
    block_thresholds.group_lasso,
    block_thresholds.quantiles_of,
)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.LSTM(10, 18, batch_first=True)


def train(model: nn.Module, schedule: BlockThresholds, steps: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    seen = []
    for _ in range(steps):
        optimiser.zero_grad()
        x = torch.randn(4, 6, 10, generator=generator)
        ((model(x)[0][..., :10] - x).square().mean() + schedule.penalty()).backward()
        optimiser.step()
        schedule.step()
        seen.append({name: mask.keep.clone() for name, mask in masks.of(model).items()})
    return seen


def test_the_thresholds_of_a_hand_made_table() -> None:
    """theta = 2 * 0.12 * 10 / (2 * 40 + 3 * 60) = 0.00923; then 1.5 times as fast. The end is the quantile, nearly."""
    rise = Rise(start=20, ramp=60, end=120, every=10)
    theta = rise.slope(0.12)
    assert theta == pytest.approx(2.4 / 260)
    table = {20: 1, 30: 11, 59: 40, 60: 41 + 1.5, 70: 41 + 1.5 * 11, 120: 41 + 1.5 * 61}
    for step, units in table.items():
        assert rise.threshold(step, theta) == pytest.approx(theta * units / 10), step
    assert rise.threshold(120, theta) == pytest.approx(0.12, rel=0.03)
    rising = [rise.threshold(step, theta) for step in range(20, 121)]
    assert all(a < b for a, b in itertools.pairwise(rising))


def test_a_block_goes_when_its_largest_value_is_below() -> None:
    model = nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.01)
        model.weight[0, 0] = model.weight[5, 6] = 1.0
    schedule = block_thresholds.attach(model, (4, 4), Rise(1, 1, 1, every=1), quantiles={"weight": 0.1})
    schedule.step()
    keep = masks.of(model)["weight"].keep
    assert keep[:4, :4].all() and keep[4:, 4:].all() and int(keep.sum()) == 32 and schedule.sparsity == 0.5
    assert masks.of(schedule.finish())["weight"].pattern == Block(4, 4, 0.5)


def test_masks_never_grow_back_and_gates_have_one_threshold() -> None:
    model = network()
    rise = Rise(start=2, ramp=6, end=12, every=2)
    schedule = block_thresholds.attach(model, (4, 4), rise, factor=1.5)
    seen = train(model, schedule, 16)
    assert not seen[0] and seen[-1]
    for before, after in itertools.pairwise(seen[2:]):
        assert all(not bool((after[name] & ~keep).any()) for name, keep in before.items())
    assert all(torch.equal(seen[11][name], seen[-1][name]) for name in seen[-1]), "after `end` nothing goes"
    for mask in masks.of(schedule.finish()).values():
        assert isinstance(mask.pattern, Block) and mask.pattern.parts == 4 and 0 < mask.density < 1
        assert mask.pattern.check(mask.keep.float()).ok


def test_a_weight_keeps_its_largest_block() -> None:
    model = network()
    schedule = block_thresholds.attach(model, (4, 4), Rise(1, 1, 2, every=1), factor=1e6)
    train(model, schedule, 3)
    for mask in masks.of(model).values():
        assert int(mask.pattern.blocks(mask.keep).flatten(-2).any(-1).sum()) == 1


def test_the_lasso_of_a_hand_made_weight_and_its_gradient_at_zero() -> None:
    weight = torch.zeros(4, 4, requires_grad=True)
    with torch.no_grad():
        weight[:2, :2] = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    loss = group_lasso(weight, Block(2, 2, 0.0))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(2 * 5.0, abs=1e-4) and weight.grad is not None
    assert torch.isfinite(weight.grad).all() and not weight.grad[2:].any()
    assert weight.grad[0, 0] == pytest.approx(2 * 3 / 5)


def test_the_penalty_ends_with_the_schedule_and_shrinks_blocks() -> None:
    norms = {}
    for lasso in (0.0, 1e-2):
        model = network()
        schedule = block_thresholds.attach(model, (4, 4), Rise(1000, 2000, 3000), lasso=lasso)
        train(model, schedule, 30)
        norms[lasso] = sum(float(p.detach().norm()) for p in model.parameters() if p.ndim > 1)
        assert (float(schedule.penalty().detach()) > 0) is (lasso > 0)
        schedule.steps = 3000
        assert float(schedule.penalty().detach()) == 0
    assert norms[1e-2] < 0.9 * norms[0.0]


def test_a_run_goes_on_where_it_stopped() -> None:
    def attached(model: nn.Module) -> BlockThresholds:
        return block_thresholds.attach(model, (4, 4), Rise(1, 4, 12, every=1), factor=1.5)

    whole, half = network(), network(1)
    first, second = attached(whole), attached(half)
    train(whole, first, 5)
    second.load_state_dict(first.state_dict())
    half.load_state_dict(whole.state_dict())
    for one, other in zip(train(whole, first, 9, seed=1), train(half, second, 9, seed=1), strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(TrainingError, match="another schedule of thresholds"):
        block_thresholds.attach(network(), (8, 4), Rise(1, 4, 12, every=1)).load_state_dict(first.state_dict())


def test_quantiles_come_from_a_trained_model_of_the_same_layers() -> None:
    dense = network()
    found = quantiles_of(dense)
    assert set(found) == {"weight_ih_l0", "weight_hh_l0"}
    share = (dense.weight_hh_l0.abs() < found["weight_hh_l0"]).float().mean()
    assert float(share) == pytest.approx(0.9, abs=0.01)
    schedule = block_thresholds.attach(network(1), (4, 4), Rise(0, 10, 20), quantiles=found)
    assert schedule.slopes["weight_hh_l0"] == pytest.approx(Rise(0, 10, 20).slope(found["weight_hh_l0"]) * 2)
    with pytest.raises(TrainingError, match="weight_ih_l0"):
        block_thresholds.attach(network(1), (4, 4), Rise(0, 10, 20), quantiles={"weight_hh_l0": 0.1})


def test_the_search_ends_near_what_is_wanted() -> None:
    asked: list[float] = []

    def sparsity(factor: float) -> float:
        asked.append(factor)
        return factor / (1 + factor)

    assert sparsity(find_factor(sparsity, 0.8, close=0.005)) == pytest.approx(0.8, abs=0.005)
    assert len(asked) == 5  # four runs and the line above; halving alone takes six


def test_a_search_that_ends_far_off_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        assert find_factor(lambda factor: 0.2, 0.8, runs=3) > 0
    assert "60.0 points from 80.0 %" in caplog.text
    with pytest.raises(TrainingError, match="got no sparsity"):
        find_factor(lambda factor: float("nan"), 0.8)


@pytest.mark.parametrize(
    "bad",
    [lambda: Rise(5, 4, 9), lambda: Rise(0, 0, 0), lambda: Rise(0, 1, 2, every=0), lambda: Rise(0, 1, 2, ratio=0.0),
     lambda: block_thresholds.attach(network(), (4, 4), Rise(0, 1, 2), factor=0.0),
     lambda: block_thresholds.attach(network(), (4, 4), Rise(0, 1, 2), lasso=-1.0),
     lambda: find_factor(lambda f: f, 1.0)],
)  # fmt: skip
def test_impossible_numbers_are_refused(bad) -> None:
    with pytest.raises(TrainingError, match="impossible"):
        bad()
