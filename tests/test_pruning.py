"""Pruning from the caller's side: what becomes sparse, what is logged, what is refused and left as it was."""

import logging

import pytest
import torch
from torch import nn
from torch.nn.utils.prune import l1_unstructured

import twofour
from tests.turns import in_turn
from twofour import masks
from twofour.errors import DataError, LayerError, PatternError, PermutationError, RecipeError, TrainingError
from twofour.patterns import NM
from twofour.recipe import Recipe


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "stem": nn.Conv2d(3, 16, 3),
            "conv": nn.Conv2d(16, 16, 3, groups=1),
            "fc": nn.Linear(32, 32),
            "head": nn.Linear(32, 10),
        }
    )


def untouched(model: nn.Module, state: dict[str, torch.Tensor]) -> bool:
    return not masks.of(model) and all(
        torch.equal(value.nan_to_num(), state[name].nan_to_num()) for name, value in model.state_dict().items()
    )


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_the_two_largest_of_four_input_channels_stay() -> None:
    model = network()
    before = copied(model)
    assert twofour.prune(model, "2:4") is model
    for name in ("conv.weight", "fc.weight"):
        old, new = before[name], model.state_dict()[name]
        groups = old.reshape(old.shape[0], -1, 4, *old.shape[2:])
        ranks = groups.abs().argsort(dim=2, descending=True, stable=True).argsort(dim=2)
        assert torch.equal(new, torch.where(ranks < 2, groups, 0.0).reshape(old.shape))
    for name in before.keys() - {"conv.weight", "fc.weight"}:
        assert torch.equal(before[name], model.state_dict()[name])
    assert list(masks.of(model)) == ["conv.weight", "fc.weight"]


def test_what_stays_dense_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "twofour.pruning"):
        twofour.prune(network(), "2:4", skip=["conv"])
    assert [record.getMessage() for record in caplog.records] == [
        "`stem.weight` stays dense: in_channels 3 is not a multiple of 16 (ASP's rule)",
        "`conv.weight` stays dense: left out by skip='conv'",
        "`head.weight` stays dense: out_features 10 is not a multiple of 8 (ASP's rule)",
        twofour.pruning.WITHOUT_DATA,
        "criterion: magnitude (the best of one shot without data; criterion= names another)",
        "pruned 1 weights to 2:4: 1,024 values under a mask; 3 parameters with two or more axes stay dense",
    ]


def test_rules_recipes_and_eligibility() -> None:
    model = twofour.prune(network(), {"fc": "1:4", "head": NM(2, 4), "*": "dense"}, eligibility="any")
    assert {name: str(mask.pattern) for name, mask in masks.of(model).items()} == {
        "fc.weight": "1:4",
        "head.weight": "2:4",
    }
    assert (model["fc"].weight != 0).float().mean() == 0.25
    model = twofour.prune(network(), Recipe.parse("4:8", skip=["fc"]))
    assert list(masks.of(model)) == ["conv.weight"]


@in_turn("pattern", ["2:4", "1:2", "1:4", "4:8", "8:16", "4:8-pairs"])
def test_every_pattern_prunes_every_kind_of_layer(pattern: str) -> None:
    model = twofour.prune(nn.ModuleList([nn.Linear(32, 8), nn.Conv1d(16, 8, 3), nn.Conv2d(16, 8, 2)]), pattern)
    chosen = twofour.patterns.parse(pattern)
    for mask in masks.of(model).values():
        weight = getattr(mask.module, mask.attribute)
        assert chosen.check(weight.movedim(1, -1)).ok
        assert (weight != 0).float().mean() == mask.density == chosen.density


def test_pruning_again_is_idempotent_and_may_be_stricter() -> None:
    model = twofour.prune(network(), "2:4")
    once = copied(model)
    twofour.prune(model, "2:4")
    assert all(torch.equal(value, once[name]) for name, value in model.state_dict().items())
    twofour.prune(model, "1:4")
    assert (model["fc"].weight != 0).float().mean() == 0.25


