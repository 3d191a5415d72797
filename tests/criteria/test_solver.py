"""Criteria over whole models through `prune`: what is chosen, reported, refused and undone."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import twofour
from tests.layers.small import EVERY, LAYERS
from tests.turns import in_turn
from twofour import masks
from twofour.criteria import NAMES
from twofour.errors import DataError, LayerError, PatternError, RecipeError
from twofour.layers import walk
from twofour.pruning import outcomes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), *(Block() for _ in range(3)), nn.Linear(16, 16))


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, groups=2, stride=2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(32 * 16, 8))


def images(count: int = 40) -> torch.Tensor:
    noise = torch.randn(count, 16, 10, 10, generator=torch.Generator().manual_seed(1))
    return nn.functional.avg_pool2d(noise, 3, stride=1, padding=1)


def tokens(count: int = 300) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=generator) @ torch.randn(6, 16, generator=generator)


def lost(model: nn.Module, dense: nn.Module, x: torch.Tensor) -> float:
    with torch.no_grad():
        return ((model(x) - dense(x)).norm() / dense(x).norm()).item()


def options(name: str, x: torch.Tensor, outputs: int) -> dict[str, Any]:
    target = torch.randint(0, outputs, (len(x),), generator=torch.Generator().manual_seed(2))
    pairs = [(x[:20], target[:20]), (x[20:], target[20:])]
    loss = {"loss": nn.functional.cross_entropy} if name in ("taylor", "learned") else {}
    return {"data": pairs, "samples": len(x), "progress": False, **loss}


@in_turn("pattern", ["2:4", "1:4", "8:2:8"])
@in_turn("name", [name for name in NAMES if name != "learned"])
@in_turn("make", [encoder, convolutions])
def test_every_criterion_on_linear_and_convolutions(make, name: str, pattern: str) -> None:
    dense, x = make(), tokens() if make is encoder else images()
    model = copy.deepcopy(dense)
    twofour.prune(model, pattern, criterion=name, **options(name, x, 8 if make is convolutions else 16))
    assert twofour.check(model).ok and len(masks.of(model)) == (8 if make is encoder else 3)
    found = outcomes(model)
    assert [outcome.name for outcome in found] == list(masks.of(model))
    assert all(outcome.error is not None and 0 < outcome.error < 1.01 for outcome in found)
    kept = {key: mask.keep for key, mask in masks.of(model).items()}
    same = all(torch.equal(model.state_dict()[key][keep], dense.state_dict()[key][keep]) for key, keep in kept.items())
    assert same == (name not in ("sparsegpt", "admm"))


@pytest.mark.parametrize(("make", "x"), [(encoder, tokens()), (convolutions, images())])
def test_what_criteria_know_shows_in_the_output(make, x: torch.Tensor) -> None:
    dense = make()
    errors = {}
    for name in ("sparsegpt", "sparsegpt-mask", "wanda", "random"):
        model = twofour.prune(copy.deepcopy(dense), "2:4", criterion=name, data=x, samples=len(x))
        errors[name] = lost(model, dense, x)
    assert errors["sparsegpt"] < 0.9 * errors["sparsegpt-mask"] < 0.9 * errors["random"]
    assert errors["wanda"] < errors["random"]


def test_the_error_reported_is_that_of_the_layer() -> None:
    layer = nn.Linear(32, 16, bias=False)
    x = torch.randn(400, 32, generator=torch.Generator().manual_seed(0))
    for name in ("wanda", "sparsegpt", "magnitude"):
        model = twofour.prune(copy.deepcopy(layer), "2:4", criterion=name, data=x, samples=400)
        (outcome,) = outcomes(model)
        assert (outcome.criterion, outcome.pattern, outcome.rows) == (name, "2:4", 400)
        assert outcome.error == pytest.approx(lost(model, layer, x), rel=1e-4)
    assert outcomes(twofour.prune(layer, "2:4"))[0].error is None


def test_a_callers_autocast_does_not_hide_from_a_layer_what_is_pruned_before_it() -> None:
    states = []
    for cached in (True, False):
        model = encoder()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            model(tokens())  # what is casted here is kept where the cache is on
            twofour.prune(model, "2:4", criterion="sparsegpt", data=tokens(), progress=False)
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_same_data_same_weights() -> None:
    first, second = (twofour.prune(encoder(), "2:4", criterion="sparsegpt", data=[tokens()]) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_bfloat16_weights_stay_bfloat16() -> None:
    model = encoder().bfloat16()
    twofour.prune(model, "2:4", criterion="sparsegpt", data=[tokens().bfloat16()])
    assert twofour.check(model).ok and {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_layer_the_data_never_reach_stays_dense(caplog: pytest.LogCaptureFixture) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return self.used(x)

    model = twofour.prune(Half(), "2:4", criterion="wanda", data=tokens())
    assert list(masks.of(model)) == ["used.weight"]
    assert "`unused.weight` stays dense: the calibration data never reach it" in caplog.text
    with pytest.raises(LayerError, match=r"no weight can be calibrated\n  reason  `unused.weight`: the calib"):
        twofour.prune(Half(), {"unused": "2:4", "*": "dense"}, criterion="wanda", data=tokens())


def test_an_interruption_brings_every_value_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = encoder(), []
    before = copy.deepcopy(model.state_dict())
    solve = twofour.criteria.SparseGPT.solve

    def interrupted(self, weight, pattern, statistics, name):
        seen.append(name)
        if len(seen) == 4:
            assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])
            raise KeyboardInterrupt
        return solve(self, weight, pattern, statistics, name)

    monkeypatch.setattr(twofour.criteria.SparseGPT, "solve", interrupted)
    with pytest.raises(KeyboardInterrupt):
        twofour.prune(model, "2:4", criterion="sparsegpt", data=tokens())
    assert not masks.of(model) and not outcomes(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_values_come_back_where_a_mask_cannot_be_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise twofour.errors.MaskError("no mask today", got="a test", wanted="a refusal", remedy="none")

    model = encoder()
    monkeypatch.setattr(masks, "attach_all", refuse)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(twofour.errors.MaskError, match="no mask today"):
        twofour.prune(model, "2:4", criterion="wanda", data=tokens())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@in_turn(
    ("given", "error", "message"),
    [
        (
            {"criterion": "wanda"},
            RecipeError,
            r'"wanda" needs calibration data\n  got +data=None\n  wanted +data: an it',
        ),
        ({"criterion": "taylor", "data": tokens()}, RecipeError, r'"taylor" needs a loss\n  got +loss=None\n  wanted'),
        ({"criterion": "ria", "data": tokens(), "loss": len}, RecipeError, r'"ria" follows no loss\n  got +a loss'),
        ({"criterion": "ria", "data": []}, DataError, "there are no calibration data"),
        ({"criterion": "ria", "data": tokens(), "samples": -1}, DataError, "`samples` cannot be used"),
        ({"criterion": "ria", "data": tokens()[:, :7]}, DataError, "the model does not run on the calibration data"),
        (
            {"criterion": "taylor", "data": [(tokens(), None)], "loss": lambda output, _: output},
            DataError,
            r"the loss cannot be used\n  got +Tensor of shape \(128, 16\)\n",
        ),
        (
            {"criterion": "taylor", "data": [(tokens(), None)], "loss": "mse"},
            RecipeError,
            r"no function of an output and a target\n  got +'mse'\n  wanted.*\n  try +for instance",
        ),
        (
            {"criterion": "learned", "data": [(tokens(), None)], "loss": lambda output: output.sum()},
            RecipeError,
            r"no function of an output and a target\n  got +<lambda>\(output\): too many positional arguments",
        ),
        (
            {"criterion": "taylor", "data": [(tokens(), None)], "loss": nn.functional.mse_loss},
            DataError,
            r"the loss cannot be computed\n  got +AttributeError: .*; target: NoneType\n",
        ),
        (
            {"criterion": "taylor", "data": [(tokens() * torch.nan, None)], "loss": lambda output, _: output.sum()},
            DataError,
            r"the calibration data hold NaN\n  got +batch 1: ",
        ),
    ],
)
def test_errors(given: dict[str, Any], error: type[Exception], message: str) -> None:
    model = encoder()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        twofour.prune(model, "2:4", **given)
    assert not masks.of(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_weight_that_is_not_finite_is_named() -> None:
    model = encoder()
    with torch.no_grad():
        model[0].weight[2, 3] = torch.nan
    with pytest.raises(PatternError, match=r"layer `0.weight`: the weight cannot be ranked\n  got +1 values.*\(2, 3\)"):
        twofour.prune(model, "2:4", criterion="sparsegpt", data=tokens())


def test_taylor_leaves_gradients_and_their_switches_alone() -> None:
    model = encoder()
    model[0].weight.requires_grad_(False)
    model[1].norm.weight.grad = torch.ones(16)
    twofour.prune(model, "2:4", criterion="taylor", **options("taylor", tokens(), 16))
    assert not model[0].weight.requires_grad and model[1].up.weight.requires_grad
    assert model[1].up.weight.grad is None and (model[1].norm.weight.grad == 1).all()


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@in_turn("criterion", ["sparsegpt"])
@in_turn("kind", EVERY)
def test_every_kind_of_layer(kind: str, criterion: str) -> None:
    torch.manual_seed(0)
    model = EVERY[kind]()
    shape = LAYERS[kind][1] if kind in LAYERS else (4, 3, 16) if "cell" not in kind else (4, 16)
    x = torch.randn(40, *shape[1:])
    batches: Any = [x]
    if isinstance(model, nn.MultiheadAttention):
        widths = model.kdim or 16, model.vdim or 16
        batches = [(x, *(torch.randn(40, 3, width) for width in widths))]
    left = [name for name, _ in model.named_parameters() if name.startswith("weight_hr")]
    twofour.prune(model, "2:4", criterion=criterion, data=batches, eligibility="any")
    assert twofour.check(model).ok and len(masks.of(model)) == len(walk(model, eligibility="any").weights) - len(left)
    for outcome in outcomes(model):
        if "cell" in kind and outcome.name == "weight_hh":  # called without a state, which then is zero
            assert outcome.error is None and "every input is zero" in outcome.note
        else:
            assert outcome.error is not None and 0 <= outcome.error < 1.1, outcome


def test_attention_inside_an_encoder_layer() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x, padding = torch.randn(20, 6, 16), torch.zeros(20, 6, dtype=torch.bool)
    padding[:, 4:] = True
    twofour.prune(model, "2:4", criterion="sparsegpt", data={"src": x, "src_key_padding_mask": padding})
    assert len(masks.of(model)) == 8 and {outcome.rows for outcome in outcomes(model)} == {80}


@pytest.mark.parametrize("criterion", ["sparsegpt", "sparsegpt-mask", "admm"])
def test_blocks_of_rows_across_groups_are_refused_with_the_layer(criterion: str) -> None:
    grouped = nn.Conv2d(32, 24, 1, groups=2)
    before = grouped.weight.detach().clone()
    with pytest.raises(RecipeError, match=r"`weight`[\s\S]*8:2:8[\s\S]*12 rows in each product"):
        twofour.prune(grouped, "8:2:8", criterion=criterion, data=[torch.randn(4, 32, 3, 3)])
    assert torch.equal(grouped.weight, before)
    fitting = nn.Conv2d(32, 32, 1, groups=2)
    assert twofour.check(twofour.prune(fitting, "8:2:8", criterion=criterion, data=[torch.randn(4, 32, 3, 3)])).ok


class Half(nn.Module):
    """A model with a layer that its output, and so the loss, does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.aside = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        self.aside(x)
        return self.used(x)


