"""Training schemes: what the forward pass uses, what the gradient is, and that all of them end 2:4."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import twofour
from twofour import masks
from twofour.errors import PatternError, RecipeError, TrainingError
from twofour.patterns import project_reference
from twofour.training import gradual, lora, s_ste, sr_ste
from twofour.training.schemes import Slot


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv1d(16, 16, 3), nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3))


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(12, 16, 4, generator=generator), torch.randint(3, (12,), generator=generator)


def steps(model: nn.Module, parameters: list[nn.Parameter], count: int = 5, after=lambda: None) -> list[float]:
    optimizer = torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)
    losses = []
    for _ in range(count):
        x, y = batch()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        after()
        losses.append(loss.item())
    return losses


def groups_of(weight: Tensor) -> Tensor:
    return weight.movedim(1, -1).unflatten(-1, (-1, 4))


@pytest.mark.parametrize("attach", [sr_ste.attach, s_ste.attach])
def test_the_forward_pass_is_sparse_the_parameter_dense_and_the_end_masked(attach):
    model = network()
    keys, parameters = list(model.state_dict()), list(model.parameters())
    before = copy.deepcopy(model.state_dict())
    scheme = attach(model, "2:4")
    assert scheme.layers == ("0.weight", "2.weight")
    assert all(old is new for old, new in zip(parameters, sorted_like(model, parameters), strict=True))
    for weight in (model[0].weight, model[2].weight):
        assert ((groups_of(weight) != 0).sum(-1) <= 2).all()
    losses = steps(model, parameters)
    assert losses[-1] < losses[0]
    dense = model[2].parametrizations.weight.original
    assert (groups_of(dense) != 0).all()
    used, x = model[2].weight.detach().clone(), batch(1)[0]
    answer = model(x)
    assert scheme.finish() is model
    assert list(model.state_dict()) == keys and twofour.check(model).ok
    assert torch.equal(model[2].weight, used) and torch.equal(model(x), answer)
    assert set(masks.of(model)) == {"0.weight", "2.weight"}
    steps(model, list(model.parameters()))
    assert twofour.check(model).ok
    with pytest.raises(TrainingError, match="over"):
        scheme.finish()

    again = network()
    again.load_state_dict(before)
    attach(again, "2:4").remove()
    assert list(again.state_dict()) == keys and not masks.of(again)
    assert all(torch.equal(again.state_dict()[key], before[key]) for key in keys)


def sorted_like(model: nn.Module, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    found = {id(parameter): parameter for parameter in model.parameters()}
    return [found[id(parameter)] for parameter in parameters]


def test_sr_ste_adds_the_decay_of_pruned_values_to_the_gradient_of_the_sparse_weight():
    layer = nn.Linear(16, 8, bias=False).double()
    weight = layer.weight.detach().clone()
    keep = project_reference(weight, 2, 4, absolute=True)
    x = torch.randn(5, 16, dtype=torch.float64)
    sr_ste.attach(layer, "2:4", decay=0.3)
    layer(x).square().sum().backward()
    of_sparse = 2 * (x @ (weight * keep).T).T @ x
    torch.testing.assert_close(layer.parametrizations.weight.original.grad, of_sparse + 0.3 * weight * ~keep)


def test_s_ste_shrinks_by_the_third_largest_and_is_scaled_by_least_squares():
    layer = nn.Linear(16, 8, bias=False).double()
    weight = layer.weight.detach().clone()
    groups = weight.unflatten(-1, (-1, 4))
    third = groups.abs().sort(-1, descending=True).values[..., 2:3]
    shrunk = (groups.sign() * (groups.abs() - third).relu()).flatten(-2)
    scale = (weight * shrunk).sum() / (shrunk * shrunk).sum()
    s_ste.attach(layer, "2:4")
    torch.testing.assert_close(layer.weight, scale * shrunk)
    x = torch.randn(5, 16, dtype=torch.float64)
    layer(x).sum().backward()
    torch.testing.assert_close(layer.parametrizations.weight.original.grad, x.sum(0).expand(8, 16))
    layer.parametrizations.weight.original.data.mul_(2)
    torch.testing.assert_close(layer.weight, 2 * scale * shrunk)  # the scale is that of the start


def test_s_ste_is_continuous_where_a_mask_jumps():
    layer = nn.Linear(16, 8, bias=False).double()
    with torch.no_grad():
        layer.weight[0, :4] = torch.tensor([3.0, 1.0, 1.0 + 1e-9, 0.5])
    s_ste.attach(layer, "2:4")
    before = layer.weight[0, :4].detach().clone()
    layer.parametrizations.weight.original.data[0, 1] += 2e-9  # now the second value is the second largest
    assert (layer.weight[0, :4] - before).abs().max() < 1e-7


def test_gradual_goes_level_by_level_and_never_lets_a_value_return():
    model = network()
    schedule = gradual.attach(model, "1:4", begin=2, end=6)
    assert [(step, str(pattern)) for step, pattern in schedule.levels] == [(2, "3:4"), (4, "2:4"), (6, "1:4")]
    seen = []

    def after() -> None:
        schedule.step()
        seen.append((str(schedule.now), groups_of(model[2].weight.detach() != 0).sum(-1).max().item()))
        zeros.append(model[2].weight.detach() == 0)

    zeros: list[Tensor] = []
    steps(model, list(model.parameters()), 7, after)
    assert seen == [("None", 4), ("3:4", 3), ("3:4", 3), ("2:4", 2), ("2:4", 2), ("1:4", 1), ("1:4", 1)]
    assert all((earlier <= later).all() for earlier, later in itertools.pairwise(zeros))
    schedule.finish()
    assert twofour.check(model).ok and masks.of(model)["0.weight"].pattern.name == "1:4"


@pytest.mark.parametrize(("begin", "at"), [(0, 3), (2, 1), (2, 5)])
@pytest.mark.parametrize("criterion", ["magnitude", "random:seed=3"])
def test_gradual_killed_and_resumed_ends_bit_for_bit_where_it_would_have(begin, at, criterion, tmp_path):
    options = {"begin": begin, "end": 6, "criterion": criterion}

    def train(model, schedule, optimizer, count):
        for _ in range(count):
            x, y = batch(schedule.steps)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()

    def parts(seed):
        model = network(seed)
        return model, gradual.attach(model, "1:4", **options), torch.optim.AdamW(model.parameters(), lr=0.02)

    through = parts(0)
    train(*through, 8)
    killed = parts(0)
    train(*killed, at)
    torch.save([part.state_dict() for part in killed], tmp_path / "state.pt")

    model, schedule, optimizer = parts(5)
    of_model, of_schedule, of_optimizer = torch.load(tmp_path / "state.pt", weights_only=True)
    schedule.load_state_dict(of_schedule)
    model.load_state_dict(of_model)
    optimizer.load_state_dict(of_optimizer)
    assert schedule.now == killed[1].now and schedule.steps == at
    train(model, schedule, optimizer, 8 - at)
    for key, value in through[0].state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    kept = {name: mask.keep for name, mask in masks.of(through[0]).items()}
    assert kept and all(torch.equal(mask.keep, kept[name]) for name, mask in masks.of(model).items())
    assert twofour.check(schedule.finish()).ok


def test_gradual_refuses_the_state_of_another_schedule():
    state = gradual.attach(network(), "1:4", end=6).state_dict()
    message = r"state is of another gradual schedule\n  got +.*'1:4'.*\n  wanted +.*'2:4'.*\n  try +attach with"
    with pytest.raises(TrainingError, match=message):
        gradual.attach(network(), "2:4", end=6).load_state_dict(state)
    with pytest.raises(TrainingError, match=r"got +keys steps"):
        gradual.attach(network(), "2:4", end=6).load_state_dict({"steps": 3})


def test_gradual_reaches_its_pattern_when_it_is_finished_early_and_lets_go_when_removed():
    model = network()
    schedule = gradual.attach(model, "2:4", end=100)
    assert str(schedule.now) == "3:4"
    schedule.finish()
    assert masks.of(model)["2.weight"].pattern.name == "2:4"
    other = network()
    gradual.attach(other, "2:4", end=100).remove()
    assert not masks.of(other)


def test_lora_trains_its_factors_alone_and_merges_into_the_mask():
    model = twofour.prune(network(), "2:4")
    keys, frozen = list(model.state_dict()), copy.deepcopy(model.state_dict())
    keep = {name: mask.keep.clone() for name, mask in masks.of(model).items()}
    x = batch(1)[0]
    answer = model(x)
    scheme = lora.attach(model, rank=2, layers="2")
    assert torch.equal(model(x), answer) and scheme.layers == ("2.weight",)
    assert [p for p in model.parameters() if p.requires_grad] == scheme.parameters()
    losses = steps(model, scheme.parameters(), 8)
    assert losses[-1] < losses[0]
    assert torch.equal(model[2].parametrizations.weight.original, frozen["2.weight"])
    trained = model(x)
    scheme.finish()
    assert torch.equal(model(x), trained) and not torch.equal(trained, answer)
    assert list(model.state_dict()) == keys and twofour.check(model).ok
    assert all(torch.equal(mask.keep, keep[name]) for name, mask in masks.of(model).items())
    assert torch.equal(model[0].weight, frozen["0.weight"]) and all(p.requires_grad for p in model.parameters())
    second = lora.attach(model)
    steps(model, second.parameters())
    second.remove()
    assert torch.equal(model(x), trained) and twofour.check(model).ok


def test_an_average_of_masked_weights_is_masked():
    model = twofour.prune(network(), "2:4")
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    steps(model, list(model.parameters()), 4, lambda: average.update_parameters(model))
    assert twofour.check(average).ok and len(masks.of(average)) == 2
    assert not torch.equal(average.module[2].weight, model[2].weight)
    assert (average.module[2].weight[~masks.of(model)["2.weight"].keep] == 0).all()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces
def test_a_scheme_survives_copying_and_compilation():
    model = network()
    sr_ste.attach(model, "2:4")
    twin = copy.deepcopy(model)
    x = batch()[0]
    assert torch.equal(twin(x), model(x))
    with torch.no_grad():
        model[2].parametrizations.weight.original.mul_(2)
    assert not torch.equal(twin(x), model(x))
    compiled = torch.compile(twin, backend="eager")
    torch.testing.assert_close(compiled(x), twin(x))


@pytest.mark.parametrize("attach", [sr_ste.attach, s_ste.attach])
def test_a_weight_that_cannot_be_ranked_leaves_the_model_or_the_scheme_whole(attach, monkeypatch):
    model = network()
    keys = list(model.state_dict())
    with monkeypatch.context() as patch, pytest.raises(PatternError):
        patch.setattr(Slot, "parametrise", _second_fails(Slot.parametrise))
        attach(model, "2:4")
    assert list(model.state_dict()) == keys

    scheme = sr_ste.attach(model, "2:4")
    with torch.no_grad():
        original = model[2].parametrizations.weight.original
        kept = original[0, 0].clone()
        original[0, 0] = torch.nan
    with pytest.raises(PatternError, match=r"layer `2\.weight`"):
        scheme.finish()
    with torch.no_grad():
        original[0, 0] = kept
    scheme.finish()
    assert twofour.check(model).ok and list(model.state_dict()) == keys


def _second_fails(parametrise):
    calls = []

    def instead(slot, parametrisation):
        calls.append(slot)
        if len(calls) == 2:
            raise PatternError("it cannot be ranked")
        parametrise(slot, parametrisation)

    return instead


def test_gradual_says_at_once_that_a_criterion_needs_data():
    with pytest.raises(TrainingError, match="no data for its criterion"):
        gradual.attach(network(), "2:4", begin=5, end=9, criterion="wanda")
    with pytest.raises(RecipeError, match="not a criterion"):
        gradual.attach(network(), "2:4", begin=5, end=9, criterion="wand")


def test_s_ste_scales_in_float32():
    layer = nn.Linear(128, 128, bias=False).half()
    layer.weight.data.normal_(0, 8)  # a sum of squares of about 3e5: infinite in float16
    s_ste.attach(layer, "2:4")
    assert layer.weight.dtype == torch.float16 and torch.isfinite(layer.weight).all() and (layer.weight != 0).any()


def test_lora_leaves_tied_weights_alone():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    model[1].weight = model[0].weight
    assert lora.attach(twofour.prune(model, "2:4")).layers == ("2.weight",)


def test_what_cannot_be_trained_so_is_refused():
    masked = twofour.prune(network(), "2:4")
    with pytest.raises(TrainingError, match="masked already"):
        sr_ste.attach(masked, "2:4")
    with pytest.raises(TrainingError, match="`decay` is impossible"):
        sr_ste.attach(network(), decay=-1)
    with pytest.raises(TrainingError, match="S-STE is defined for N:M"):
        s_ste.attach(network(), "4:8-pairs")
    with pytest.raises(TrainingError, match="steps are impossible"):
        gradual.attach(network(), "2:4", begin=3, end=2)
    with pytest.raises(TrainingError, match="gradual schedule is defined"):
        gradual.attach(network(), "4:8-pairs", end=2)  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match="nothing to adapt"):
        lora.attach(network())
    with pytest.raises(TrainingError, match="rank is impossible"):
        lora.attach(masked, rank=0)
    for alpha in (float("nan"), float("inf"), 0.0, -1.0, "16"):  # finish() would merge NaN, or nothing
        with pytest.raises(TrainingError, match="scale of the adapters is impossible"):
            lora.attach(masked, alpha=alpha)  # type: ignore[arg-type]
    tied = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    tied[1].weight = tied[0].weight
    with pytest.raises(TrainingError, match="nothing to make sparse"):
        sr_ste.attach(tied)


def test_adapters_where_only_tied_weights_fit_say_so():
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16), "c": nn.Linear(16, 16)})
    model["b"].weight = model["a"].weight
    twofour.prune(model, "2:4")
    message = (
        r"nothing to adapt\n  reason  `a.weight`: it is tied to another[\s\S]*\n  got +2 masks, layers='a'\n"
        r"  wanted +a model from twofour.prune with a masked layer that [\s\S]*  try +.*; untie a tied weight before"
    )
    with pytest.raises(TrainingError, match=message):
        lora.attach(model, layers="a")
    with pytest.raises(TrainingError, match=r"nothing to quantise\n  reason  `a.weight`: it is tied to another"):
        twofour.quantization.attach(model, layers="a")
    assert lora.attach(model).layers == ("c.weight",)
    with pytest.raises(TrainingError, match=r"the rank is impossible\n  got +rank=0"):
        lora.attach(model, rank=0)
