"""Checking: promises kept or broken, wrong axes recognised, alignment per runtime, and the report's forms."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import nn

import twofour
from tests.turns import in_turn
from twofour import checker, kernels, layers, masks, patterns
from twofour.errors import LayerError, PatternError

TWO_FOUR = patterns.parse("2:4")


def pruned(weight: torch.Tensor, axis: int, pattern: str = "2:4") -> torch.Tensor:
    """Prune along any axis, to make legal weights and wrong ones."""
    last = weight.detach().movedim(axis, -1)
    keep = patterns.parse(pattern).project(last.contiguous(), absolute=True)
    return (last * keep).movedim(-1, axis).contiguous()


def model(*, axis: int | None = 1) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(32, 64), nn.Linear(64, 10))
    if axis is not None:
        with torch.no_grad():
            for layer in (net[1], net[3]):
                layer.weight.copy_(pruned(layer.weight, axis))
    return net


def finding(report: checker.Report, name: str) -> checker.Finding:
    return next(found for found in report.layers if found.name == name)


def attach(net: nn.Module) -> None:
    for weight in layers.walk(net).weights:
        keep = TWO_FOUR.project(weight.reduction_last(weight.parameter.detach()).contiguous(), absolute=True)
        masks.attach(weight, weight.from_reduction_last(keep), TWO_FOUR)


def test_a_dense_model_is_not_ok():
    report = checker.check(model(axis=None))
    assert not report.ok
    assert [found.name for found in report.layers] == ["1.weight", "3.weight"]
    assert {found.verdict for found in report.layers} == {"dense"}
    skipped = dict(report.skipped)
    assert "not a multiple of 16" in skipped["0.weight"] and "not a multiple of 8" in skipped["4.weight"]
    assert "DENSE: nothing is sparse, and nothing was promised to be; 0 of 2 weights are sparse, 2 skipped" in str(
        report
    )


def test_a_pruned_model_is_found_sparse_without_a_promise():
    report = checker.check(model())
    assert report.ok
    for found in report.layers:
        assert found.legal and found.satisfies == ("2:4", "4:8", "8:16") and found.promised is None
        assert found.zeros == pytest.approx(0.5, abs=0.01)
        assert found.verdict == "2:4, though nothing promised it"


def test_masks_promise_and_a_broken_promise_is_located():
    net = model(axis=None)
    attach(net)
    report = checker.check(net)
    assert report.ok and all(found.kept and found.outside == 0 for found in report.layers)
    assert str(report).endswith("OK: 2 of 2 promised weights kept; 2 of 2 weights are sparse, 2 skipped")
    with torch.no_grad():
        net[3].weight[5, 8:12] = torch.tensor([0.5, 0.0, -2.0, 3.0])
        net[1].weight[7, 4:8, 2, 1] = 1.0
    report = checker.check(net)
    linear, conv = finding(report, "3.weight"), finding(report, "1.weight")
    assert not report.ok
    assert (linear.first, linear.values) == ((5, 8), (0.5, 0.0, -2.0, 3.0))
    assert conv.first == (7, 4, 2, 1)  # coordinates of the weight as stored: out, in, kernel row, kernel column
    assert linear.legal_fraction == pytest.approx(1 - 1 / (64 * 8))
    assert linear.outside and linear.verdict == "2:4 broken: 0.20% of groups, the first at (5, 8): 0.5 0 -2 3"
    assert "NOT OK: 0 of 2 promised weights kept" in str(report)


def test_values_outside_a_mask_are_told_even_when_still_legal():
    net = nn.Sequential(nn.Linear(16, 8))
    attach(net)
    with torch.no_grad():
        net[0].weight[0, :4] = net[0].weight[0, :4].flip(0).roll(1)
        net[0].weight[0, :4] = torch.where(mask_of(net)[0, :4], 0.0, 1.0)
    found = checker.check(net).layers[0]
    assert found.legal and found.outside == 2
    assert found.verdict == "2:4 broken: every group is legal, but 2 values lie outside the mask"
    assert not found.kept and not checker.check(net).ok


def test_a_zero_initialised_layer_does_not_make_a_dense_model_sparse():
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    nn.init.zeros_(net[1].weight)
    report = checker.check(net)
    assert not report.ok and not report.layers[1].sparse and report.layers[1].verdict == "every value is zero"
    assert "DENSE: nothing is sparse, and nothing was promised to be; 0 of 2 weights are sparse" in str(report)
    attach(net)
    nn.init.zeros_(net[0].weight)
    assert checker.check(net).ok  # a mask's promise is about the zeros only


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_report_with_non_finite_values_is_json(bad):
    weight = pruned(torch.randn(8, 16), 1)
    weight[2, 4:8] = torch.tensor([bad, 1.0, 2.0, 3.0])
    report = checker.check_weights({"w": weight}, expect="2:4")
    content = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert content["layers"][0]["values"] == [str(bad), 1.0, 2.0, 3.0]
    assert (content["ok"], content["layers"][0]["broken"]) == (False, 1)


def mask_of(net: nn.Module) -> torch.Tensor:
    return masks.of(net)["0.weight"].keep


def test_wrong_axis_is_recognised_for_linear_and_convolutions():
    report = checker.check(model(axis=0), expect="2:4")
    linear, conv = finding(report, "3.weight"), finding(report, "1.weight")
    assert not report.ok
    assert linear.wrong_fraction == 1.0 and linear.legal_fraction < 0.8
    assert (
        "pruned along the wrong axis: 2:4 lies along out (the transposed weight), not along in = 32" in linear.verdict
    )
    assert "lies along output channels, not along input channels per group = 16" in conv.verdict


def test_a_flattened_convolution_is_recognised():
    net = nn.Sequential(nn.Conv2d(16, 8, 3))
    with torch.no_grad():
        flat = net[0].weight.flatten(1)
        net[0].weight.copy_((flat * TWO_FOUR.project(flat, absolute=True)).view_as(net[0].weight))
    found = checker.check(net, expect="2:4").layers[0]
    assert found.wrong_axis == "the flattened kernel (C*kh*kw)" and found.wrong_fraction == 1.0
    assert found.verdict.startswith("2:4 broken: pruned along the wrong axis")


def test_negative_zero_counts_as_zero_and_nan_breaks():
    net = nn.Sequential(nn.Linear(16, 8))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([1.0, -0.0, -0.0, 2.0]).repeat(8, 4))
    found = checker.check(net, expect="2:4").layers[0]
    assert found.kept and found.zeros == 0.5
    with torch.no_grad():
        net[0].weight[0, 0] = float("nan")
    report = checker.check(net, expect="2:4")
    assert not report.ok and report.layers[0].verdict == "2:4 broken: 1 values are NaN or infinite"


def test_expectations_by_name_and_their_errors():
    net = model()
    assert checker.check(net, expect={"3.weight": "2:4"}).ok
    assert not checker.check(net, expect={"3.weight": "1:4"}).ok
    stem = finding(checker.check(net, expect={"0.weight": "2:4"}), "0.weight")  # ASP leaves it, the caller does not
    assert stem.verdict == "2:4 broken: input channels per group = 3 is not a multiple of 4"
    with pytest.raises(LayerError, match=r"not there(.|\n)*7\.weight(.|\n)*0\.weight"):
        checker.check(net, expect={"7.weight": "2:4"})
    with pytest.raises(PatternError):
        checker.check(net, expect="two of four")
    with pytest.raises(LayerError, match=r"no model to check(.|\n)*dict(.|\n)*check_weights"):
        checker.check({"a": torch.zeros(4, 4)})  # pyright: ignore[reportArgumentType]


def fits(shape: tuple[int, int], pattern: str = "2:4") -> dict[tuple[str, str], checker.Fit]:
    weight = pruned(torch.randn(shape), 1, pattern)
    (found,) = checker.check_weights({"w": weight}).layers
    return {(fit.runtime, fit.dtypes): fit for fit in found.fits}


@in_turn(
    ("runtime", "dtypes", "good", "bad"),
    [
        ("torch cuSPARSELt", "float16 bfloat16", (16, 32), (24, 32)),
        ("torch cuSPARSELt", "int8 float8", (32, 32), (16, 32)),
        ("torch CUTLASS", "float16 bfloat16", (32, 64), (32, 32)),
        ("torch CUTLASS", "int8", (16, 128), (16, 64)),
        ("TensorRT", "float16 int8", (3, 4), None),
        ("twofour CPU", "float32 bfloat16 int8", (3, 4), None),
        ("twofour CPU", "int4", (3, 32), (3, 16)),
    ],
)
def test_alignment_per_runtime(runtime, dtypes, good, bad):
    assert fits(good)[runtime, dtypes].ready
    if bad:
        fit = fits(bad)[runtime, dtypes]
        assert not fit.aligned and f"({bad[0]}, {bad[1]}) is not a multiple of" in fit.reason


def test_cutlass_wants_1_2_for_float32():
    key = ("torch CUTLASS", "float32")
    fit = fits((32, 32))[key]
    assert fit.aligned and not fit.ready and fit.reason.endswith("the values are not 1:2")
    assert fits((32, 32), "1:2")[key].ready


def test_convolutions_are_for_tensorrt_and_our_cpu_kernels():
    found = finding(checker.check(model()), "1.weight")
    ready = {fit.runtime: fit for fit in found.fits if fit.ready}
    assert set(ready) == {"TensorRT", "twofour CPU"}
    assert ready["TensorRT"].reason.endswith("its dense kernels tend to win below 256 channels")
    assert "#3849" in ready["TensorRT"].source
    ours = {fit.dtypes: fit.source for fit in found.fits if fit.runtime == "twofour CPU"}
    assert "nm_conv" in ours["float32"] and "window_conv" in ours["int8"]
    assert {fit.reason for fit in found.fits if fit.runtime == "torch CUTLASS"} == {"has no sparse conv2d"}


def test_loose_tensors():
    weights = {
        "fc": pruned(torch.randn(8, 16), 1),
        "conv": pruned(torch.randn(8, 16, 3, 3), 1, "1:4"),
        "norm": torch.ones(8),
        "ids": torch.ones(4, 4, dtype=torch.int64),
        "none": torch.ones(0, 4),
    }
    report = checker.check_weights(weights)
    assert report.ok and [found.kind for found in report.layers] == ["linear", "conv2d"]
    assert finding(report, "conv").satisfies[0] == "1:4"
    assert [name for name, _ in report.skipped] == ["norm", "ids", "none"]
    assert not checker.check_weights({"fc": torch.randn(8, 16)}).ok
    with pytest.raises(LayerError, match=r"layer `w`(.|\n)*meta"):
        checker.check_weights({"w": torch.empty(8, 16, device="meta")})


def test_tied_weights_are_found_once():
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    net[1].weight = net[0].weight
    assert len(checker.check(net).layers) == 1
    assert len(checker.check(net, expect={"1.weight": "2:4"}).layers) == 1


def test_a_compiled_model_is_checked_in_its_packed_form(monkeypatch, tmp_path):
    monkeypatch.setenv("TWOFOUR_CACHE", str(tmp_path))
    net = twofour.prune(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), "2:4")
    fast = twofour.compile(net, torch.randn(4, 64), memory="small", tokens=(4,))
    report = checker.check(fast)
    assert report.ok and finding(report, "0.weight").verdict == "2:4 kept"
    assert finding(report, "0.weight").shape == (128, 64)


def test_the_report_is_json_and_a_table():
    report = checker.check(model(), expect="2:4")
    content = json.loads(json.dumps(report.to_dict()))
    assert content["ok"] and len(content["layers"]) == 2
    assert content["layers"][1]["fits"][0]["runtime"] == "torch cuSPARSELt"
    lines = str(report).splitlines()
    assert lines[0].split()[:4] == ["weight", "kind", "shape", "promised"]
    assert lines[2].split()[:5] == ["1.weight", "conv2d", "32x16x3x3", "2:4", "100.0%"]
    assert str(checker.check(nn.Sequential(nn.ReLU()))) == (
        "DENSE: nothing is sparse, and nothing was promised to be; 0 of 0 weights are sparse, 0 skipped"
    )


def test_what_the_caller_expects_stands_above_masks_and_packed_forms(monkeypatch, tmp_path):
    monkeypatch.setenv("TWOFOUR_CACHE", str(tmp_path))
    net = twofour.prune(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16)), "2:4", skip=["2"])
    found = finding(checker.check(net, expect="1:4"), "0.weight")
    assert not found.kept and (found.promised, found.promised_by, found.outside) == ("1:4", "expect", 0)
    assert finding(checker.check(net, expect={"0.weight": "1:4"}), "0.weight").promised == "1:4"
    assert checker.check(net, expect={"0.weight": "4:8"}).ok
    fast = twofour.compile(net, torch.randn(4, 64), memory="small", tokens=(4,))
    packed = finding(checker.check(fast, expect="1:4"), "0.weight")
    assert packed.promised_by == "expect" and packed.verdict.startswith("1:4 broken")
    with torch.no_grad():
        net[0].weight.add_(
            ~twofour.masks.of(net)["0.weight"].keep
        )  # forgotten by an optimiser that the hooks do not see
    assert finding(checker.check(net, expect="3:4"), "0.weight").outside == 64 * 64


def test_a_mask_outside_asps_rule_keeps_its_own_word():
    net = twofour.prune(nn.Sequential(nn.Linear(12, 6)), "2:4", eligibility="any")
    assert finding(checker.check(net, expect="1:4"), "0.weight").promised_by == "mask"
    assert not checker.check(net, expect={"0.weight": "1:4"}).ok


def test_a_weight_with_nan_is_ready_for_nothing():
    weight = pruned(torch.randn(32, 64), 1)
    weight[3, weight[3].nonzero()[0]] = float("nan")
    report = checker.check_weights({"w": weight})
    (found,) = report.layers
    assert not report.ok and not found.sparse and not any(fit.ready for fit in found.fits)
    assert all("1 values are NaN or infinite" in fit.reason for fit in found.fits if fit.aligned)


@in_turn("pattern", ["2:4", "block:8x1@0.5"])
@in_turn("kind", [nn.Linear, nn.LSTM, nn.GRUCell])
def test_our_rules_are_those_of_the_kernel_table(kind: Callable[..., nn.Module], pattern: str) -> None:
    named = (pattern, pattern.split(":")[0])
    table = {row.dtype for row in kernels.sparse_products() if row.pattern in named}
    assert {"float32", "bfloat16", "int8"} <= table
    for found in checker.check(twofour.prune(nn.Sequential(kind(32, 32)), pattern)).layers:
        ready = [fit for fit in found.fits if fit.runtime == "twofour CPU" and fit.ready]
        assert {dtype for fit in ready for dtype in fit.dtypes.split()} == table
        assert {"block" in fit.source for fit in ready} == {"block" in pattern}