def test_the_same_model_gives_the_same_masks() -> None:
    left, right = twofour.prune(network(), "2:4"), twofour.prune(network(), "2:4")
    for name, mask in masks.of(left).items():
        assert torch.equal(mask.keep, masks.of(right)[name].keep)


@pytest.mark.parametrize("layout", ["transposed", "strided", "channels-last", "expanded"])
def test_weights_that_are_not_contiguous(layout: str) -> None:
    torch.manual_seed(0)
    layer: nn.Module = nn.Linear(32, 32)
    values = {
        "transposed": lambda: torch.randn(32, 32).t(),
        "strided": lambda: torch.randn(64, 64)[::2, 1::2],
        "expanded": lambda: torch.randn(1, 32).expand(32, 32).clone(memory_format=torch.preserve_format),
    }
    if layout == "channels-last":
        layer = nn.Conv2d(16, 16, 3).to(memory_format=torch.channels_last)
    else:
        layer.weight = nn.Parameter(values[layout]())
    plain = type(layer)(16, 16, 3) if layout == "channels-last" else nn.Linear(32, 32)
    with torch.no_grad():
        plain.weight.copy_(layer.weight)
        plain.bias.copy_(layer.bias)
    stride = layer.weight.stride()
    twofour.prune(layer, "2:4")
    twofour.prune(plain, "2:4")
    assert torch.equal(layer.weight, plain.weight) and layer.weight.stride() == stride
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        layer.weight.sum().backward()
        optimizer.step()
    assert NM(2, 4).check(layer.weight.movedim(1, -1)).ok


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_floating_types(dtype: torch.dtype) -> None:
    layer = twofour.prune(nn.Linear(32, 32, dtype=dtype), "2:4")
    assert layer.weight.dtype == dtype and (layer.weight != 0).float().mean() == 0.5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_named_and_nothing_changes(value: float) -> None:
    model = network()
    with torch.no_grad():
        model["fc"].weight[3, 5] = value
    before = copied(model)
    with pytest.raises(PatternError, match=r"layer `fc.weight`: .*\n  got +1 values that are NaN or inf.*\(3, 5\)"):
        twofour.prune(model, "2:4")
    assert untouched(model, before)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@in_turn(
    ("layer", "reason"),
    [
        (lambda: nn.Linear(770, 768), "`weight`: in_features 770 is not a multiple of 16"),
        (lambda: nn.Linear(0, 8), r"`weight`: shape \(8, 0\) has no values"),
        (lambda: nn.Linear(16, 0), r"`weight`: shape \(0, 16\) has no values"),
        (lambda: nn.Linear(32, 32, device="meta"), "`weight`: on the meta device"),
        (lambda: nn.Linear(32, 32, dtype=torch.complex64), "`weight`: dtype complex64"),
        (lambda: nn.Embedding(16, 16), "`weight`: an embedding"),
        (lambda: nn.ReLU(), "the model has no parameter with two or more axes"),
    ],
    ids=["k", "no-inputs", "no-outputs", "meta", "complex", "embedding", "empty"],
)
def test_nothing_to_prune_lists_the_reasons(layer, reason: str) -> None:
    with pytest.raises(LayerError, match=r"nothing in the model can be pruned\n  reason  .*" + reason.lstrip("`")):
        twofour.prune(layer(), "2:4")


