"""permute: outputs stay, what goes wrong is undone, and what it cannot do says so."""

import logging

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.structure.network_plans import plan
from tests.turns import in_turn
from twofour.errors import LayerError, PatternError, PermutationError, RecipeError
from twofour.measure.distance import largest_difference
from twofour.structure import permutation
from twofour.structure.coupling import Place
from twofour.structure.permutation.comparison import Arithmetic, require_same

transformers = pytest.importorskip("transformers", reason="needs the extra [text]")


@pytest.mark.parametrize("named", [False, True])
def test_a_model_that_answers_with_its_cache_is_told_to_leave_it_out(named: bool) -> None:
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=8)
    model, ids = transformers.GPT2LMHeadModel(config).eval(), torch.arange(8).view(2, 4)
    remedy = r'try +leave the cache .*example=\{"input_ids": ids, "use_cache": False\}'
    with pytest.raises(PermutationError, match=remedy):
        permutation.permute(model, {"input_ids": ids} if named else ids, plan(model), escapes=0)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


class Deceptive(Tiny):
    """What its graph shows is not what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x).relu())
        return y if torch.compiler.is_exporting() else self.b(self.a(x).relu() * torch.arange(32))


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_model_that_computes_something_else_afterwards_is_put_back() -> None:
    torch.manual_seed(0)
    model = Deceptive()
    before = state(model)
    with pytest.raises(PermutationError, match="changed what the model computes; everything was put back"):
        permutation.permute(model, torch.randn(4, 16), plan(model))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_interruption_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Tiny(), Tiny())
    before = state(model)
    searches = []

    def interrupted(*args: object, **options: object) -> permutation.Permutation:
        searches.append(args)
        if len(searches) == 2:
            raise KeyboardInterrupt
        return permutation.search(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("twofour.structure.permutation.channels.search", interrupted)
    with pytest.raises(KeyboardInterrupt):
        permutation.permute(model, torch.randn(4, 16), plan(model))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_interruption_between_two_tensors_of_a_group_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Tiny(), Tiny())
    before, moves, moved = state(model), [], Place.moved

    def interrupted(place: Place, tensor: Tensor, orders: Tensor) -> Tensor:
        moves.append(place)
        if len(moves) == 2:
            raise KeyboardInterrupt
        return moved(place, tensor, orders)

    monkeypatch.setattr(Place, "moved", interrupted)
    with pytest.raises(KeyboardInterrupt):
        permutation.permute(model, torch.randn(4, 16), plan(model))
    assert len(moves) == 3  # one moved, one not, one put back
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_each_output_is_held_to_its_own_dtype() -> None:
    coarse, fine = torch.ones(3, dtype=torch.bfloat16), torch.ones(3)
    few = Arithmetic(2, 64)

    def exactly() -> tuple[list[Tensor], list[Tensor]]:
        raise MemoryError("no room")

    assert require_same([coarse, fine], [coarse * 1.01, fine], few, exactly) == pytest.approx(0.01, rel=0.3)
    with pytest.raises(PermutationError, match=r"differs by 1.00e-02[\s\S]*at most 1e-05"):
        require_same([coarse, fine], [coarse, fine * 1.01], few, exactly)
    assert require_same([fine], [fine + 3e-5], Arithmetic(36, 1536), exactly) == pytest.approx(3e-5, rel=0.01)


def test_a_difference_that_is_not_obviously_rounding_is_judged_in_float64() -> None:
    fine, exact = torch.ones(3), torch.ones(3, dtype=torch.float64)
    few = Arithmetic(2, 64)
    assert require_same([fine], [fine + 3e-5], few, lambda: ([exact], [exact])) == pytest.approx(3e-5, rel=0.01)
    with pytest.raises(PermutationError, match=r"differs by 3.00e-05[\s\S]*at most 1e-06, computed in float64"):
        require_same([fine], [fine + 3e-5], Arithmetic(36, 1536), lambda: ([exact], [exact + 3e-5]))


class Amplified(nn.Module):
    """What its last layer answers is a difference of nearly equal numbers, and its norm rounds to float32."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny, self.scale = Tiny(), nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.tiny(x)
        y = (y.to(torch.float32) * self.scale.to(torch.float32)).to(y.dtype)
        return (y + 1000) - 1000


def test_a_model_that_rounds_much_is_no_false_alarm() -> None:
    torch.manual_seed(0)
    model, x = Amplified(), torch.randn(1024, 16)
    report = permutation.permute(model, x, plan(model))
    assert report.error > 1e-5, "the float32 outputs differ by more than the tolerance"


