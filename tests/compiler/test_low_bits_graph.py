"""A graph of a model of low bits: its products are those of codes, timed for its widths, judged where no code tips."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

import twofour
from tests.compiler.of_bits import of_bits, run, whole
from twofour import quantization
from twofour.compiler import graph as compiled_graph
from twofour.compiler.graph_low_bits import widths_and_kernels
from twofour.measure.cache import Cache

pytestmark = pytest.mark.usefixtures("codes_win")


@pytest.mark.parametrize("data", [False, True])
def test_graphs_and_exports_hold_the_products_of_codes(data: bool) -> None:
    model, x = of_bits("w2", "a3", data=data), torch.randn(6, 71)
    fast = twofour.compile(model, x, tokens=(6,), graph=True)
    torch.testing.assert_close(fast(x), whole(model, x))
    exported = torch.export.export(fast, (x,)) if data else None
    if exported is not None:
        assert "twofour.linear" in str(exported.graph)
        assert torch.equal(exported.module()(x), whole(model, x))


def test_a_whole_model_is_timed_anew_for_other_widths(monkeypatch, graph_wins) -> None:
    named, cases = Cache.key, []

    def key(cache: Cache, case: str, copies: int = 1) -> str:
        cases.append(case)
        return named(cache, case, copies)

    monkeypatch.setattr(Cache, "key", key)
    for weights in ("w1", "w2"):
        twofour.compile(of_bits(weights, "a2"), torch.randn(3, 71), tokens=(3,), graph=True)
    assert len({case for case in cases if case.startswith("engines/")}) == 2


def test_what_the_time_of_a_graph_follows_from_tells_recipes_apart() -> None:
    def facts(weights: Any = "w4", inputs: str | None = "a8", **how: Any) -> str:
        model = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 4))
        options: dict[str, Any] = {"ends": None, **how}
        return repr(widths_and_kernels(twofour.quantize(model.eval(), weights, inputs, **options)))

    data = [torch.randn(4, 64)]
    found = [facts(), facts("w2"), facts({"0": "w2", "*": "w4"}), facts({"2": "w2", "*": "w4"}), facts("w4", "a4")]
    found += [facts(inputs=None), facts(data=data), facts({"0": "w4"}, group=32), facts(symmetric=False)]
    found += [facts(scales="tensor")]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_a_graph_may_tip_codes_and_is_right_where_none_are(factor: float, monkeypatch, no_measuring) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
    model, x = nn.Sequential(*layers, nn.Linear(64, 64)).eval(), torch.randn(512, 64)
    written = compiled_graph.rewrite_graph

    def otherwise(fast: nn.Module, graph: Any, *rest: Any) -> Any:
        """Put noise in front of all but the first product, and a factor behind the last."""
        found, nodes = written(fast, graph, *rest), graph.module.graph
        products = [node for node in nodes.nodes if str(node.target).startswith("bits_linear")]
        for node in products[1:]:
            with nodes.inserting_before(node):
                node.args = (nodes.call_function(torch.ops.aten.add.Tensor, (node.args[0], 1e-6)),)
        with nodes.inserting_after(products[-1]):
            products[-1].replace_all_uses_with(last := nodes.call_function(torch.ops.aten.mul.Tensor))
        last.args = products[-1], factor
        return found

    monkeypatch.setattr(compiled_graph, "rewrite_graph", otherwise)
    fast: Any = twofour.compile(twofour.quantize(model, "w4", "a8", ends=None), x, tokens=(512,), graph=True)
    account = fast.plan.account
    if factor == 1:
        assert account.engine == "graph" and 1e-4 < fast.plan.error < 1e-2
        assert f"differs from the layers by {fast.plan.error:.1e} on the example, since codes" in account.reason
    else:
        assert account.engine == "layers" and fast.plan.error == 0
        assert re.search(r"the rewritten graph differs from the layers by (9\.9e-04|1\.0e-03) ", account.reason)


def test_a_graph_makes_its_sums_in_whole_numbers_where_these_are_asked_for(monkeypatch, graph_wins) -> None:
    model, x = of_bits("w2", "a2", data=True), torch.randn(6, 71)
    fast: Any = twofour.compile(model, x, tokens=(6,), graph=True)
    assert fast.plan.account.engine == "graph"
    made: list[nn.Module] = []
    own = quantization.reference.integer_product
    monkeypatch.setattr(
        "twofour.quantization.layer.integer_product", lambda module, *given: made.append(module) or own(module, *given)
    )
    plain = fast(x)
    assert not made
    with quantization.in_whole_numbers(fast):
        assert torch.equal(fast(x), whole(model, x)) and made == [fast[0], fast[2], model[0], model[2]]  # type: ignore[index]
        again = copy.deepcopy(fast)  # is none of the reference
    made.clear()
    assert torch.equal(fast(x), plain) and torch.equal(again(x), plain) and not made


def test_a_file_holds_the_graph_of_layers_that_no_kernel_takes(tmp_path, graph_wins) -> None:
    model, x = nn.Sequential(nn.Linear(48, 16), nn.ReLU()).eval(), torch.randn(3, 48)
    twofour.quantize(model, "w4", "a8", group=16)
    fast = twofour.compile(model, x, tokens=(3,), graph=True)
    twofour.save(fast, tmp_path / "m")
    again: Any = twofour.load(tmp_path / "m", model)
    assert not any(run(again)) and again.plan.account.engine == "graph"
    torch.testing.assert_close(again(x), whole(model, x))
