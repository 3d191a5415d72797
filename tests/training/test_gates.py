"""Learned proportions: soft thresholds against a hand table, the energy rule, exact small models, resume, refusals."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.structure.shrink.networks import Wide
from twofour.errors import TrainingError
from twofour.training import gates
from twofour.training.schemes.gated import Gated


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, hidden, 3, padding=1, bias=False), nn.BatchNorm2d(hidden)
        self.conv2, self.bn2 = nn.Conv2d(hidden, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))).relu()


def residual() -> nn.Module:
    torch.manual_seed(0)
    stem = (nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return nn.Sequential(*stem, Block(8, 16), Block(8, 16), *head)


class Layer(nn.Module):
    """A pre-norm layer: gated by scales alone, since no batch norm is there."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), Layer(), Layer(), nn.Linear(8, 4))


IMAGES = torch.randn(8, 1, 6, 6, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
CASES = {"residual": (residual, IMAGES), "mlp": (mlp, ROWS)}
LABELS = torch.arange(8) % 4


def train(model: nn.Module, x: Tensor, scheme: gates.Gates, steps: int, optimizer: torch.optim.Optimizer) -> None:
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), LABELS).backward()
        optimizer.step()
        scheme.step()


def test_the_soft_threshold_and_tied_gates() -> None:
    one = nn.Parameter(torch.tensor([0.3, -0.3, 0.05, 2.0]))
    other = nn.Parameter(torch.tensor([1.0, 0.0, -0.01]))
    gated = Gated("g", 3, [(one, torch.tensor([0, 1, 2, -1])), (other, torch.tensor([2, 1, 0]))], [])
    gated.pull(one, 0.1)
    torch.testing.assert_close(one.detach(), torch.tensor([0.2, -0.2, 0.0, 2.0]))
    torch.testing.assert_close(gated.energy(), torch.tensor([0.04 + 0.0001, 0.04, 1.0], dtype=torch.float64))
    gated.close(torch.tensor([True, False, False]))
    assert one.tolist()[0] == 0 and one.tolist()[3] == 2 and other.tolist()[2] == 0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_the_small_model_is_the_large_one(case: str, kind: str) -> None:
    make, x = CASES[case]
    model = make()
    scheme = gates.attach(model, x, steps=30, strength=3.0, multiple=1)
    blocks = [one for one in scheme._gated if one.block]
    assert len(blocks) == 2 and len(scheme.layers) == 4
    parameters = model.parameters()
    optimizer = torch.optim.SGD(parameters, 0.05, 0.9) if kind == "sgd" else torch.optim.Adam(parameters, 0.02)
    train(model, x, scheme, 30, optimizer)
    with torch.no_grad():  # one block stays and one goes, whatever was learned
        for one, value in zip(blocks, (0.0, 0.7), strict=True):
            one.held[0][0].fill_(value)
            assert one.scales
    scheme.finish()
    found = gates.learned(model)
    assert found.layers == (blocks[0].name,)
    assert all(1 <= after <= before for before, after in found.widths.values())
    assert any(after < before for before, after in found.widths.values())
    assert not any("parametrizations" in key for key in model.state_dict())
    small = gates.cut(model, x)
    assert sum(p.numel() for p in small.parameters()) < 0.6 * sum(p.numel() for p in model.parameters())
    if case == "mlp":  # no padding: exact everywhere
        torch.testing.assert_close(small(x), model(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(TrainingError, match="no learned proportions"):
        gates.cut(small, x)


class Beside(nn.Module):
    """A batch norm that one reader is behind, and what passes by it: another reader, or a layer that pads."""

    def __init__(self, padded: bool) -> None:
        super().__init__()
        self.a, self.n = nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16)
        self.b, self.c, self.d = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 4, 1), nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.padded = padded

    def forward(self, x: Tensor) -> Tensor:
        raw = self.a(x)
        normed = self.n(raw).relu()
        y = self.b(self.d(normed)) if self.padded else self.b(normed) + self.c(raw.relu())
        return y.mean((2, 3))


