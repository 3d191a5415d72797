"""The plan of a cut: its JSON, what is refused of it, and surgery that is whole or not done."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import twofour
from tests.structure.shrink.networks import IMAGE, made
from tests.turns import in_turn
from twofour import masks, pruning
from twofour.errors import ShrinkError
from twofour.structure import shrink
from twofour.structure.shrink import AttributeCut, AxisCut, Cut
from twofour.structure.shrink.cut import numbers, runs
from twofour.structure.shrink.layers import renamed

PLAN = Cut(
    (AxisCut(8, (0, 1, 2, 5), (("a.weight", 0), ("b.weight", 1))), AxisCut(3, (1,), (("a.weight", 1),))),
    (AttributeCut("attention", "heads", 8, 4),),
    ("layers.1",),
    ("c",),
)


PLACES = (("a", 0),)


def test_the_plan_travels_as_json() -> None:
    text = PLAN.to_text()
    assert Cut.from_text(text) == PLAN
    assert json.loads(text)["axes"][0] == {"size": 8, "kept": "0-2,5", "places": [["a.weight", 0], ["b.weight", 1]]}
    assert Cut.from_text(Cut().to_text()) == Cut()


@given(st.sets(st.integers(0, 40), min_size=1))
@settings(max_examples=30, deadline=None)
def test_positions_come_back(chosen: set[int]) -> None:
    kept = tuple(sorted(chosen))
    assert numbers(runs(kept), 41) == kept


@in_turn(
    ("change", "message"),
    [
        ({"version": 2}, "another version"),
        ({"version": True}, "another version"),
        ({"axes": 3}, "`axes` as a int"),
        ({"more": 1}, "unknown part 'more'"),
        ({"axes": [{"size": 8, "kept": "0-8", "places": [["a", 0]]}]}, "axis of 8"),
        ({"axes": [{"size": 8, "kept": "3,2", "places": [["a", 0]]}]}, "axis of 8"),
        ({"axes": [{"size": 8, "kept": "1,1", "places": [["a", 0]]}]}, "axis of 8"),
        ({"axes": [{"size": 8, "kept": "", "places": [["a", 0]]}]}, "the positions ''"),
        ({"axes": [{"size": 8, "kept": "0-²", "places": [["a", 0]]}]}, "the positions"),
        ({"axes": [{"size": 10**12, "kept": "0", "places": [["a", 0]]}]}, "positions"),
        ({"axes": [{"size": 8, "kept": "0", "places": [["a", True]]}]}, "the places"),
        ({"axes": [{"size": 8, "kept": "0", "places": []}]}, "the places"),
        ({"axes": [{"size": 8, "kept": [1], "places": [["a", 0]]}]}, "the positions"),
        ({"axes": [{"size": 1 << 26, "kept": f"0-{(1 << 26) - 1}", "places": [["a", 0]]}]}, "too large"),
        ({"axes": [{"size": 1 << 21, "kept": "0-2097151", "places": [[f"{i}", 0]]} for i in range(3)]}, "too large"),
        ({"attributes": [["m", "heads", 4]]}, "the attribute"),
        ({"axes": 2 * [{"size": 8, "kept": "0", "places": [["a", 0]]}]}, "twice"),
        ({"attributes": [["m", "heads", 4, 8]]}, "the attribute"),
        ({"attributes": [["m", "training", True, True]]}, "the attribute"),
        ({"layers": [""]}, "'' in `layers`"),
        ({"layers": ["a", "a"]}, "twice"),
        ({"biases": [1]}, "1 in `biases`"),
    ],
)
def test_malformed_plans_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ShrinkError, match=message):
        Cut.from_dict({**PLAN.to_dict(), **change})


@in_turn(
    ("make", "message"),
    [
        (lambda: AxisCut(8, (3, 1), PLACES), "positions"),
        (lambda: AxisCut(8, (1, 1), PLACES), "positions"),
        (lambda: AxisCut(8, (-1, 2), PLACES), "positions"),
        (lambda: AxisCut(8, (0, 8), PLACES), "positions"),
        (lambda: AxisCut(8, (), PLACES), "positions"),
        (lambda: AxisCut(8, (False, True), PLACES), "positions"),
        (lambda: AxisCut(8, ("a", 1), PLACES), "positions"),  # type: ignore[arg-type]
        (lambda: AxisCut(8, None, PLACES), "positions"),  # type: ignore[arg-type]
        (lambda: AxisCut(8, (0,), 3), "the places"),  # type: ignore[arg-type]
        (lambda: Cut(layers=None), "None as `layers`"),  # type: ignore[arg-type]
        (lambda: Cut(axes=(3,)), r"\(3,\) as `axes`"),  # type: ignore[arg-type]
        (lambda: Cut(attributes=PLACES), "as `attributes`"),  # type: ignore[arg-type]
        (lambda: Cut(biases="c"), "'c' as `biases`"),  # type: ignore[arg-type]
        (lambda: AxisCut(0, (0,), PLACES), "an axis of 0"),
        (lambda: AxisCut(8, (0,), ()), "the places"),
        (lambda: AxisCut(8, (0,), (("a", -1),)), "the places"),
        (lambda: AttributeCut("m", "heads", 2, 4), "the attribute"),
        (lambda: Cut((AxisCut(8, (0,), PLACES), AxisCut(8, (1,), PLACES))), "twice"),
        (lambda: Cut(attributes=2 * (AttributeCut("m", "heads", 4, 2),)), "twice"),
        (lambda: Cut(layers=("a", "a")), "twice"),
        (lambda: Cut(layers=("",)), "in `layers`"),
    ],
)
def test_a_plan_that_no_file_could_hold_is_refused_where_it_is_made(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ShrinkError, match=message):
        make()


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 1 << 70) | st.text("0123456789-,a", max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["axes", "kept"]), inner),
    max_leaves=5,
)


@given(st.sampled_from(["size", "kept", "places", "axes", "attributes", "layers", "biases", "version"]), ANY)
@settings(max_examples=200, deadline=None)
def test_a_part_of_anything_is_refused_or_comes_back(key: str, part: Any) -> None:
    axis = {"size": 8, "kept": "0-2,5", "places": [["a", 0]]}
    told = {"version": 1, "axes": [axis | {key: part}] if key in axis else [axis]} | (
        {} if key in axis else {key: part}
    )
    try:
        plan = Cut.from_dict(told)
    except ShrinkError as error:
        assert error.got and error.wanted
    else:
        assert Cut.from_text(plan.to_text()) == plan


def test_what_is_no_json_is_refused() -> None:
    for text in ("{", "[]", "[" * 100_000):
        with pytest.raises(ShrinkError, match="the plan of the cut"):
            Cut.from_text(text)


@in_turn(
    ("plan", "name", "message"),
    [
        (Cut((AxisCut(16, (0,), (("gone.weight", 0),)),)), "gone.weight", "which the model lacks"),
        (Cut((AxisCut(9, (0,), (("gate.weight", 0),)),)), "gate.weight", r"axis 0 of \(16, 12\)"),
        (Cut((AxisCut(16, (0,), (("gate.weight", 2),)),)), "gate.weight", "axis 2 of"),
        (Cut(attributes=(AttributeCut("conv.0", "groups", 2, 1),)), "conv.0", "`groups` = 1 in the model"),
        (Cut(attributes=(AttributeCut("conv.9", "groups", 2, 1),)), "conv.9", "which the model lacks"),
        (Cut(attributes=(AttributeCut("conv.0", "training", 1, 1),)), "conv.0", "`training` = False"),
        (Cut(layers=("conv",)), "conv", "a part of a Squeeze"),
        (Cut(layers=("gone.1",)), "gone.1", "a module that the model lacks"),
        (Cut(biases=("gate",)), "gate", "a bias"),
        ("plan", None, "the plan is none"),
    ],
)
def test_plans_of_another_model_are_refused_by_name(plan: Any, name: str | None, message: str) -> None:
    model, _ = made("squeeze")
    with pytest.raises(ShrinkError, match=message) as caught:
        shrink.cut(model, plan)
    assert caught.value.layer == name


def test_a_plan_that_takes_a_layer_apart_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    norm = [(f"1.{name}", 0) for name in ("weight", "bias", "running_mean", "running_var")]
    places = [("0.weight", 0), ("0.bias", 0), *norm, ("3.weight", 1)]
    for left, layer in (("0.bias", "0"), ("1.running_var", "1")):
        plan = Cut((AxisCut(8, (0, 1, 2, 5), tuple(place for place in places if place[0] != left)),))
        with pytest.raises(ShrinkError, match=f"all of `{left[2:]}`") as caught:
            shrink.cut(model, plan)
        assert caught.value.layer == layer
    shifted = Cut((AxisCut(8, (0, 1), tuple(places[:1])), AxisCut(8, (2, 3), tuple(places[1:]))))
    with pytest.raises(ShrinkError, match="0-1 of `weight`, 2-3 of `bias`"):
        shrink.cut(model, shifted)
    assert shrink.cut(model, Cut((AxisCut(8, (0, 1, 2, 5), tuple(places)),)))(IMAGE).shape[1] == 4


@pytest.mark.parametrize("kept", [5, None, ["gate.weight:0"], {"gate.weight:0": 5}, {"gate.weight:0": "01"}])
def test_a_choice_of_channels_that_is_none_is_refused(kept: Any) -> None:
    model, example = made("squeeze")
    with pytest.raises(ShrinkError, match="the channels that are to stay are impossible"):
        shrink.channels(model, example).plan(kept)


def test_places_that_a_pooling_leaves_are_no_channels() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8 * 9, 4))
    found = shrink.channels(model, IMAGE)
    assert [group.name for group in found.groups] == ["0.weight:0"]
    assert [uncut.names[0] for uncut in found.uncut] == ["0.weight", "3.weight"], "the model's inputs and outputs"


def test_masked_weights_are_refused() -> None:
    model, example = made("squeeze")
    found = shrink.channels(model, example)
    plan = found.plan({"gate.weight:0": range(8)})
    pruning.prune(model, "1:2", skip=["conv*", "squeeze", "excite"])
    with pytest.raises(ShrinkError, match="a masked or sharded weight cannot be cut"):
        shrink.cut(model, plan)
    masks.detach(model)
    shrink.cut(model, plan)


def test_a_failure_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = made("mobilenet")
    found = shrink.channels(model, example)
    plan = found.plan({group.name: range(4) for group in found.groups})
    before = {key: value.clone() for key, value in model.state_dict().items()}
    wanted = model(example)

    def fails(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("twofour.structure.shrink.surgery.drop", fails)
    with pytest.raises(MemoryError):
        shrink.cut(model, plan, inplace=True)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(model(example), wanted) and not shrink.cuts_of(model)


def test_layers_go_and_the_others_close_up() -> None:
    model, example = made("mobilenet")
    last: Any = model.get_submodule("features.3.parts.2")
    small: Any = shrink.cut(model, Cut(layers=("features.3",)))
    nn.init.zeros_(last[1].weight)
    nn.init.zeros_(last[1].bias)
    torch.testing.assert_close(small(example), model(example))
    assert len(small.features) == 3


def test_the_numbers_of_layers_that_move_up_follow() -> None:
    pytest.importorskip("transformers", reason="needs the extra [text]")
    model, example = made("gpt2")
    small: Any = shrink.cut(model, Cut(layers=("transformer.h.0",)))
    assert len(small.transformer.h) == 1 and small.transformer.h[0].attn.layer_idx == 0
    small(**example)


def test_layers_within_a_layer_that_moves_up_go_too() -> None:
    inner = [nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*inner)
    small: Any = shrink.cut(model, Cut(layers=("0", "1.1")))
    assert [[type(layer) for layer in block] for block in small] == [[nn.Linear, nn.Tanh], [*map(type, inner[2])]]
    assert torch.equal(small[0][0].weight, model.get_parameter("1.0.weight"))
    assert [renamed(name, ("0", "1.1")) for name in ("1", "1.0", "1.1", "1.2", "2.1", "0.2")] == [
        "0", "0.0", None, "0.1", "1.1", None
    ]  # fmt: skip


def test_cuts_add_up_and_travel_with_copies() -> None:
    model, example = made("squeeze")
    small = shrink.cut(model, shrink.channels(model, example).plan({"gate.weight:0": range(8)}))
    again = shrink.channels(small, example)
    smaller = shrink.cut(small, again.plan({"gate.weight:0": [0, 7], "squeeze.weight:0": [1]}))
    assert [len(plan.axes) for plan in shrink.cuts_of(smaller)] == [1, 2]
    fresh, _ = made("squeeze")
    for plan in shrink.cuts_of(smaller):
        fresh = shrink.cut(fresh, Cut.from_text(plan.to_text()))
    fresh.load_state_dict(smaller.state_dict())
    assert torch.equal(fresh(IMAGE), smaller(IMAGE))


def test_a_bias_is_added_where_a_plan_says_so() -> None:
    model, example = made("squeeze")
    small: Any = shrink.cut(model, Cut(biases=("conv.0",)))
    assert small.conv[0].bias.shape == (12,)
    torch.testing.assert_close(small(example), model(example))


def test_constants_go_on_in_the_biases_of_what_read_them() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 6, 3, bias=False), nn.Flatten()
    ).eval()
    with torch.no_grad():
        model[1].weight[:5] = 0
        model[1].bias.uniform_(0.5, 1.5)
    plan = shrink.channels(model, IMAGE).plan({"0.weight:0": [5, 6, 7]})
    small: Any
    small, bordered = shrink.absorbed(model, plan, IMAGE)
    torch.testing.assert_close(small(IMAGE), model(IMAGE), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(shrink.cut(model, plan)(IMAGE), model(IMAGE), atol=1e-2)
    assert bordered == () and shrink.cuts_of(small)[0].biases == ("3",) and model[3].bias is None
    model[3].padding, model[3]._reversed_padding_repeated_twice = (1, 1), [1, 1, 1, 1]
    small, bordered = shrink.absorbed(model, plan, IMAGE)
    inner, outer = (net(IMAGE).view(2, 6, 6, 6)[..., 1:-1, 1:-1] for net in (small, model))
    torch.testing.assert_close(inner, outer, rtol=1e-5, atol=1e-5)
    assert bordered == ("3",)


def test_what_varies_is_not_taken_for_a_constant() -> None:
    model, example = made("squeeze")
    plan = shrink.channels(model, example).plan({"gate.weight:0": range(8)})
    small, _ = shrink.absorbed(model, plan, example)
    torch.testing.assert_close(small(example), shrink.masked(model, plan)(example))
    single, _ = shrink.absorbed(model, plan, example[:1])
    torch.testing.assert_close(single(example), small(example))


def test_a_model_under_a_training_scheme_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), torch.randn(2, 16)
    scheme = twofour.training.sr_ste.attach(model, "2:4")
    for refused in (lambda: shrink.cut(model, shrink.Cut()), lambda: twofour.shrink(model, x, 0.8)):
        with pytest.raises(ShrinkError, match="cannot be shrunk any more"):
            refused()
    scheme.remove()
    assert twofour.shrink(model, x, 0.8)[0].out_features < 32  # type: ignore[index]


class Several(nn.Module):
    """Layers of which a file could ask what they cannot have."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)
        self.b.weight = self.a.weight
        self.rows, self.conv = nn.Embedding(10, 4), nn.Conv2d(2, 2, 3)
        self.norm, self.flat = nn.BatchNorm1d(8, affine=False), nn.LayerNorm((3, 8), bias=False)


@pytest.mark.parametrize(
    ("plan", "name", "message"),
    [
        (Cut(biases=("norm",)), "norm", "no layer that could have one"),
        (Cut(biases=("flat",)), "flat", "no layer that could have one"),
        (Cut((AxisCut(8, (0, 1), (("a.weight", 1),)), AxisCut(8, (2, 3, 4), (("b.weight", 1),)))), "b.weight", "names"),
        (Cut((AxisCut(10, (0, 1), (("rows.weight", 0),)),)), "rows.weight", "rows of an embedding"),
        (Cut((AxisCut(3, (0, 1), (("conv.weight", 3),)),)), "conv.weight", "taps of a convolution"),
    ],
)
def test_what_a_layer_cannot_have_is_refused_by_its_name(plan: Cut, name: str, message: str) -> None:
    model = Several()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ShrinkError, match=message) as caught:
        shrink.cut(model, plan, inplace=True)
    assert caught.value.layer == name
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    alike = Cut((AxisCut(8, (0, 1), (("a.weight", 1), ("b.weight", 1))),))
    assert shrink.cut(model, alike).get_parameter("b.weight").shape == (4, 2)
