"""Products of one input in a graph: joined where that is faster, to the bit, with no weight kept twice."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import twofour
from tests.compiler.small import quick
from tests.compiler.whole import called, close, pruned, served, whole
from tests.graph.small import Encoder
from twofour.compiler import fused_matmuls
from twofour.compiler.layer import CompiledLinear, PreparedWeights
from twofour.compiler.terms import Terms
from twofour.export import read
from twofour.export.file import write
from twofour.packing import Packed, pack
from twofour.patterns import parse

NONE = PreparedWeights(())

pytestmark = pytest.mark.usefixtures("no_measuring")


def test_dense_products_share_their_layers_weights_and_their_reason() -> None:
    fast = whole(Encoder().eval(), (torch.randint(0, 50, (2, 16)), torch.ones(2, 16)), dtype="int8")
    text = str(fast.plan)
    assert "no sparse kernel runs here" not in text and "dense: not 2:4, 1024 of 1024 groups have 3 or 4" in text
    assert "(int8, a range of each token, " in text
    layers = {name: module for name, module in fast.named_modules() if isinstance(module, CompiledLinear)}
    products = {call.name: call for call in called(fast) if isinstance(call, CompiledLinear) and call.name in layers}
    assert products, "each layer that is not joined is a product of its own"
    for name, product in products.items():
        kept = dict(zip(layers[name].prepared.layouts, layers[name].prepared.weights, strict=True))
        for layout, weight in zip(product.prepared.layouts, product.prepared.weights, strict=True):
            assert kept.get(layout, weight) is weight, f"{name} has its weight twice in {layout}"


def test_products_that_are_faster_apart_are_not_joined(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fused_matmuls, "together_and_apart", lambda *_: ({"together": 2.0, "apart": 1.0}, 0.0))
    model = pruned(Encoder(layers=1))
    example = torch.randint(0, 50, (2, 16)), torch.ones(2, 16)
    fast = whole(model, example)
    assert {entry.operator: entry.calls for entry in fast.plan.account.after}["linear"] == 3
    assert not any(entry.kind == "product" for entry in fast.plan.layers)
    assert not any("in the graph" in entry.reason for entry in fast.plan.layers)
    assert fast.plan.account.rewrites["products of one input joined"] == 0
    assert "products of one input joined" not in str(fast.plan), "what was measured away does not run"
    close(served(fast, caplog, *example), model(*example))


@pytest.mark.parametrize(("together", "joined"), [(1.04, True), (1.06, False)])
def test_a_tie_goes_to_fewer_calls(monkeypatch: pytest.MonkeyPatch, together: float, joined: bool) -> None:
    monkeypatch.setattr(fused_matmuls, "together_and_apart", lambda *_: ({"together": together, "apart": 1.0}, 0.0))
    fast = whole(pruned(Encoder(layers=1)), (torch.randint(0, 50, (2, 16)), torch.ones(2, 16)))
    assert fast.plan.account.rewrites["products of one input joined"] == joined
    assert ("a tie: one call" in str(fast.plan)) == joined


def test_the_plan_counts_the_joins_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([{"together": 2.0, "apart": 1.0}, {"together": 1.0, "apart": 2.0}])
    monkeypatch.setattr(fused_matmuls._Placer, "together_and_apart", lambda *_: (*next(times).values(), ""))
    fast = whole(pruned(Encoder(layers=2)), (torch.randint(0, 50, (2, 16)), torch.ones(2, 16)))
    joined = [entry for entry in fast.plan.layers if entry.parts]
    assert len(joined) == fast.plan.account.rewrites["products of one input joined"] == 1


@pytest.mark.parametrize("others", [(True, False), (False, True)])
def test_weights_of_different_kinds_keep_their_zero_points_when_joined(others: tuple[bool, bool]) -> None:
    weight = torch.randn(8, 64) + 1
    weight *= parse("2:4").project(weight, absolute=True)
    parts = [pack(weight, parse("2:4"), "int4", group=64, symmetric=symmetric) for symmetric in others]
    torch.testing.assert_close(fused_matmuls.joined(parts), torch.cat([part.unpack() for part in parts]))


def test_a_joined_product_keeps_the_whole_numbers_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer's scales need not be the largest value of a row by 127."""
    monkeypatch.setattr(fused_matmuls, "together_and_apart", lambda *_: ({"together": 1.0, "apart": 2.0}, 0.0))
    model, path = Encoder(layers=1).eval(), tmp_path / "model.safetensors"
    example = torch.randint(0, 50, (2, 16)), torch.ones(2, 16)
    twofour.save(quick(model, example, dtype="int8", graph=False), path)
    contents = read(path)
    coarse = {
        name: replace(held, values=held.values // 16, scales=held.scales * 15.7)
        for name, held in contents.packed.items()
        if held.scales is not None
    }
    write(path, replace(contents, packed={**contents.packed, **coarse}))
    loaded = twofour.load(path, model, graph=True, example=example)
    joined = next(call for call in called(loaded) if isinstance(call, CompiledLinear) and "query" in call.name)
    held = joined.prepared.stored()
    parts = [coarse[f"layers.0.{part}.weight"] for part in ("query", "key", "value")]
    assert isinstance(held, Packed) and torch.equal(held.values, torch.cat([part.values for part in parts]))
    assert torch.equal(held.scales, torch.cat([part.scales for part in parts]))


def test_sparse_and_dense_whole_numbers_are_joined_as_they_are() -> None:
    weight = torch.randn(8, 64)
    weight *= parse("2:4").project(weight, absolute=True)
    parts = [pack(weight, "2:4", "int8"), pack(torch.randn(8, 64), "dense", "int8")]
    parts = [replace(part, values=part.values // 16, scales=part.scales * 15.7) for part in parts]
    found = fused_matmuls.joined(parts)
    assert isinstance(found, Packed) and not found.header.sparse
    assert torch.equal(found.scales, torch.cat([part.scales for part in parts]))
    assert torch.equal(found.unpack(), torch.cat([part.unpack() for part in parts]))


def test_joined_products_are_timed_in_the_type_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []
    chosen = Terms.choose

    def timed(layer: nn.Module, parts: object, tokens: int, activations: torch.dtype) -> object:
        seen.append(activations)
        return {"together": 1.0, "apart": 2.0}, 0.0

    def measured(*args: object, **options: object) -> object:
        if "dtype" in options:  # a product of the graph, not a layer
            seen.append(options["activations"])  # type: ignore[arg-type]
        return chosen(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(fused_matmuls, "together_and_apart", timed)
    monkeypatch.setattr(Terms, "choose", measured)
    example = torch.randint(0, 50, (2, 8)), torch.ones(2, 8)
    quick(pruned(Encoder(layers=1)).bfloat16(), example, graph=True, dtype="bfloat16")
    assert seen == [torch.bfloat16, torch.bfloat16]


def test_small_memory_keeps_no_weight_twice(caplog: pytest.LogCaptureFixture) -> None:
    model = pruned(Encoder())
    example = torch.randint(0, 50, (2, 16)), torch.ones(2, 16)
    fast = whole(model, example, memory="small")
    plain = quick(model, memory="small")
    assert fast.plan.bytes_after == plain.plan.bytes_after
    assert "products of one input joined" not in fast.plan.account.rewrites
    held = {tensor.data_ptr() for layer in plain.modules() for tensor in getattr(layer, "prepared", NONE).tensors}
    layers = [layer for layer in called(fast) if isinstance(layer, fused_matmuls.ProductLayer)]
    own = {tensor.data_ptr() for layer in fast.modules() for tensor in getattr(layer, "prepared", NONE).tensors}
    assert len(own) == len(held) and layers
    assert {tensor.data_ptr() for layer in layers for tensor in layer.prepared.tensors} <= own
    close(served(fast, caplog, *example), model(*example))