class Beneath(nn.Module):
    """Two groups of channels under one batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.n, self.c = nn.Linear(6, 8), nn.Linear(6, 8), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.n(torch.cat([self.a(x), self.b(x)], 1)).relu())


@pytest.mark.parametrize("padded", [False, True])
def test_a_norm_is_no_gate_where_a_reader_gets_more_than_it(padded: bool) -> None:
    torch.manual_seed(0)
    model = Beside(padded)
    scheme = gates.attach(model, IMAGES, steps=30, strength=3.0, multiple=1)
    (one,) = scheme._gated
    assert len(one.scales) == (1 if padded else 2) and one.held[0][0] is not model.n.weight
    train(model, IMAGES, scheme, 30, torch.optim.SGD(model.parameters(), 0.05))
    scheme.finish().eval()
    (width,) = gates.learned(model).widths.values()
    assert width[1] < width[0]
    torch.testing.assert_close(gates.cut(model, IMAGES)(IMAGES), model(IMAGES), rtol=1e-4, atol=1e-5)


def test_every_group_under_one_norm_is_pulled() -> None:
    torch.manual_seed(0)
    model = Beneath()
    scheme = gates.attach(model, ROWS, steps=10, strength=0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert [one.held[0][0] for one in scheme._gated] == [model.n.weight] * 2
    for _ in range(10):
        optimizer.zero_grad()
        (0 * model(ROWS)).sum().backward()
        optimizer.step()
        scheme.step()
    torch.testing.assert_close(model.n.weight.detach(), torch.full((16,), 0.5))
    scheme.remove()


def test_a_cut_of_what_is_not_closed_is_refused() -> None:
    torch.manual_seed(0)
    model = Beneath()
    scheme = gates.attach(model, ROWS, steps=8, strength=8.0, multiple=1)
    train(model, ROWS, scheme, 8, torch.optim.SGD(model.parameters(), 0.01))
    scheme.finish().eval()
    torch.testing.assert_close(gates.cut(model, ROWS)(ROWS), model(ROWS), rtol=1e-5, atol=1e-5)
    with pytest.raises(TrainingError, match=r"not closed[\s\S]*two samples"):
        gates.cut(model, ROWS[:1])
    with torch.no_grad():
        model.n.weight += 0.1
    with pytest.raises(TrainingError, match=r"c\.weight[\s\S]*not closed|not closed[\s\S]*c\.weight"):
        gates.cut(model, ROWS)


def test_a_stronger_pull_leaves_less_and_the_loss_holds_what_it_needs() -> None:
    left = []
    for strength in (0.5, 4.0):
        model = mlp()
        scheme = gates.attach(model, ROWS, steps=20, strength=strength, multiple=1)
        train(model, ROWS, scheme, 20, torch.optim.SGD(model.parameters(), 0.02))
        scheme.finish()
        left.append(sum(p.numel() for p in gates.cut(model, ROWS).parameters()))
    assert left[1] < left[0]


def test_the_energy_rule_of_a_hand_made_layer() -> None:
    model = mlp()
    scheme = gates.attach(model, ROWS, steps=1, delta=1e-2, multiple=1)
    one = scheme._gated[0]
    with torch.no_grad():  # 0.09^2 is 0.0081 of 1 + 0.0081; two of them are more than a hundredth
        one.held[0][0].zero_()
        one.held[0][0][:3] = torch.tensor([0.09, 1.0, 0.09])
    keep = scheme.keeps()[0][one.name]
    assert keep.tolist() == [False, True, True, *[False] * 29]
    scheme.multiple = None
    assert int(scheme.keeps()[0][one.name].sum()) == 8, "widths are rounded up to what kernels like"
    scheme.remove()


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_training_ends_with_the_same_bits(case: str) -> None:
    make, x = CASES[case]

    def begun() -> tuple[nn.Module, gates.Gates, torch.optim.Optimizer]:
        model = make()
        gated = gates.attach(model, x, steps=8)
        return model, gated, torch.optim.SGD([*model.parameters()], 0.05, 0.9)

    model, scheme, optimizer = begun()
    train(model, x, scheme, 4, optimizer)
    states = copy.deepcopy((scheme.state_dict(), model.state_dict(), optimizer.state_dict()))
    train(model, x, scheme, 4, optimizer)
    again, other, optimizer = begun()
    for part, state in zip((other, again, optimizer), states, strict=True):
        part.load_state_dict(state)
    train(again, x, other, 4, optimizer)
    one, two = scheme.finish().state_dict(), other.finish().state_dict()
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    assert one.keys() == make().state_dict().keys()
    assert gates.learned(model).plan == gates.learned(again).plan


def test_finetune_trains_with_gates_and_a_schedule() -> None:
    model = residual()
    result = twofour.finetune(
        model,
        [(IMAGES, LABELS)] * 4,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.05),
        schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8),
        epochs=2,
        progress=False,
        scheme=gates.during(IMAGES, 8.0, share=0.5),
    )
    assert len(result.sparse.history) == 2
    assert any(after < before for before, after in gates.learned(model).widths.values())
    assert gates.cut(model, IMAGES)(IMAGES).isfinite().all()


def test_gates_are_pulled_by_the_parameters_that_go_with_a_channel() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    scheme = gates.attach(model, ROWS, steps=10, strength=0.5)
    prices = 6 + 1 + 16, 8 + 1 + 4  # a row with its bias, and a column
    assert [one.weight for one in scheme._gated] == pytest.approx([price / 18 for price in prices])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(10):
        optimizer.zero_grad()
        (0 * model(ROWS)).sum().backward()
        optimizer.step()
        scheme.step()
    for one, price in zip(scheme._gated, prices, strict=True):
        torch.testing.assert_close(one.held[0][0].detach(), torch.full((one.size,), 1 - 0.5 * price / 18))
    state = scheme.state_dict()
    alike = gates.attach(scheme.remove(), ROWS, steps=10, strength=0.5, priced=False)
    assert [one.weight for one in alike._gated] == [1.0, 1.0]
    with pytest.raises(TrainingError, match="other gates"):
        alike.load_state_dict(state)


def test_a_block_that_was_trained_on_is_not_cut() -> None:
    model = mlp()
    scheme = gates.attach(model, ROWS, steps=1)
    (block, _) = (one for one in scheme._gated if one.block)
    with torch.no_grad():
        block.held[0][0].zero_()
    layer: Any = scheme.finish().get_submodule(block.name)
    assert gates.learned(model).layers == (block.name,)
    torch.testing.assert_close(gates.cut(model, ROWS)(ROWS), model(ROWS), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        layer.down.weight.normal_()
    with pytest.raises(
        TrainingError, match=rf"`{block.name}`: what goes is not closed[\s\S]*something else than it gets"
    ):
        gates.cut(model, ROWS)


class Scaling(nn.Module):
    """Halves what it is given, in place, whatever its weights are: no identity."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.down(self.up(x).relu())).mul_(0.5)


