"""Learned thresholds: the share and its gradient by hand, budgets that are met, exact small models, resume."""

import copy

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.structure.shrink.networks import Wide
from tests.training.test_gates import CASES, IMAGES, LABELS, ROWS, Beneath, mlp, residual
from twofour.errors import TrainingError
from twofour.training import channel_thresholds, gates


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def train(
    model: nn.Module,
    x: Tensor,
    scheme: channel_thresholds.ChannelThresholds,
    steps: int,
    optimizer: torch.optim.Optimizer,
) -> None:
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), LABELS).backward()
        optimizer.step()
        scheme.step()


@pytest.mark.parametrize(("case", "budget"), [("residual", 0.4), ("mlp", 0.4), ("mlp", 0.7)])
def test_the_budget_is_met_and_the_small_model_is_the_large_one(case: str, budget: float) -> None:
    make, x = CASES[case]
    model = make()
    whole = parameters(model)
    scheme = channel_thresholds.attach(model, x, steps=12, budget=budget, multiple=1)
    train(model, x, scheme, 20, torch.optim.SGD(model.parameters(), 0.05, 0.9))
    inside = model.eval()(x)
    scheme.finish().eval()
    torch.testing.assert_close(model(x), inside)
    assert not any("parametrizations" in key for key in model.state_dict())
    small = channel_thresholds.cut(model, x)
    assert 0.8 * budget * whole < parameters(small) <= (budget + 0.02) * whole  # biases take constants up
    if case == "mlp":  # no padding: exact everywhere
        torch.testing.assert_close(small(x), inside, rtol=1e-5, atol=1e-5)
    assert gates.learned(model) is channel_thresholds.learned(model)


def test_the_share_and_its_gradient_of_a_hand_made_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.ReLU(), nn.Linear(4, 3, bias=False))
    scheme = channel_thresholds.attach(model, ROWS, steps=10, budget=0.5)
    (one,) = scheme._thresholds
    gate = one.gated.held[0][0]
    with torch.no_grad():  # of mean 1 and deviation 0.2^0.5
        gate.copy_(torch.tensor([0.4, 0.8, 1.2, 1.6]))
        one.value.fill_(0.1)
    one.temperature = 0.5
    share = scheme.share()
    assert float(share.detach()) == pytest.approx(0.5), "half of the rows of one weight and of the columns of the other"
    share.backward()
    soft = (((gate.detach() - 1.0) / 0.2**0.5 - 0.1) / 0.5).sigmoid()
    assert one.value.grad is not None
    assert float(one.value.grad) == pytest.approx(-float((soft * (1 - soft) / 0.5).sum()) / 4)
    assert gate.grad is None
    weight = model.get_parameter("2.parametrizations.weight.original")
    open_gates = gate * torch.tensor([0.0, 0.0, 1.0, 1.0])
    torch.testing.assert_close(model(ROWS), (model[0](ROWS).relu() * open_gates) @ weight.T)
    scheme.remove()


def test_a_layer_that_the_loss_does_not_need_becomes_the_narrower_one() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 6)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 4)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + 1e-3 * self.b(x)

    model, labels = Two(), x[:, :4].argmax(1)
    scheme = channel_thresholds.attach(model, x, steps=60, budget=0.55, multiple=1)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
        scheme.step()
    scheme.finish()
    needed, other = (after for _, after in gates.learned(model).widths.values())
    assert other < needed


@pytest.mark.parametrize(("case", "stop"), [("residual", 3), ("mlp", 3), ("mlp", 7)])
def test_a_resumed_training_ends_with_the_same_bits(case: str, stop: int) -> None:
    make, x = CASES[case]

    def begun() -> tuple[nn.Module, channel_thresholds.ChannelThresholds, torch.optim.Optimizer]:
        model = make()
        scheme = channel_thresholds.attach(model, x, steps=6)
        return model, scheme, torch.optim.SGD([*model.parameters()], 0.05, 0.9)

    model, scheme, optimizer = begun()
    train(model, x, scheme, stop, optimizer)  # six settle it
    states = copy.deepcopy((scheme.state_dict(), model.state_dict(), optimizer.state_dict()))
    train(model, x, scheme, 9 - stop, optimizer)
    again, other, optimizer = begun()
    for part, state in zip((other, again, optimizer), states, strict=True):
        part.load_state_dict(state)
    train(again, x, other, 9 - stop, optimizer)
    one, two = scheme.finish().state_dict(), other.finish().state_dict()
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    assert one.keys() == make().state_dict().keys()
    assert gates.learned(model).plan == gates.learned(again).plan


def test_finetune_trains_with_thresholds() -> None:
    model = residual()
    result = twofour.finetune(
        model,
        [(IMAGES, LABELS)] * 4,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.05),
        epochs=2,
        progress=False,
        scheme=channel_thresholds.during(IMAGES, 0.6, multiple=1),
    )
    assert len(result.sparse.history) == 2
    assert channel_thresholds.cut(model, IMAGES)(IMAGES).isfinite().all()


def test_groups_under_one_norm_and_groups_that_one_number_counts() -> None:
    torch.manual_seed(0)
    model = Beneath()
    scheme = channel_thresholds.attach(model, ROWS, steps=2, budget=0.5, multiple=1)
    train(model, ROWS, scheme, 2, torch.optim.SGD(model.parameters(), 0.05))
    torch.testing.assert_close(
        channel_thresholds.cut(scheme.finish().eval(), ROWS)(ROWS), model(ROWS), rtol=1e-4, atol=1e-5
    )
    wide, x = Wide().eval(), torch.randn(8, 16)
    scheme = channel_thresholds.attach(wide, x, steps=2, budget=0.6)
    with torch.no_grad():
        scheme._thresholds[0].gated.held[0][0][:40] *= 0.1
    small = channel_thresholds.cut(scheme.finish(), x)
    assert small.up[0].out_features == small.up[1].out_features == small.width < 64  # type: ignore[union-attr, index]
    torch.testing.assert_close(small(x), wide(x))


def test_what_is_impossible_is_refused() -> None:
    model = mlp()
    for options in ({"budget": 0}, {"budget": 1.0}, {"steps": 0}):
        with pytest.raises(TrainingError, match="impossible"):
            channel_thresholds.attach(model, ROWS, **{"steps": 1, **options})
    with pytest.raises(TrainingError, match="impossible"):
        channel_thresholds.during(ROWS, share=0)
    with pytest.raises(TrainingError, match=r"the budget cannot be met[\s\S]*at least 0\.\d+"):
        channel_thresholds.attach(model, ROWS, steps=1, budget=0.01)
    with pytest.raises(TrainingError, match="nothing can have thresholds"):
        channel_thresholds.attach(nn.Sequential(nn.Linear(6, 4)), ROWS, steps=1)
    scheme = channel_thresholds.attach(model, ROWS, steps=2)
    with pytest.raises(TrainingError, match="attached to the model already"):
        channel_thresholds.attach(model, ROWS, steps=2)
    with pytest.raises(TrainingError, match="other thresholds"):
        scheme.load_state_dict({"plan": {}})
    with torch.no_grad():
        scheme._thresholds[0].gated.held[0][0][0] = torch.nan
    with pytest.raises(TrainingError, match="not finite"):
        scheme.finish()
    assert scheme.remove().state_dict().keys() == mlp().state_dict().keys()
