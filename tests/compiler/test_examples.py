"""Examples that are odd, and models that answer oddly: compared where they can be, refused for the reason they have."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.compiler.small import mlp, quick
from tests.turns import in_turn
from twofour import calls
from twofour.capture import capture
from twofour.compiler import graph as compiled_graph
from twofour.errors import CompileError
from twofour.measure.distance import distance

pytestmark = pytest.mark.usefixtures("no_measuring")
INF, NAN = float("inf"), float("nan")


class Masked(nn.Module):
    """Answers with scores of which some are hidden by an infinity."""

    def __init__(self, hidden: float) -> None:
        super().__init__()
        self.fc, self.hidden = nn.Linear(64, 64), hidden

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).masked_fill(torch.arange(64) % 3 == 0, self.hidden)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("hidden", [-INF, NAN])
def test_an_answer_may_hold_infinities(hidden: float, graph: bool, dtype: str) -> None:
    torch.manual_seed(0)
    model, x = twofour.prune(Masked(hidden).eval(), "2:4"), torch.randn(5, 64)
    fast = quick(model, x, graph=graph, dtype=dtype, memory="small")
    assert fast.plan.error is not None and fast.plan.error < 0.1
    assert not graph or fast.plan.account.engine == "graph"
    found, want = fast(x), model(x).detach()
    torch.testing.assert_close(found, want, equal_nan=True, atol=0.1, rtol=0.1)


@in_turn(
    ("found", "want", "error"),
    [
        ([1.0, INF], [1.0, INF], 0.0),
        ([1.0, NAN], [1.0, NAN], 0.0),
        ([1.0, -INF], [1.0, INF], INF),
        ([1.0, INF], [1.0, NAN], INF),
        ([1.0, 2.0], [1.0, INF], INF),
        ([1.0, NAN], [1.0, 2.0], INF),
        ([0.0, INF], [1.0, INF], 1.0),
        ([NAN, NAN], [NAN, NAN], 0.0),
    ],
)
def test_the_distance_with_values_that_are_not_finite(found: list[float], want: list[float], error: float) -> None:
    assert distance([torch.tensor(found)], [torch.tensor(want)]) == error


@pytest.mark.parametrize("odd", [INF, NAN])
def test_an_example_that_is_not_finite_is_named(odd: float) -> None:
    model, x = twofour.prune(mlp(), "2:4"), torch.randn(5, 64)
    x[0, :] = odd
    with pytest.raises(CompileError, match=r"an example that holds NaN or infinity[\s\S]*pass a finite example"):
        quick(Half(model), x, memory="small")


class Half(nn.Module):
    """Another answer at each call where its input is not finite."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.calls = model, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.model(x.nan_to_num(self.calls, self.calls))