@in_turn(
    ("old", "new", "wanted"),
    [
        ([2.0, 1.0], [2.0, 1.5], 0.25),
        ([2.0, -torch.inf], [2.0, -torch.inf], 0.0),
        ([2.0, -torch.inf], [1.0, -torch.inf], 0.5),
        ([2.0, 1.0], [2.0, torch.nan], torch.inf),
        ([2.0, 1.0], [2.0, torch.inf], torch.inf),
        ([0.0, 0.0], [0.0, 0.5], 0.5),
    ],
)
def test_the_difference_of_outputs_sees_nan_and_infinity(old: list, new: list, wanted: float) -> None:
    good = torch.ones(3)
    assert largest_difference([torch.tensor(new), good], [torch.tensor(old), good]) == wanted


def test_a_report_undoes_it_once() -> None:
    torch.manual_seed(0)
    model = Tiny()
    before = state(model)
    report = permutation.permute(model, torch.randn(4, 16), plan(model))
    assert not torch.equal(model.a.weight, before["a.weight"])
    report.undo()
    report.undo()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_given_scores_are_searched_by_and_move_along() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    scores = {weight.name: torch.rand_like(weight.parameter) for weight, _ in plan(model)}
    report = permutation.permute(model, torch.randn(4, 16), plan(model), scores=scores)
    assert report.scores_after > report.scores_before + 0.01
    assert report.scores_before != pytest.approx(report.magnitude_before)


def test_a_model_that_cannot_be_captured_says_why() -> None:
    class Branch(Tiny):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x

    model = Branch()
    with pytest.raises(PermutationError, match="prune without permute=True"):
        permutation.permute(model, torch.ones(4, 16), plan(model))


@pytest.mark.parametrize("example", [torch.zeros(4, 5), {"pixels": torch.zeros(4, 16)}])
def test_an_example_that_the_model_does_not_run_on_says_so(example: object) -> None:
    with pytest.raises(PermutationError, match="the model does not run on the example"):
        permutation.permute(Tiny(), example, plan(Tiny()))


def test_data_that_are_missing_are_asked_for_before_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "permute", None)
    with pytest.raises(RecipeError, match="needs calibration data"):
        twofour.prune(Tiny(), "2:4", criterion="wanda", permute=True, example=torch.randn(4, 16))


def test_weights_of_another_model_are_refused() -> None:
    with pytest.raises(LayerError, match=r"layer `a.weight`: the weight is not a parameter of the model"):
        permutation.permute(Tiny(), torch.ones(4, 16), plan(Tiny()))


def test_a_weight_that_cannot_be_ranked_is_named() -> None:
    model = Tiny()
    with torch.no_grad():
        model.b.weight[3, 5] = torch.nan
    with pytest.raises(PatternError, match=r"layer `b.weight`: (?s:.)*NaN"):
        twofour.prune(model, "2:4", eligibility="any", permute=True, example=torch.randn(4, 16))


def test_masks_would_be_left_behind() -> None:
    model = twofour.prune(Tiny(), "2:4", eligibility="any")
    with pytest.raises(PermutationError, match="a mask would be left behind"):
        permutation.permute(model, torch.ones(4, 16), plan(model))
    with pytest.raises(LayerError, match="a model that carries masks cannot be permuted"):
        twofour.prune(model, "2:4", eligibility="any", permute=True, example=torch.ones(4, 16))


def test_prune_permutes_first_and_reports() -> None:
    torch.manual_seed(0)
    plain, better = Tiny(), Tiny()
    better.load_state_dict(plain.state_dict())
    twofour.prune(plain, "2:4", eligibility="any")
    twofour.prune(better, "2:4", eligibility="any", permute=True, example=torch.randn(4, 16))
    report = twofour.pruning.permutation_report(better)
    assert report is not None and twofour.pruning.permutation_report(plain) is None
    assert better.b.weight.abs().sum() > plain.b.weight.abs().sum() * 1.01
    kept = sum(weight.abs().sum().item() for weight in (better.a.weight, better.b.weight))
    total = sum(plain_.abs().sum().item() for plain_ in (plain.a.weight, plain.b.weight))
    assert kept / total == pytest.approx(report.magnitude_after / report.magnitude_before, rel=1e-6)
    assert twofour.check(better).ok


