"""What each layer loses alone: against the definitions, and the model as it was."""

import copy
import json

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import twofour
from twofour import masks
from twofour.allocation import Budget, Candidate, LayerSensitivity, Sensitivities, allocate, confirm, sensitivity
from twofour.allocation import sensitivity as verb
from twofour.allocation.sensitivity import _grouped
from twofour.errors import DataError, FormatError, LayerError, PatternError, RecipeError
from twofour.layers import walk
from twofour.patterns import parse

PATTERNS = ("dense", "2:4", "4:8", "1:4")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.norm(self.conv(x)).mean((2, 3))))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Small()


@pytest.fixture
def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 16, 4, 4, generator=generator), torch.arange(8) % 10) for _ in range(2)]


def state(model: nn.Module) -> list[object]:
    tensors = [t.clone() for t in (*model.parameters(), *model.buffers())]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return [tensors, [m.training for m in model.modules()], hooks, [p.requires_grad for p in model.parameters()]]


def assert_same(before: list[object], model: nn.Module) -> None:
    after = state(model)
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))  # pyright: ignore
    assert before[1:] == after[1:]
    assert not masks.of(model)
    assert all(p.grad is None for p in model.parameters())


def pruned(model: nn.Module, layer: str, pattern: str) -> nn.Module:
    return twofour.prune(copy.deepcopy(model), {layer: pattern})