def test_integer_weights() -> None:
    model = network()
    model["fc"].weight = nn.Parameter(torch.ones(32, 32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(LayerError, match=r"the rule 'fc' asks for 2:4.*\n  reason  `fc.weight`: dtype int8"):
        twofour.prune(model, {"fc": "2:4", "*": "2:4"})
    assert list(masks.of(twofour.prune(model, "2:4"))) == ["conv.weight"]


@in_turn(
    ("pattern", "options", "error", "message"),
    [
        ("2-4", {}, PatternError, "the text is not a sparsity pattern"),
        ("4:2", {}, PatternError, "impossible"),
        ("block:16x16", {}, PatternError, "block:RxC@S"),
        ("2:4", {"permute": True}, RecipeError, "permute=True without an example"),
        ("2:4", {"example": torch.ones(1)}, RecipeError, "permute=False with an example"),
        ("2:4", {"criterion": "sparsegpt"}, RecipeError, 'criterion "sparsegpt" needs calibration data'),
        ("2:4", {"skip": ["tail"]}, LayerError, "matches no layer"),
        ({"tail": "2:4"}, {}, RecipeError, "matches no layer"),
        (None, {}, PatternError, "must be text or a Pattern"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_changes(pattern, options, error, message: str) -> None:
    model = network()
    before = copied(model)
    with pytest.raises(error, match=message):
        twofour.prune(model, pattern, **options)
    assert untouched(model, before)


def test_a_pruned_weight_torch_masked_already_is_refused() -> None:
    model = network()
    l1_unstructured(model["fc"], "weight", amount=0.5)
    twofour.prune(model, "2:4")
    assert list(masks.of(model)) == ["conv.weight"]


def test_a_second_pruning_says_how_to_start_anew(caplog) -> None:
    model = network()
    dense = copied(model)
    twofour.prune(model, "2:4")
    assert "start anew" not in caplog.text
    twofour.prune(model, "1:4")
    assert "start anew" not in caplog.text, "a sparser pattern goes on from the first"
    twofour.prune(model, "2:4", criterion="random")
    assert caplog.text.count("1:4 already, and 2:4 makes nothing denser") == 1 and "and 1 more" in caplog.text
    assert "start anew call twofour.masks.detach(model) and load the dense weights" in caplog.text
    caplog.clear()
    masks.detach(model)
    model.load_state_dict(dense)
    twofour.prune(model, "2:4", criterion="random")
    assert "start anew" not in caplog.text and twofour.check(model).ok
    twofour.prune(model, "2:4")
    assert caplog.text.count("the criterion has nothing to choose; values are left as they are; to start") == 1


@pytest.mark.parametrize("masked", [True, False])
def test_dense_groups_of_a_weight_that_is_2_4_already_are_said_to_be_zeros(masked: bool, caplog) -> None:
    """The mask has a quarter of the groups open, in which what 2:4 took away is still zero: training may fill it."""
    model = twofour.prune(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "2:4", criterion="magnitude")
    before = model[0].weight.detach().clone()
    if not masked:
        masks.detach(model)
    caplog.clear()
    twofour.prune(model, "2:4+25%", criterion="magnitude")
    assert torch.equal(model[0].weight, before) and int(masks.of(model)["0.weight"].keep.sum()) == 64 * 64 * 5 // 8
    words = "`0.weight` and 1 more: 2:4 already, and 2:4+25% makes nothing denser: what was pruned is gone, and zeros"
    assert words in caplog.text and "load the dense weights again" in caplog.text
    found = twofour.check(model)
    assert found.ok and found.layers[0].verdict == "2:4+25% kept: it is 2:4, without dense groups"
    caplog.clear()
    dense = twofour.prune(nn.Linear(64, 64), "2:4+25%", criterion="magnitude")
    assert "already" not in caplog.text and twofour.check(dense).layers[0].verdict == "2:4+25% kept"


def test_without_a_pattern_it_is_2_4() -> None:
    model = twofour.prune(nn.Linear(32, 32), data=[torch.randn(64, 32)], reconstruct=False)
    assert {mask.pattern for mask in masks.of(model).values()} == {NM(2, 4)}
    with pytest.raises(PatternError, match="must be text or a Pattern"):
        twofour.prune(nn.Linear(32, 32), [torch.randn(64, 32)])  # type: ignore[arg-type]


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(LayerError, match="no model to prune"):
        twofour.prune("model", "2:4")  # type: ignore[arg-type]


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, a, b):
        return self.down(torch.relu(self.up(a + b)))


def test_data_without_a_target_are_read_once_under_permute() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 12, 16)
    found = []
    for item in ((x, y), ((x, y), None), {"a": x, "b": y}):
        torch.manual_seed(1)
        model = twofour.prune(Sum(), "2:4", criterion="wanda", data=[item], permute=True, example=(x, y))
        found.append(copied(model))
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in found[0])


def test_the_first_of_the_data_is_the_example_where_none_is_given() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 12, 16)
    found = []
    for item in (iter([(x, y)]), [[x, y]], [({"a": x, "b": y}, None)]):
        torch.manual_seed(1)
        model = twofour.prune(Sum(), "2:4", data=item, permute=True)
        assert twofour.pruning.permutation_report(model) is not None
        found.append(copied(model))
    torch.manual_seed(1)
    found.append(copied(twofour.prune(Sum(), "2:4", data=[(x, y)], permute=True, example=(x, y))))
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in found[0])


