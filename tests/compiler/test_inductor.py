"""compile(..., graph="inductor"): the third engine, kept where it is fastest, and why not elsewhere."""

import copy
import io
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.compiler.small import mlp, quick
from tests.turns import in_turn
from twofour.compiler import inductor
from twofour.compiler.inductor import InductorModel
from twofour.compiler.whole_model import WholeModel
from twofour.errors import CompileError, KernelError

pytestmark = pytest.mark.usefixtures("no_measuring")


def pruned() -> nn.Module:
    return twofour.prune(mlp(), "2:4").eval()


def times(monkeypatch: pytest.MonkeyPatch, layers: float, graph: float, third: float) -> None:
    measured = {"layers": layers, "graph": graph, "inductor": third}
    monkeypatch.setattr(inductor, "milliseconds", lambda calls: {name: measured[name] for name in calls})


def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor without its minute: the graph runs as it was traced."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: lambda graph, _: graph.forward)


def test_it_serves_every_size_and_copies(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        pytest.skip(f"no C++ compiler for Inductor: {error}")
    times(monkeypatch, 3.0, 2.0, 1.0)
    torch._dynamo.reset()
    model = pruned()
    fast = quick(model, torch.randn(4, 64), graph="inductor")
    account = fast.plan.account
    assert isinstance(fast.forward, InductorModel) and account.engine == "inductor", account
    assert account.engine_ms == {"layers": 3.0, "graph": 2.0, "inductor": 1.0}
    assert "whole model: inductor" in str(fast.plan) and type(fast) is nn.Sequential and fast.plan.error < 1e-5
    for tokens in (4, 9, 40):
        x = torch.randn(tokens, 64)
        with torch.inference_mode():
            torch.testing.assert_close(fast(x), model(x), atol=1e-5, rtol=1e-5)
    assert "another kind" not in caplog.text
    twin = copy.deepcopy(fast)
    assert twin.forward.model is twin
    torch.testing.assert_close(twin(x), model(x).detach(), atol=1e-5, rtol=1e-5)
    with pytest.raises(KernelError, match="inference"):
        fast(torch.randn(4, 64, requires_grad=True))


def test_files_carry_no_machine_code(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    times(monkeypatch, 3.0, 2.0, 1.0)
    uncompiled(monkeypatch)
    model, x = pruned(), torch.randn(4, 64)
    fast, stream = quick(model, x, graph="inductor"), io.BytesIO()
    torch.save(fast, stream)
    stream.seek(0)
    torch._dynamo.reset()
    with caplog.at_level(logging.WARNING, "twofour.compiler"):
        loaded = torch.load(stream, weights_only=False)
        torch.testing.assert_close(loaded(x), model(x).detach(), atol=1e-5, rtol=1e-5)
    assert isinstance(loaded.forward, InductorModel) and "another kind of call" in caplog.text


def test_it_is_kept_only_where_it_is_faster_than_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, 3.0, 2.0, 1.95)
    uncompiled(monkeypatch)
    fast = quick(pruned(), torch.randn(4, 64), graph="inductor")
    assert isinstance(fast.forward, WholeModel) and fast.plan.account.engine == "graph"
    assert "Inductor is not faster" in fast.plan.account.reason
    assert fast.plan.account.engine_ms == {"layers": 3.0, "graph": 2.0, "inductor": 1.95}


def test_why_it_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def without(_: str) -> None:
        raise RuntimeError("no C++ compiler found")

    torch._dynamo.reset()
    monkeypatch.setattr(torch._dynamo, "lookup_backend", without)
    fast = quick(pruned(), torch.randn(4, 64), graph="inductor")
    assert isinstance(fast.forward, WholeModel) and set(fast.plan.account.engine_ms) == {"layers", "graph"}
    assert "no C++ compiler found" in fast.plan.account.reason and "no C++ compiler found" in caplog.text


@in_turn(
    ("change", "said"),
    [(lambda y: y + 1, "by "), (lambda y: y.double(), "in the type or shape of an answer, or an infinity, ")],
)
def test_answers_that_differ_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: Callable[[Tensor], Tensor], said: str
) -> None:
    caplog.clear()
    times(monkeypatch, 3.0, 2.0, 1.0)
    torch._dynamo.reset()
    wrong = lambda graph, _: lambda *inputs: tuple(change(y) for y in graph.forward(*inputs))  # noqa: E731
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: wrong)
    fast = quick(pruned(), torch.randn(4, 64), graph="inductor")
    assert isinstance(fast.forward, WholeModel) and f"Inductor differs from the layers {said}" in caplog.text


def test_impossible_values() -> None:
    with pytest.raises(CompileError, match=r"graph is not known[\s\S]*'eager'[\s\S]*'inductor'"):
        quick(mlp(), torch.randn(4, 64), graph="eager")
    with pytest.raises(CompileError, match="graph='inductor' needs an example"):
        quick(mlp(), graph="inductor")
