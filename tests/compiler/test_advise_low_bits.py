"""advise of low bits: rows of codes beside dense floats and int8, of widths that are asked for or the model's own."""

import pytest
import torch
from torch import nn

import twofour
from twofour.errors import CompileError, QuantizationError
from twofour.kernels.bits_matmul import bits_rows


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))


def test_widths_are_measured_beside_patterns() -> None:
    model = made()
    advice = twofour.advise(model, patterns="2:4", widths=["w2a2"], tokens=(2,), skip=["2"])
    assert advice.patterns == ("2:4", "int8", "w2a2")
    rows = advice.of("0", 2)
    assert set(rows) == {"2:4", "int8", "w2a2"} and rows["w2a2"].verdict
    assert "w2a2" in advice.summary(2) and type(model[0]) is nn.Linear


def test_layers_of_low_bits_are_measured_in_their_own() -> None:
    model = twofour.quantize(made(), {"0": "w1", "*": "float"}, "a8", ends=None)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    advice = twofour.advise(model, patterns="2:4", tokens=(2,), skip=["2"])
    assert {row.pattern for row in advice.rows} == {"int8", "w1a8"} and {row.layer for row in advice.rows} == {"0"}
    assert not any(name == "0.weight" for name, _ in advice.skipped)
    row = advice.of("0", 2)["w1a8"]
    assert row.kernel in {one.name for one in bits_rows()} or row.ratio <= 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("inputs", "group", "symmetric"), [("a8", 32, False), (None, 64, True), (None, None, False)])
def test_groups_and_weights_alone_are_measured_as_they_are(inputs, group, symmetric) -> None:
    model = twofour.quantize(made(), "w4", inputs, group=group, symmetric=symmetric, ends=None, skip="2")
    advice = twofour.advise(model, patterns="2:4", tokens=(2,), skip=["2"])
    what = f"w4{inputs or ''}{f' g{group}' if group else ''}{'' if symmetric else ' zeros'}"
    row = advice.of("0", 2)[what]
    assert row.own
    assert "_groups_" in row.kernel or row.ratio <= 1


def test_convolutions_of_low_bits_say_who_measures_them() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Flatten(), nn.Linear(64, 16))
    twofour.quantize(model, "w2", "a2", ends=None)
    advice = twofour.advise(model, tokens=(1,))
    assert ("0.weight", "a convolution: twofour.compile measures it on the images of an example") in advice.skipped


def test_what_is_no_width_is_refused() -> None:
    for widths in (None, 3):
        with pytest.raises(QuantizationError, match="widths of a layer are not known"):
            twofour.advise(nn.Linear(32, 16), widths=widths)
    for text in ("w9a2", "w2", "", "a2w2", "x" * 99):
        with pytest.raises(QuantizationError, match="widths of a layer are not known"):
            twofour.advise(made(), widths=[text])


def test_widths_that_differ_by_layer_are_added_up_and_one_width_is_a_text() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    advice = twofour.advise(twofour.quantize(model, "w2", "a2", ends=8), patterns="2:4", widths="w4a8", tokens=(2,))
    assert "w2a2" in str(advice) and {"w2a2", "w8a8", "w4a8"} <= {row.pattern for row in advice.rows}


def test_groups_are_asked_for_beside_the_layers_own() -> None:
    model = twofour.quantize(made(), "w4", "a8", group=64, ends=None, skip="2")
    advice = twofour.advise(model, patterns="2:4", widths=["w4a8", "w2a8"], group=32, tokens=(2,))
    rows = advice.of("0", 2)
    assert {"int8", "w4a8 g64", "w4a8 g32", "w2a8 g32"} == set(rows)
    assert [name for name, row in rows.items() if row.own] == ["w4a8 g64"]
    uneven = twofour.advise(nn.Linear(48, 16), patterns="2:4", widths="w4a8", group=32, tokens=(2,))
    assert ("weight", "w4a8 g32: 32 does not divide its 48 inputs") in uneven.skipped
    with pytest.raises(CompileError, match="group of low bits is no number"):
        twofour.advise(made(), widths="w4a8", group=0)
    with pytest.raises(CompileError, match="`group` means nothing in float32"):
        twofour.advise(made(), group=32)


@pytest.mark.parametrize(
    ("group", "symmetric", "own"), [(32, True, "w4a8 g32"), (32, False, "w4a8 g32 zeros"), (None, True, "w4a8")]
)
def test_what_is_asked_for_and_the_layers_own_is_measured_once(group, symmetric, own) -> None:
    model = twofour.quantize(made(), "w4", "a8", group=group, symmetric=symmetric, ends=None, skip="2")
    rows = twofour.advise(model, widths="w4a8", group=32, tokens=(1,)).rows
    assert [row.pattern for row in rows if row.layer == "0"] == list(dict.fromkeys(("int8", own, "w4a8 g32")))
    assert [row.pattern for row in rows if row.own] == [own]


def test_a_mix_of_widths_is_added_up_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    advice = twofour.advise(twofour.quantize(model, "w2", "a2", ends=8), patterns="2:4", tokens=(2,))
    own = {row.layer: row for row in advice.rows if row.own}
    assert {name: row.pattern for name, row in own.items()} == {"0": "w8a8", "2": "w2a2", "4": "w8a8"}
    dense, mix = sum(row.dense_ms for row in own.values()), sum(row.sparse_ms for row in own.values())
    assert advice.total_of_own(2) == (dense, mix) and advice.total_of_own(3) is None
    assert f"; the layers of low bits, each in its own: {mix:.3f} ms ({dense / mix:.2f}x)" in advice.summary(2)
    assert "low bits" not in twofour.advise(made(), patterns="2:4", widths="w2a2", tokens=(2,)).summary(2)