def test_a_mask_that_cannot_be_attached_undoes_the_permutation(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise twofour.errors.MaskError("no mask today", got="a test", wanted="a refusal", remedy="none")

    torch.manual_seed(0)
    model = Tiny()
    monkeypatch.setattr(twofour.masks, "attach_all", refuse)
    before = state(model)
    with pytest.raises(twofour.errors.MaskError):
        twofour.prune(model, "2:4", eligibility="any", permute=True, example=torch.randn(4, 16))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_pattern_that_is_not_searched_for_says_so() -> None:
    model = Tiny()
    report = permutation.permute(model, torch.randn(4, 16), plan(model, "16:2:8"))
    assert [gain.reason for gain in report.groups] == ["no order is searched for the pattern 16:2:8"]


def test_with_data_the_criterion_is_searched_by() -> None:
    """Inputs of uneven size: an order that suits Wanda's scores, from data that can be walked once."""
    torch.manual_seed(0)
    make, scale = (lambda: nn.Sequential(Tiny(), nn.ReLU(), Tiny())), torch.linspace(0.1, 4, 16)
    plain, better = make(), make()
    better.load_state_dict(plain.state_dict())
    batches = [torch.randn(64, 16) * scale for _ in range(3)]
    twofour.prune(plain, "2:4", criterion="wanda", eligibility="any", data=batches)
    once = iter(batches)
    twofour.prune(better, "2:4", criterion="wanda", eligibility="any", data=once, permute=True, example=batches[0])
    report = twofour.pruning.permutation_report(better)
    assert report is not None and report.scores_after > report.scores_before + 0.005
    assert report.scores_before != pytest.approx(report.magnitude_before)
    errors = [sum(outcome.error or 0.0 for outcome in twofour.pruning.outcomes(model)) for model in (plain, better)]
    assert errors[1] < errors[0]


def test_criteria_without_data_are_searched_by_magnitude() -> None:
    model = Tiny()
    twofour.prune(model, "2:4", criterion="random", eligibility="any", permute=True, example=torch.randn(4, 16))
    report = twofour.pruning.permutation_report(model)
    assert report is not None and report.scores_after == report.magnitude_after


@pytest.mark.parametrize("example", [torch.full((4, 16), float("nan")), torch.zeros(0, 16)], ids=["nan", "empty"])
def test_an_example_that_shows_nothing_proves_nothing(example: Tensor) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PermutationError, match="does not show whether"):
        twofour.prune(model, "2:4", eligibility="any", permute=True, example=example)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_order_that_loses_more_on_data_held_back_is_put_back(caplog: pytest.LogCaptureFixture) -> None:
    """Loud weights on silent inputs: by magnitude they are worth dropping two of the six that matter."""
    loud, wanted, spare = (2.0, 0.01), (1.0, 10.0), (0.0, 1.0)
    caplog.set_level(logging.INFO, logger="twofour.pruning")  # no fault, so no warning
    channels = [*[loud] * 4, *[wanted, wanted, spare, spare] * 3]
    sizes, scales = (torch.tensor(column) for column in zip(*channels, strict=True))

    def net() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 8, bias=False))
        signs = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).sign()
        with torch.no_grad():
            model[0].weight.copy_(torch.diag(scales))
            model[1].weight.copy_(signs * sizes)
        return model

    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(1))
    options = {"criterion": "magnitude", "data": [x], "samples": 50}
    pruned = twofour.prune(net(), {"1": "2:4", "*": "dense"}, permute=True, **options)
    report = twofour.pruning.permutation_report(pruned)
    assert report is not None and report.judged is not None and not report.kept
    assert report.judged[0] < 0.01 < report.judged[1] and report.magnitude_after > report.magnitude_before
    assert "judged on 10 samples held back" in caplog.text and "put back" in caplog.text
    plain = twofour.prune(net(), {"1": "2:4", "*": "dense"}, **options)
    assert all(torch.equal(*pair) for pair in zip(plain.parameters(), pruned.parameters(), strict=True))
    assert torch.equal(twofour.masks.of(plain)["1.weight"].keep, twofour.masks.of(pruned)["1.weight"].keep)
    # By what the inputs say the same order is as good as any, and stands.
    found = twofour.pruning.permutation_report(
        twofour.prune(net(), {"1": "2:4", "*": "dense"}, permute=True, criterion="wanda", data=[x])
    )
    assert found is not None and found.judged is not None and found.kept