@pytest.fixture
def one_process(tmp_path):
    dist = torch.distributed
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch lacks gloo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_sharded_weights_are_refused_before_any_work(one_process, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    fully_shard(model)
    x = torch.randn(8, 16)
    calls = []
    monkeypatch.setattr(nn.Linear, "forward", lambda *_: calls.append(1))

    def never():
        calls.append(1)
        yield x

    for options, error, message in (
        ({"criterion": "wanda", "data": never()}, DataError, "calibration of sharded weights is planned"),
        ({"criterion": "wanda", "data": never(), "permute": True}, DataError, "calibration of sharded weights"),
        ({"permute": True}, PermutationError, "channels of a sharded weight cannot be permuted"),
    ):
        example = {"example": x} if "permute" in options else {}
        with pytest.raises(error, match=message):
            twofour.prune(model, "2:4", **options, **example)
    assert not calls and not masks.of(model)


@pytest.mark.parametrize(
    ("attach", "title"),
    [
        (twofour.training.sr_ste.attach, "SR-STE on `conv`, `fc`"),
        (twofour.training.s_ste.attach, "S-STE on `conv`, `fc`"),
        (lambda model: twofour.training.gradual.attach(model, "1:4", end=2), "gradual pruning on `conv`, `fc`"),
        (lambda model: twofour.training.lora.attach(twofour.prune(model, "2:4")), "LoRA on `conv`, `fc`"),
        (lambda model: twofour.quantization.attach(twofour.prune(model, "2:4")), "quantisation-aware training on `fc`"),
    ],
)
def test_a_model_under_a_training_scheme_is_refused_until_it_is_finished(attach, title: str) -> None:
    model = network()
    scheme = attach(model)
    before = copied(model)
    message = rf"cannot be pruned\n  got +{title}\n  wanted +a plain model\n  try +end it first: finish\(\)"
    with pytest.raises(LayerError, match=message):
        twofour.prune(model, "2:4")
    with pytest.raises(TrainingError, match=rf"something is attached.*\n  got +{title}"):
        twofour.training.sr_ste.attach(model, "2:4")
    with pytest.raises(LayerError, match=rf"measured on the dense model\n  got +{title}"):
        twofour.allocation.sensitivity(model, torch.randn(2, 32))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    twofour.prune(scheme.finish(), "2:4")
    assert twofour.check(model).ok


def test_a_scheme_that_is_gone_or_removed_holds_nothing() -> None:
    model = network()
    twofour.training.gradual.attach(model, "2:4", end=1)  # nobody keeps it
    assert twofour.check(twofour.prune(model, "2:4")).ok
    twofour.training.gradual.attach(network(), "2:4", end=1)
    dense = network()
    scheme = twofour.training.sr_ste.attach(dense, "2:4")
    scheme.remove()
    assert twofour.check(twofour.prune(dense, "2:4")).ok


@pytest.mark.parametrize("given", ["yes", 1, None])
def test_permute_is_a_truth_value(given: object) -> None:
    with pytest.raises(RecipeError, match=r"`permute` is neither True nor False"):
        twofour.prune(nn.Sequential(nn.Linear(64, 64)), "2:4", permute=given, example=torch.ones(1, 64))  # type: ignore[arg-type]