def mean_loss(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> float:
    model.eval()
    with torch.no_grad():
        return sum(float(F.cross_entropy(model(x), y)) for x, y in data) / len(data)


def inputs_of(model: nn.Module, layer: str, data: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    seen: list[Tensor] = []
    handle = model.get_submodule(layer).register_forward_pre_hook(lambda _, args: seen.append(args[0].double()))
    mean_loss(model, data)
    handle.remove()
    return seen


@pytest.mark.parametrize("layer", ["conv", "blocks.0.0", "blocks.2.0"])
def test_each_layer_is_pruned_alone_on_the_inputs_of_the_dense_model(model, data, layer):
    found = sensitivity(model, data, PATTERNS, loss=F.cross_entropy, progress=False)
    entry = next(entry for entry in found.layers if entry.layer == layer)
    inputs = inputs_of(copy.deepcopy(model), layer, data)
    dense = copy.deepcopy(model.get_submodule(layer)).double().requires_grad_(False)
    if dense.bias is not None:
        dense.bias = None
    base = mean_loss(copy.deepcopy(model), data)
    assert found.baseline == pytest.approx(base)
    assert [candidate.pattern for candidate in entry.candidates] == list(PATTERNS)
    assert entry.candidates[0] == Candidate("dense", entry.values, change=0.0)
    for candidate in entry.candidates[1:]:
        other = pruned(model, layer, candidate.pattern)
        weight = other.get_submodule(layer).weight.detach().double()
        sparse = copy.deepcopy(dense)
        sparse.weight.data.copy_(weight)
        lost = sum(float((dense(x) - sparse(x)).square().sum()) for x in inputs)
        whole = sum(float(dense(x).square().sum()) for x in inputs)
        assert candidate.error == pytest.approx((lost / whole) ** 0.5, rel=1e-4)
        assert candidate.change == pytest.approx(mean_loss(other, data) - base, abs=1e-6)
        assert candidate.kept == int((weight != 0).sum())
        assert candidate.sparse == (candidate.pattern != "4:8")


def test_the_model_is_unchanged(model, data):
    model.train()
    model.blocks[1].eval()
    model.head.weight.requires_grad_(False)
    before = state(model)
    sensitivity(model, data, PATTERNS, loss=F.cross_entropy, progress=False)
    assert_same(before, model)
    sensitivity(model, data, ("2:4",), criterion="sparsegpt", evaluate=lambda m: 1.0, progress=False)
    assert_same(before, model)


def test_the_model_is_unchanged_after_an_error_or_an_interruption(model, data):
    before = state(model.train())
    for error in (KeyboardInterrupt, ZeroDivisionError):
        calls = iter(range(100))

        def evaluate(_: nn.Module, calls=calls, error=error) -> float:
            if next(calls) == 4:
                raise error
            return 0.0

        with pytest.raises(error):
            sensitivity(model, data, evaluate=evaluate, progress=False)
        assert_same(before, model)


def test_what_is_not_used_is_said(model, data, caplog: pytest.LogCaptureFixture) -> None:
    """Aloud where nobody asked for a number: of 400 samples 128 were taken without a word."""
    many = [pair for _ in range(25) for pair in data]
    for samples, level, count in ((None, "WARNING", 128), (16, "INFO", 16)):
        caplog.clear()
        with caplog.at_level("INFO", logger="twofour"):
            verb(model, many, ("dense", "2:4"), skip=["conv", "head"], samples=samples, progress=False)
        (record,) = [record for record in caplog.records if "not used" in record.message]
        unused = 50 - count // 8
        said = f"calibrated on {count} samples spread over the data; not used: {unused} of 50 batches."
        assert record.levelname == level and record.message.startswith(said)
    caplog.clear()
    verb(model, data, ("dense", "2:4"), skip=["conv", "head"], progress=False)
    assert "not used" not in caplog.text


def test_evaluate_is_larger_where_better(model, data):
    def evaluate(m: nn.Module) -> float:
        assert not m.training and not torch.is_grad_enabled()
        return -mean_loss(m, data)

    by_loss = sensitivity(model, data, loss=F.cross_entropy, progress=False)
    by_score = sensitivity(model, [x for x, _ in data], evaluate=evaluate, progress=False)
    assert by_score.baseline == pytest.approx(-by_loss.baseline)
    for a, b in zip(by_loss.layers, by_score.layers, strict=True):
        assert [c.change for c in a.candidates] == pytest.approx([c.change for c in b.candidates], abs=1e-7)


def test_what_a_callers_autocast_keeps_of_weights_hides_no_change(model, data):
    found = []
    for cached in (True, False):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            result = sensitivity(model, data, loss=F.cross_entropy, progress=False)
        found.append([candidate.change for layer in result.layers for candidate in layer.candidates])
    assert found[0] == found[1] and any(found[0])


@pytest.mark.parametrize("criterion", ["wanda", "ria", "sparsegpt", "random", "taylor"])
def test_every_criterion_by_weight(model, data, criterion):
    before = state(model)
    loss = F.cross_entropy if criterion == "taylor" else None
    found = sensitivity(model, data, criterion=criterion, loss=loss, progress=False)
    assert_same(before, model)
    assert found.criterion == criterion and found.measured == ("task" if loss else "error")
    assert all(0 < c.error < 2 for entry in found.layers for c in entry.candidates[1:])
    recipe = allocate(found, Budget(density=0.5)).recipe
    assert recipe.criterion.kind == criterion
    twofour.prune(model, recipe, data=data, loss=loss, progress=False)
    kept = sum(int(mask.keep.sum()) for mask in masks.of(model).values())
    dense = sum(entry.values for entry in found.layers if f"{entry.layer}.weight" not in masks.of(model))
    assert kept + dense <= 0.5 * found.values


def test_what_is_left_out_has_a_reason(model, data):
    found = sensitivity(model, data, ("dense", "2:4", "1:32"), progress=False, skip="blocks.1")
    assert [entry.layer for entry in found.layers] == ["conv", "blocks.0.0", "blocks.2.0"]
    reasons = dict(found.skipped)
    assert "skip='blocks.1'" in reasons["blocks.1.0.weight"] and "not a multiple of 8" in reasons["head.weight"]
    assert all(entry.find("1:32") is None for entry in found.layers), "16 inputs hold no group of 32"
    assert "          -" in str(found)


def test_a_layer_that_no_candidate_fits_is_left_out(data):
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 16))
    found = sensitivity(model, torch.randn(4, 32), ("1:32",), progress=False)
    assert [entry.layer for entry in found.layers] == ["0"]
    assert dict(found.skipped)["2.weight"] == "reduction axis 16: none of 1:32 fits"
    assert found.layers[0].candidates[0].pattern == "1:32", "dense is a candidate only where it is named"


def test_a_single_layer_and_tied_layers():
    layer = nn.Linear(32, 16)
    found = sensitivity(layer, torch.randn(4, 32), progress=False)
    assert [entry.layer for entry in found.layers] == [""]
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    model[2].weight = model[0].weight
    found = sensitivity(model, torch.randn(4, 16), progress=False)
    assert [entry.layers for entry in found.layers] == [("0", "2")] and found.values == 256