def test_a_block_that_changes_what_it_gets_in_place_has_no_gate() -> None:
    torch.manual_seed(0)
    scheme = gates.attach(nn.Sequential(nn.Linear(6, 8), nn.Sequential(Scaling()), nn.Linear(8, 4)), ROWS, steps=1)
    assert not any(one.block for one in scheme._gated)


@pytest.mark.parametrize("case", CASES)
def test_what_is_closed_stays_closed_and_the_rest_is_pulled_no_more(case: str) -> None:
    make, x = CASES[case]
    model = make()
    scheme = gates.attach(model, x, steps=10, strength=4.0, multiple=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    train(model, x, scheme, 10, optimizer)
    settled = scheme.keeps()
    states = copy.deepcopy((scheme.state_dict(), model.state_dict(), optimizer.state_dict()))
    sizes = [float(one.energy().sum()) for one in scheme._gated]
    assert any(not bool(keep.all()) for keep in settled[0].values())
    train(model, x, scheme, 20, optimizer)  # with momentum, and a loss that would open them again
    assert all(torch.equal(keep, settled[0][name]) for name, keep in scheme.keeps()[0].items())
    assert scheme.keeps()[1] == settled[1]
    assert any(float(one.energy().sum()) > size for one, size in zip(scheme._gated, sizes, strict=True))
    again = make()
    other = gates.attach(again, x, steps=10, strength=4.0, multiple=1)
    optimizer = torch.optim.SGD(again.parameters(), 0.05, 0.9)
    for part, state in zip((other, again, optimizer), states, strict=True):
        part.load_state_dict(state)
    train(again, x, other, 20, optimizer)
    one, two = scheme.finish().state_dict(), other.finish().state_dict()
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_what_is_impossible_is_refused() -> None:
    model = mlp()
    for options in ({"strength": 0}, {"strength": float("nan")}, {"delta": 1.0}, {"steps": 0}):
        with pytest.raises(TrainingError, match="impossible"):
            gates.attach(model, ROWS, **{"steps": 1, **options})
    with pytest.raises(TrainingError, match="nothing can have gates"):
        gates.attach(nn.Sequential(nn.Linear(6, 4)), ROWS, steps=1)
    early = torch.optim.SGD(model.parameters(), 0.1)
    scheme = gates.attach(model, ROWS, steps=2)
    with pytest.raises(TrainingError, match="does not hold every gate"):
        train(model, ROWS, scheme, 1, early)
    with pytest.raises(TrainingError, match="other gates"):
        scheme.load_state_dict({"plan": {}})
    with pytest.raises(TrainingError, match="attached to the model already"):
        gates.attach(model, ROWS, steps=2)
    with torch.no_grad():
        scheme.parameters()[0][0] = torch.nan
    with pytest.raises(TrainingError, match="not finite"):
        scheme.finish()
    before = scheme.remove().state_dict()
    assert before.keys() == mlp().state_dict().keys()


def test_groups_that_one_number_counts_are_as_wide_as_the_widest() -> None:
    torch.manual_seed(0)
    model, x = Wide().eval(), torch.randn(8, 16)
    attached = gates.attach(model, x, steps=4)
    first, second = attached._gated
    with torch.no_grad():
        first.held[0][0][:40] = 0
        second.held[0][0][:8] = 0
    small: Any = gates.cut(attached.finish(), x)
    assert small.up[0].out_features == small.up[1].out_features == small.width == 56
    torch.testing.assert_close(small(x), model(x))


def test_a_pull_that_leaves_the_least_is_said(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    for kept, said in ((64, False), (40, False), (5, True), (1, True)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
        scheme = gates.attach(model, x, steps=10, strength=4.0, multiple=1)
        with torch.no_grad():
            scheme._gated[0].held[0][0][kept:] = 0
        caplog.clear()
        scheme.finish()
        told = [message for message in caplog.messages if "strength=4 may be too much" in message]
        assert len(told) == said and (not said or f"64 -> {max(kept, 4)}" in told[0])