@pytest.mark.parametrize("name", ["taylor", "learned:steps=3"])
def test_what_the_loss_does_not_depend_on_stays_dense_with_its_reason(name: str, caplog) -> None:
    torch.manual_seed(0)
    model = Half()
    twofour.prune(model, "2:4", criterion=name, **options("taylor", tokens(), 16))
    assert list(masks.of(model)) == ["used.weight"]
    for left in ("unused", "aside"):
        assert f"`{left}.weight` stays dense: the loss does not depend on it" in caplog.text
    with pytest.raises(DataError, match=r"loss cannot be used\n  got +Tensor \S+, which depends on no weight to prune"):
        twofour.prune(Half(), {"aside": "2:4", "*": "dense"}, criterion=name, **options("taylor", tokens(), 16))


@pytest.mark.parametrize("name", ["taylor", "learned:steps=1"])
def test_a_loss_of_zero_gradients_has_nothing_to_rank_by(name: str) -> None:
    model = Half()
    with pytest.raises(LayerError, match=r"reason +`used.weight`: the loss does not depend on it"):
        twofour.prune(model, "2:4", criterion=name, data=[(tokens(), None)], loss=lambda output, _: output.sum() * 0)
    assert not masks.of(model)


@pytest.mark.parametrize("name", ["wanda", "sparsegpt", "magnitude"])
def test_a_layer_whose_inputs_are_all_zero_is_named(name: str, caplog) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Threshold(1e9, 0), nn.Linear(16, 16))
    dense = model[2].weight.detach().clone()
    twofour.prune(model, "2:4", criterion=name, data=tokens())
    ends = "its error is not known" if name == "magnitude" else "kept by magnitude"
    assert f"`2.weight`: every input is zero in the calibration data: {ends}" in caplog.text
    assert "`0.weight`: every" not in caplog.text
    first, last = outcomes(model)
    assert first.error is not None and last.error is None and ends in last.note
    assert torch.equal(model[2].weight != 0, twofour.patterns.parse("2:4").project(dense, absolute=True))


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize("name", ["taylor", "learned:steps=3", "magnitude", "random"])
def test_weights_whose_inputs_cannot_be_seen_are_pruned_where_inputs_do_not_matter(name: str) -> None:
    torch.manual_seed(0)
    model = nn.LSTM(16, 32, proj_size=16, batch_first=True)
    x = torch.randn(20, 3, 16, generator=torch.Generator().manual_seed(1))
    loss = {"loss": lambda output, _: output[0].square().mean()} if name not in ("magnitude", "random") else {}
    twofour.prune(model, "2:4", criterion=name, data=[(x, None)], eligibility="any", **loss)
    assert twofour.check(model).ok and "weight_hr_l0" in masks.of(model)
    found = {outcome.name: outcome for outcome in outcomes(model)}
    hidden = found.pop("weight_hr_l0")
    assert hidden.error is None and "cannot be observed" in hidden.note
    assert all(outcome.error is not None for outcome in found.values())
    assert (model.weight_hr_l0 != 0).float().mean() == 0.5


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
def test_taylor_prunes_what_it_cannot_observe_by_its_gradient() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(16, 32, proj_size=16, batch_first=True)
    x = torch.randn(20, 3, 16, generator=torch.Generator().manual_seed(1))
    dense = copy.deepcopy(model)
    dense(x)[0].square().mean().backward()
    score = (dense.weight_hr_l0 * dense.weight_hr_l0.grad).detach()
    twofour.prune(
        model, "2:4", criterion="taylor", data=[(x, None)], eligibility="any", loss=lambda y, _: y[0].square().mean()
    )
    assert torch.equal(
        masks.of(model)["weight_hr_l0"].keep, twofour.patterns.parse("2:4").project(score, absolute=True)
    )