def test_the_weights_of_one_layer_get_one_pattern():
    weights = walk(nn.Sequential(nn.LSTM(16, 32), nn.Linear(32, 16))).weights
    assert [weight.layer for weight in weights] == ["0", "0", "1"]
    sizes = [weight.parameter.numel() for weight in weights]
    parts = [
        [Candidate("2:4", size // 2, 0.3, 1.0, True), Candidate("4:8", size // 2, 0.4, -0.5, False)] for size in sizes
    ]
    found = {weight.name: part for weight, part in zip(weights, parts, strict=True)}
    found[weights[1].name].pop()
    both, alone = _grouped(weights, found, True)
    assert both.layers == ("0",) and both.values == sizes[0] + sizes[1]
    assert both.candidates == (
        Candidate("dense", both.values, change=0.0),
        Candidate("2:4", both.values // 2, pytest.approx(0.18**0.5), 2.0, True),  # pyright: ignore
    ), "4:8 does not fit both"
    assert [candidate.pattern for candidate in alone.candidates] == ["dense", "2:4", "4:8"]


def test_recurrent_and_attention_layers():
    model = nn.ModuleDict({"a": nn.MultiheadAttention(16, 2, batch_first=True), "b": nn.LSTM(16, 16)})
    model.forward = lambda x: model["b"](model["a"](x, x, x)[0])[0]
    before = state(model)
    found = sensitivity(model, torch.randn(2, 4, 16), evaluate=lambda m: float(m.b.weight_hh_l0.sum()), progress=False)
    assert_same(before, model)
    assert [entry.layer for entry in found.layers] == ["a", "a.out_proj", "b"]
    assert found.layers[-1].values == 2 * 64 * 16
    twofour.prune(model, allocate(found, Budget(density=0.5)).recipe)
    assert set(masks.of(model)) == {"a.in_proj_weight", "a.out_proj.weight", "b.weight_ih_l0", "b.weight_hh_l0"}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_a_layer_of_which_one_weight_cannot_be_observed_stays_dense():
    model = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.LSTM(16, 32, proj_size=16)})
    model.forward = lambda x: model["b"](model["a"](x))[0]
    found = sensitivity(model, torch.randn(2, 4, 16), progress=False)
    assert [entry.layer for entry in found.layers] == ["a"]
    reasons = dict(found.skipped)
    assert "cannot be observed" in reasons["b.weight_hr_l0"]
    assert reasons["b.weight_ih_l0"].startswith("its layer also has b.weight_hr_l0: ")
    twofour.prune(model, allocate(found, Budget(density=0.5)).recipe)
    assert set(masks.of(model)) == {"a.weight"}


def test_records_survive_a_file(model, data, tmp_path):
    found = sensitivity(model, data, loss=F.cross_entropy, progress=False)
    assert Sensitivities.load(found.save(tmp_path / "found.json")) == found


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "layers": [3]}', "null"])
def test_damaged_files_are_refused(tmp_path, content):
    path = tmp_path / "found.json"
    path.write_text(content)
    with pytest.raises(FormatError) as caught:
        Sensitivities.load(path)
    assert str(caught.value).startswith(f"{path} does not hold sensitivities\n  got     ")
    with pytest.raises(FormatError, match="FileNotFoundError"):
        Sensitivities.load(tmp_path / "none.json")


@pytest.mark.parametrize("damage", [{"layers": []}, {"baseline": float("nan")}, {"baseline": "much"}, {"patterns": 3}])
def test_records_with_damaged_fields_are_refused(tmp_path, damage):
    layer = LayerSensitivity("a", ("a",), 4, (Candidate("2:4", 2, 0.5),))
    table = Sensitivities((layer,), ("2:4",), "magnitude", "asp").to_dict()
    (tmp_path / "good.json").write_text(json.dumps(table))
    assert Sensitivities.load(tmp_path / "good.json").layers == (layer,)
    table["layers"][0]["candidates"][0]["error"] = 1.0
    (tmp_path / "bad.json").write_text(json.dumps({**table, **damage}))
    with pytest.raises(FormatError, match=r"does not hold sensitivities\n  got     (Value|Type)Error"):
        Sensitivities.load(tmp_path / "bad.json")


def refused(kind: type[Exception], *args, **kwargs) -> str:
    with pytest.raises(kind) as caught:
        verb(*args, progress=False, **kwargs)
    return str(caught.value)


def test_what_cannot_be_measured_is_refused(model, data):
    text = refused(LayerError, nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3))
    assert text.startswith("no layer of the model is eligible\n  reason  `0.weight`: in_features 3") and "any" in text
    assert "no parameter with two or more axes" in refused(LayerError, nn.ReLU(), torch.randn(2, 3))
    text = refused(RecipeError, model, data, ("dense",))
    assert text.startswith("the candidates hold no pattern\n  got     'dense'")
    assert "got     none" in refused(RecipeError, model, data, ())
    assert "not a sparsity pattern" in refused(PatternError, model, data, ("2:4", "none"))
    assert 'the criterion "taylor" needs a loss' in refused(RecipeError, model, data, criterion="taylor")
    assert "no batch" in refused(DataError, model, [])
    assert refused(LayerError, "model", data).startswith("there is no model\n  got     str")
    masked = twofour.prune(copy.deepcopy(model), "2:4")
    text = refused(LayerError, masked, data)
    assert text.startswith("sensitivity is measured on the dense model\n  got     masks on `conv.weight`")


