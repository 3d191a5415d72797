import pytest
import torch
from torch import nn

from twofour.compiler import advise
from twofour.errors import CompileError, PatternError


def test_each_layer_is_measured_dense_and_sparse_and_the_model_is_untouched() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Conv1d(16, 16, 3), nn.Linear(128, 10))
    before = model[0].weight.clone()
    advice = advise(model, tokens=(1, 16))
    assert torch.equal(model[0].weight, before)
    assert [(row.layer, row.tokens, row.shape) for row in advice.rows] == [("0", 1, (128, 64)), ("0", 16, (128, 64))]
    for row in advice.rows:
        assert row.dense_ms > 0 and row.sparse_ms > 0
        assert row.ratio == row.dense_ms / row.sparse_ms
        assert row.kernel.startswith("nm_matmul" if row.ratio > 1 else "dense_matmul")
        assert ("fast" in row.verdict) == (row.ratio >= 1.05)
    skipped = dict(advice.skipped)
    assert "a convolution: twofour.compile measures it" in skipped["1.weight"]
    assert "2.weight" in skipped
    dense, ours = advice.total(16)
    assert ours <= dense == advice.rows[1].dense_ms
    assert advice.to_dict()["rows"]
    assert "128x64" in str(advice) and "dense: 1.weight: a convolution" in str(advice)


def test_the_kernels_of_a_computing_type_are_asked_for_their_form() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(36, 64))
    advice = advise(model, tokens=(1,), dtype="int4")
    assert [row.layer for row in advice.rows] == ["0"] and "int4" in advice.rows[0].kernel
    assert "36" in dict(advice.skipped)["1.weight"]
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