def test_nothing_is_compared_where_nothing_is_finite(caplog: pytest.LogCaptureFixture) -> None:
    model = twofour.prune(Masked(NAN), "2:4")
    model.forward = lambda x: model.fc(x) * NAN  # type: ignore[method-assign]
    assert quick(model, torch.randn(3, 64)).plan.error is None
    assert "not compared: all of them are NaN or infinite" in caplog.text


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.mul_(2))


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("form", [lambda x: (x,), lambda x: {"x": x}])
def test_a_forward_may_change_its_input(form, graph: bool, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, x = twofour.prune(InPlace().eval(), "2:4"), torch.randn(5, 64)
    before = x.clone()
    fast = quick(model, form(x), graph=graph, memory="small")
    assert torch.equal(x, before), "the caller's example stays as it was"
    assert fast.plan.error < 1e-5
    torch.testing.assert_close(fast(x.clone()), model(x.clone()), atol=1e-5, rtol=1e-5)
    assert ("the forward changes the model or its input" in caplog.text) == graph


def test_what_an_example_holds_is_copied_where_it_can_be() -> None:
    x, model, words = torch.ones(2), nn.ReLU(), (word for word in "ab")
    found = calls.fresh({"x": [x, {"y": x}], "model": model, "words": words, "cache": {1: [2]}})
    assert torch.equal(found["x"][0], x) and found["x"][0] is not x and found["x"][1]["y"] is not x
    assert found["model"] is model and found["words"] is words and found["cache"] == {1: [2]}


@pytest.mark.parametrize("graph", [True, "inductor"])
def test_an_empty_example_is_named(graph: bool | str, caplog: pytest.LogCaptureFixture) -> None:
    fast = quick(twofour.prune(mlp(), "2:4"), torch.randn(0, 64), graph=graph)
    assert fast.plan.account.engine == "layers"
    assert "of the example is empty: nothing can be compared or timed on it" in fast.plan.account.reason
    assert "each layer is compiled by itself: `input` of the example is empty" in caplog.text
    assert "not compared: the example is empty" in caplog.text and fast.plan.error is None


def test_graphs_are_captured_from_several_threads() -> None:
    models = [twofour.prune(mlp(seed), "2:4") for seed in range(3)]
    x, found = torch.randn(5, 64), dict[int, str]()

    def compiled(index: int) -> None:
        found[index] = quick(models[index], x, graph=True).plan.account.engine

    threads = [threading.Thread(target=compiled, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(3), "graph")


def test_one_thread_does_not_rewrite_while_another_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modes of a capture would trace the sizes that a rewrite compares: each waits for the other to come first."""
    captured, inside, rewritten = threading.Event(), threading.Event(), threading.Event()
    original = compiled_graph.rewrite_graph

    def after_the_others_capture_began(*args: Any) -> Any:
        captured.set()
        inside.wait(1)  # in vain, where captures wait for rewrites
        return original(*args)

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            rewritten.wait(5)
            return x + 1

    monkeypatch.setattr(compiled_graph, "rewrite_graph", after_the_others_capture_began)
    model = twofour.prune(nn.Sequential(mlp(), nn.Unflatten(1, (5, 2)), nn.Softmax(1), nn.Flatten()), "2:4")
    with ThreadPoolExecutor(2) as pool:
        fast = pool.submit(quick, model, torch.randn(5, 64), graph=True)
        assert captured.wait(20), fast.result()
        other = pool.submit(capture, Slow(), {"x": torch.randn(3, 4)})
        wait([fast])
        rewritten.set()
        assert fast.result().plan.account.engine == "graph", fast.result().plan.account.reason
        assert other.result().dynamic


class Config:
    use_cache = True


class DynamicCache:
    """A class that torch's captures do not know."""


class Causal(nn.Module):
    """Answers with a cache as Hugging Face's causal models do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.config = nn.Linear(64, 64), Config()

    def forward(self, input_ids: Tensor, use_cache: bool | None = None) -> tuple[object, ...]:
        cached = self.config.use_cache if use_cache is None else use_cache
        return (self.fc(input_ids), DynamicCache()) if cached else (self.fc(input_ids),)


def test_a_cache_in_the_answer_is_named_with_its_remedy(caplog: pytest.LogCaptureFixture) -> None:
    model, x = twofour.prune(Causal().eval(), "2:4"), torch.randn(5, 64)
    remedy = 'pass example={"input_ids": input_ids, "use_cache": False}'
    fast = quick(model, x, graph=True)
    assert remedy in caplog.text and remedy in fast.plan.account.reason and remedy in str(fast.plan)
    assert "the calls of `generate` get graphs of their own" in fast.plan.account.reason
    fast = quick(model, {"input_ids": x, "use_cache": False}, graph=True)
    assert fast.plan.account.engine == "graph"
    with caplog.at_level(logging.WARNING):
        fast(x)
    assert "runs layer by layer" in caplog.text


def test_a_reason_is_not_cut_inside_an_address() -> None:
    reason = quick(twofour.prune(Odd().eval(), "2:4"), torch.randn(5, 64), graph=True).plan.account.reason
    assert "not a known type" in reason and "http" not in reason and "See" not in reason


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[object, ...]:
        return self.fc(x), DynamicCache()


def test_an_empty_example_puts_no_layer_back(caplog: pytest.LogCaptureFixture) -> None:
    fast = quick(twofour.prune(mlp(), "2:4"), torch.randn(0, 64))
    assert not fast.plan.whole_ms and not fast.plan.kept_dense, "a call without values has no time worth comparing"
    assert "the whole model is faster" not in caplog.text


@pytest.mark.parametrize("graph", ["auto", False])
def test_a_sparse_example_is_named_with_its_layer(graph: bool | str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CompileError, match=r"layer `0`: the model does not run on the example[\s\S]*x\.to_dense\(\)"):
        quick(twofour.prune(mlp(), "2:4"), torch.randn(8, 64).to_sparse(), graph=graph)
    assert "please report" not in caplog.text


@pytest.mark.parametrize(
    ("example", "remedy"),
    [
        (np.zeros((8, 64), np.float32), r"torch\.from_numpy\(example\)"),
        (torch.empty(8, 64, device="meta"), "on the meta device has none"),
    ],
)
def test_an_example_without_values_of_torch_is_named(example: object, remedy: str) -> None:
    with pytest.raises(CompileError, match=rf"does not run on the example[\s\S]*{remedy}"):
        quick(twofour.prune(mlp(), "2:4"), example)


class Optional(nn.Module):
    """Runs without an input, and refuses to where it is to have one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x: Tensor | None = None) -> Tensor:
        if x is None:
            raise ValueError("You have to specify x")
        return self.fc(x)


@in_turn("example", [(), {}, []])
def test_an_example_without_anything_is_told_so(example: object) -> None:
    """It was told to check sizes and dtypes."""
    for model in (mlp(), Optional()):
        with pytest.raises(
            CompileError, match=r"does not run on the example\n.*an empty example; [\s\S]*leave the example out"
        ):
            quick(model, example)
