from typing import Any

import pytest
import torch
from torch import nn

import twofour
from twofour.compiler import advise
from twofour.compiler.advice import Advice, Raced, judged, verdict_of
from twofour.errors import CompileError, PatternError

HALF = ("2:4", "block:8x8@0.5")


def test_each_layer_is_measured_dense_and_with_each_pattern_and_the_model_is_untouched() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Conv1d(16, 16, 3), nn.Linear(128, 10))
    before = model[0].weight.clone()
    advice = advise(model, patterns=HALF, tokens=(1, 16))
    assert torch.equal(model[0].weight, before)
    cases = [(pattern, tokens) for pattern in HALF for tokens in (1, 16)]
    assert [(row.pattern, row.tokens) for row in advice.rows] == cases
    for row in advice.rows:
        assert (row.layer, row.shape) == ("0", (128, 64)) and row.dense_ms > 0 and row.sparse_ms > 0
        assert row.ratio == row.dense_ms / row.sparse_ms
        family = "nm_matmul" if row.pattern == "2:4" else "block_matmul"
        assert row.kernel.startswith(family if row.ratio > 1 else "dense_matmul")
        assert ("fast" in row.verdict) == (row.ratio >= 1.05)
    skipped = dict(advice.skipped)
    assert "a convolution: its time follows from its images; compile(prune" in skipped["1.weight"]
    assert "2.weight" in skipped
    assert advice.to_dict()["rows"] and advice.to_dict()["patterns"] == list(HALF)
    assert "128x64" in str(advice) and "dense: 1.weight: a convolution" in str(advice)
    assert "block:8x8@0.5" in advice.summary(16)


def test_what_pays_is_the_pattern_with_the_highest_ratio() -> None:
    advice = advise(nn.Linear(64, 128), patterns=HALF, tokens=(16,))
    rows = advice.of("", 16)
    best = max(rows.values(), key=lambda row: row.ratio)
    assert advice.best("", 16) == (best if best.ratio >= 1.05 else None)
    dense, ours = advice.total(16)
    assert dense == min(row.dense_ms for row in rows.values())
    assert ours == pytest.approx(dense / max(1, best.ratio)) and advice.total(16, "2:4")[1] >= ours
    said = verdict_of(advice.rows)
    assert ("dense stays" in said) == (best.ratio < 1.05) and (best.ratio < 1.05 or best.pattern in said)


def test_recurrent_layers_are_measured_over_steps() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"rnn": nn.GRU(16, 32, 2), "cell": nn.LSTMCell(16, 16), "odd": nn.GRU(16, 24)})
    advice = advise(model, patterns=("2:4", "block:8x8@0.5", "1:8"), tokens=(1, 3))
    found = {(row.layer, row.pattern, row.tokens) for row in advice.rows}
    kinds = ("2:4", "block:8x8@0.5", "1:8")
    assert found >= {(layer, pattern, tokens) for layer in ("rnn", "cell") for pattern in kinds for tokens in (1, 3)}
    for row in advice.rows:
        assert row.dense_ms > 0 and row.sparse_ms > 0 and row.kernel
    assert {row.shape for row in advice.rows if row.layer == "rnn"} == {(96, 16)}


def test_a_pattern_that_a_layer_cannot_carry_is_said_and_the_others_are_measured() -> None:
    advice = advise(nn.Linear(48, 64), patterns=("2:4", "3:5"), tokens=(1,))
    assert [row.pattern for row in advice.rows] == ["2:4"]
    assert "3:5" in dict(advice.skipped)["weight"]
    with pytest.raises(PatternError, match="block:banana"):
        advise(nn.Linear(48, 64), patterns="block:banana")
    for nothing in ((), 3):
        with pytest.raises(CompileError, match="no pattern to measure"):
            advise(nn.Linear(48, 64), patterns=nothing)  # pyright: ignore[reportArgumentType]


def test_the_kernels_of_a_computing_type_are_asked_for_their_form() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(36, 64))
    advice = advise(model, tokens=(1,), dtype="int4")
    assert [row.layer for row in advice.rows] == ["0"] and "int4" in advice.rows[0].kernel
    assert any(name == "0.weight" and reason.startswith("block:16x16@0.5: ") for name, reason in advice.skipped)
    assert "36" in dict(advice.skipped)["1.weight"]
    others = advise(nn.Sequential(nn.Linear(64, 64)), patterns=("2:4", "4:8"), tokens=(1,))
    (said,) = [reason for _, reason in others.skipped]
    assert said.startswith("4:8: ") and said.count("4:8") == 1
    with pytest.raises(CompileError, match="dtype is not known"):
        advise(model, dtype="float7")
    assert advise(nn.Linear(96, 64), tokens=(1,), dtype="int4", group=32).rows
    with pytest.raises(CompileError, match="group"):
        advise(model, group=32)


def test_nothing_to_measure_is_an_error_with_reasons() -> None:
    with pytest.raises(CompileError, match="no layer of the model can run 2:4") as caught:
        advise(nn.Sequential(nn.Linear(3, 5)))
    assert "reason" in str(caught.value)
    with pytest.raises(CompileError, match="no layer of the model can run 2:4") as caught:
        advise(nn.Linear(96, 64), tokens=(1,), dtype="int4")
    assert "96" in str(caught.value)
    with pytest.raises(CompileError, match="token counts"):
        advise(nn.Linear(64, 64), tokens=(0,))
    broken = nn.Linear(64, 64)
    with torch.no_grad():
        broken.weight[1, 2] = float("inf")
    with pytest.raises(PatternError, match=r"\(1, 2\)"):
        advise(broken, tokens=(1,))


def test_rows_of_one_layer_share_the_least_disturbed_dense_time() -> None:
    races = [
        Raced("a", (8, 4), 1, "2:4", ("dense", 4.0), ("sparse", 2.0)),
        Raced("a", (8, 4), 1, "block:8x1@0.5", ("dense", 9.0), ("blocks", 3.0)),
        Raced("b", (8, 4), 1, "2:4", ("dense", 1.0), ("sparse", 5.0)),
    ]
    advice = Advice(judged(races), (), (1,), 1, "scalar", ("2:4", "block:8x1@0.5"))
    assert [row.dense_ms for row in advice.rows] == [4000, 4000, 1000]
    assert [row.ratio for row in advice.rows] == [2, 4 / 3, 0.2]
    assert advice.total(1) == (5000, 3000) and advice.total(1, "block:8x1@0.5") == (5000, 4000)
    assert "5000.000 ms dense, the sum of their rows" in advice.summary(1)


def test_of_equal_times_dense_is_the_kernel_that_would_run() -> None:
    (row,) = judged([Raced("a", (8, 4), 1, "2:4", ("dense", 2.0), ("sparse", 2.0))])
    assert (row.ratio, row.kernel) == (1, "dense") and "no difference" in row.verdict


def test_a_model_of_convolutions_is_told_where_their_times_are() -> None:
    """It was told to change its dtype, or to skip fewer layers."""
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.Flatten())
    with pytest.raises(CompileError, match="nothing but convolutions of the model can run 2:4") as refused:
        advise(model, patterns="2:4", tokens=(1,))
    assert 'twofour.compile(twofour.prune(model, "2:4"), images).plan)' in str(refused.value)
    plan: Any = twofour.compile(
        twofour.prune(model.eval(), "2:4"), torch.randn(1, 16, 8, 8), effort="quick", progress=False
    ).plan  # as it is told
    assert all(layer.dense_ms and layer.sparse_ms for layer in plan.layers if layer.kind == "Conv2d")