@pytest.mark.parametrize("answer", [float("nan"), {"accuracy": 1.0}, torch.zeros(2)])
def test_what_evaluate_answers_must_be_a_number(model, data, answer):
    text = refused(DataError, model, data, evaluate=lambda _: answer)
    assert text.startswith("what `evaluate` answers cannot be compared\n  got     ") and "the accuracy" in text


def test_a_loss_that_becomes_infinite_names_the_layer(model, data):
    values = iter([1.0, 1.0, float("inf")])
    text = refused(DataError, model, data, loss=lambda *_: torch.tensor(next(values)))
    assert text.startswith("layer `conv.weight`: what `loss` answers cannot be compared")


def test_a_weight_that_is_not_finite_names_its_layer(model, data):
    with torch.no_grad():
        model.blocks[0][0].weight[0, 0] = float("nan")
    assert "blocks.0.0.weight" in refused(PatternError, model, data) and parse("2:4")


def exact(*layers: int) -> nn.Module:
    """Two layers of which those named lose nothing at 2:4."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    with torch.no_grad():
        for layer in layers:
            net[layer].weight.mul_(torch.tensor([1.0, 0, 1, 0]).repeat(4))
    return net


def records(**errors: tuple[float, float, float]) -> Sensitivities:
    """Layers `l0` and `l2` with what dense, 2:4 and 1:4 are said to lose."""
    layers = [
        LayerSensitivity(
            *(name[1:], (name[1:],), 256),
            tuple(
                Candidate(pattern, kept, error)
                for pattern, kept, error in zip(("dense", "2:4", "1:4"), (256, 128, 64), found, strict=True)
            ),
        )
        for name, found in errors.items()
    ]
    return Sensitivities(tuple(layers), ("dense", "2:4", "1:4"), "magnitude", "asp")


DATA = [torch.randn(20, 16, generator=torch.Generator().manual_seed(2))]


def test_an_allocation_that_loses_more_than_one_pattern_everywhere_gives_way(caplog: pytest.LogCaptureFixture) -> None:
    """The records say that 1:4 costs nothing; measured together 2:4 everywhere does, at a lower density."""
    wrong, net = records(l0=(0, 0.5, 0.0), l2=(0, 0.5, 0.5)), exact(0, 2)
    before = copy.deepcopy(net.state_dict())
    chosen = allocate(wrong, Budget(density=0.625))
    assert dict(chosen.chosen) == {"0": "1:4", "2": "dense"}
    better = confirm(chosen, wrong, net, DATA, progress=False)
    assert set(dict(better.chosen).values()) == {"2:4"} and better.budget == chosen.budget
    figures = dict(better.judged)
    # 1:4 everywhere costs no more either, and loses most.
    assert figures["2:4"] == 0 < figures["allocated"] < figures["1:4"]
    assert "2:4 everywhere loses less than the allocation" in caplog.text and "judged on data held back" in str(better)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items()) and not masks.of(net)
    assert not masks.of(net) and better.to_dict()["judged"] == figures


def test_an_allocation_that_loses_less_stays_by_every_judge() -> None:
    right, net = records(l0=(0, 0.5, 0.7), l2=(0, 0.0, 0.5)), exact(2)
    chosen = allocate(right, Budget(density=0.75))
    target = [(DATA[0], net(DATA[0]).detach())]
    asked: list[bool] = []

    def evaluate(model: nn.Module) -> float:
        asked.append(model.training)
        return -float((model(DATA[0]) - target[0][1]).square().mean())

    for data, judge in ((DATA, {}), (target, {"loss": F.mse_loss}), (DATA, {"evaluate": evaluate})):
        kept = confirm(chosen, right, net, data, progress=False, **judge)
        assert kept.chosen == chosen.chosen and kept.judged[0] == ("allocated", 0.0)
        assert all(figure > 0 for _, figure in kept.judged[1:]) and len(kept.judged) == 3
    assert asked and not any(asked)
    with pytest.raises(RecipeError, match="was not chosen from these"):
        confirm(chosen, records(l0=(0, 0.5, 0.7)), net, DATA)


def test_auto_measures_what_prune_takes_with_data(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> None:
    found = sensitivity(model, data, ("dense", "2:4"), criterion="auto", progress=False)
    chosen = allocate(found, Budget(density=0.75))
    assert found.criterion == chosen.recipe.criterion.name == "admm"
    pruned = twofour.prune(model, chosen.recipe, data=[x for x, _ in data], progress=False)
    assert {outcome.criterion for outcome in twofour.pruning.outcomes(pruned)} == {"admm"}
