"""Models and calls that run layer by layer in the place of their graph: why, and said once."""

import copy
import logging

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.compiler.small import Branching, mlp, quick
from tests.compiler.whole import close, pruned, served, whole
from tests.graph.small import Encoder
from twofour.compiler import graph as compiled_graph
from twofour.graph.blocks import Always, Blocks

pytestmark = pytest.mark.usefixtures("no_measuring")


def test_a_call_of_another_structure_runs_layer_by_layer_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model = pruned(Encoder())
    ids = torch.randint(0, 50, (2, 8))
    fast = whole(model, (ids, torch.ones(2, 8)))
    with caplog.at_level(logging.WARNING, "twofour.compiler"):
        close(fast(ids), model(ids))
        close(fast(ids=ids), model(ids))
    assert caplog.text.count("layer by layer") == 1
    close(fast(mask=torch.ones(2, 8), ids=ids), model(ids))


def test_slower_graphs_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_graph, "_engines", lambda *_: ({"layers": 1.0, "graph": 1.2}, 0.0))
    fast = quick(pruned(mlp()), torch.randn(4, 64), graph=True)
    assert "forward" not in fast.__dict__
    assert fast.plan.account.engine == "layers" and "faster" in fast.plan.account.reason


def test_a_model_that_cannot_be_captured_says_why(caplog: pytest.LogCaptureFixture) -> None:
    fast = quick(pruned(Branching()), torch.ones(4, 64), graph=True)
    assert fast.plan.account.engine == "layers"
    assert "cannot be captured" in fast.plan.account.reason and "cannot be captured" in caplog.text


def test_a_graph_that_differs_is_given_up(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compiled_graph, "_difference", lambda *_: 0.5)
    fast = quick(pruned(mlp()), torch.randn(4, 64), graph=True)
    assert "forward" not in fast.__dict__ and fast.plan.account.engine == "layers"
    assert "differs from the layers by 5.0e-01" in caplog.text


def test_a_graph_that_answers_in_another_type_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = compiled_graph._answers
    monkeypatch.setattr(compiled_graph, "_answers", lambda *_: [answers(*_)[0].double()])
    fast = quick(pruned(mlp()), torch.randn(4, 64), graph=True)
    assert fast.plan.account.engine == "layers" and "differs from the layers in the type" in fast.plan.account.reason


def test_training_mode_runs_layer_by_layer_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model = pruned(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)))
    x = torch.randn(8, 64)
    fast = whole(model, x).train()
    with caplog.at_level(logging.WARNING, "twofour.compiler"), torch.inference_mode():
        assert (fast(x) == 0).any() and (fast(x) == 0).any(), "dropout drops"
    assert caplog.text.count("a call in training mode runs layer by layer") == 1
    caplog.clear()
    close(served(fast.eval(), caplog, x), model(x))


def test_the_worst_output_counts_and_whole_numbers_are_equal() -> None:
    large, small, whole_numbers = torch.full((100,), 1e3), torch.ones(4), torch.arange(3)
    want = large, small, whole_numbers
    assert compiled_graph.distance((large, small, whole_numbers), want) == 0
    assert compiled_graph.distance((large, small * 2, whole_numbers), want) == pytest.approx(1)
    assert compiled_graph.distance((large, small, whole_numbers + 1), want) == torch.inf
    assert compiled_graph.distance((large, small * torch.nan, whole_numbers), want) == torch.inf
    assert compiled_graph.distance((large, small[:3], whole_numbers), want) == torch.inf
    assert compiled_graph.distance((large, torch.full((2,), 1e-9)), (large, torch.zeros(2))) < 1e-6


def test_hooks_run(caplog: pytest.LogCaptureFixture) -> None:
    model, seen = pruned(mlp()), list[str]()
    before = model[1].register_forward_hook(lambda *_: seen.append("inner"))
    fast = quick(model, torch.randn(4, 64), graph=True)
    seen.clear()
    assert "forward" not in fast.__dict__ and "forward hooks on `1`" in fast.plan.account.reason
    assert "forward hooks on `1`" in caplog.text
    fast(torch.randn(4, 64))
    assert seen == ["inner"]
    before.remove()
    caplog.clear()

    for fast in (whole(model, torch.randn(4, 64)), copy.deepcopy(whole(model, torch.randn(4, 64)))):
        seen.clear()
        x = torch.randn(4, 64)
        fast.register_forward_hook(lambda *_: seen.append("outer"))
        close(served(fast, caplog, x), model(x))
        assert seen == ["outer"], "those of the model itself run around the graph"
        later = fast[1].register_forward_pre_hook(lambda *_: seen.append("inner"))
        close(fast(x), model(x))
        close(fast(x), model(x))
        assert seen == ["outer", "inner", "outer", "inner", "outer"]
        assert caplog.text.count("with forward hooks runs layer by layer (said once)") == 1
        later.remove()
        caplog.clear()
        close(served(fast, caplog, x), model(x))


class Rounded(nn.Module):
    """A stretch of operators in bfloat16, between layers of the type that the model has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).bfloat16()
        y = (y * y + y) * torch.sigmoid(y) * 0.7 - y / 3 + torch.tanh(y) * y
        return self.down(y.to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_roundings_that_a_block_leaves_out_are_no_other_model(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twofour.compiler.graph_rewrites.Measured", lambda _: Always())
    torch.manual_seed(0)
    model, x = Rounded().to(dtype).eval(), torch.randn(64, 64).to(dtype)
    fast = twofour.compile(model, example=x, graph=True)
    torch.testing.assert_close(fast(x).float(), model(x).float(), rtol=0.1, atol=0.1)
    if dtype is torch.bfloat16:
        assert fast.plan.account.engine == "graph", fast.plan.account.reason


def test_a_graph_that_errs_gives_way_to_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twofour.compiler.graph._probe", lambda *_: 0.0)
    monkeypatch.setattr("twofour.graph.program.OPERATORS", {torch.ops.aten.mul.Tensor: "-"})
    monkeypatch.setattr("twofour.compiler.graph_rewrites.fuse_blocks", lambda *_: Blocks())

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x) * x.sum(-1, keepdim=True))

    model, x = Gated().eval(), torch.randn(8, 64)
    fast = twofour.compile(model, example=x, graph=True)
    assert fast.plan.account.engine == "layers" and "relative error" in fast.plan.account.reason
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
