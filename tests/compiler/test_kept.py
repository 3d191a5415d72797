"""What stays in memory of a compiled model's weights, and that what was given up comes back to the bit."""

from __future__ import annotations

import copy
import logging
import pickle
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

import twofour
from tests.compiler.whole import whole
from tests.graph.small import Encoder
from tests.turns import in_turn
from twofour.compiler.compile import with_plan
from twofour.compiler.decoding import memory_of
from twofour.compiler.kept import _programs, keep_what_runs
from twofour.compiler.layer import CompiledLinear
from twofour.compiler.layouts import few_layouts
from twofour.compiler.plan import Plan
from twofour.compiler.prepared import Ledger, PreparedWeights, RowsOf
from twofour.compiler.unfolded import _packed, _unpacked
from twofour.compiler.whole_model import WholeModel
from twofour.graph.executor.recorder import tensors_in
from twofour.kernels import find
from twofour.kernels.dense_matmul import ONEDNN, PLAIN
from twofour.native import pages
from twofour.packing import Packed, dense_of, pack

pytestmark = pytest.mark.usefixtures("no_measuring")

EXAMPLE = (torch.randint(0, 50, (2, 16)), torch.ones(2, 16))


def linears(fast: nn.Module) -> dict[str, CompiledLinear]:
    return {name: module for name, module in fast.named_modules() if isinstance(module, CompiledLinear)}


def same(one: Packed | torch.Tensor, other: Packed | torch.Tensor) -> bool:
    return type(one) is type(other) and torch.equal(dense_of(one), dense_of(other))


KEPT = [("float32", "2:4"), ("bfloat16", "dense"), ("int8", "2:4"), ("int4", "dense")]
MORE = [("float32", "dense"), ("bfloat16", "2:4"), ("int8", "dense"), ("int4", "2:4")]


@in_turn(("dtype", "kind"), KEPT)
def test_a_weight_is_kept_once_and_comes_back_to_the_bit(dtype: str, kind: str) -> None:
    assert_kept_once(dtype, kind)


@pytest.mark.long
@in_turn(("dtype", "kind"), MORE)
def test_every_other_weight_is_kept_once(dtype: str, kind: str) -> None:
    assert_kept_once(dtype, kind)


def assert_kept_once(dtype: str, kind: str) -> None:
    model = Encoder().eval()
    model = twofour.prune(model, "2:4", criterion="magnitude") if kind == "2:4" else model
    before: dict[str, Packed | torch.Tensor] = {}

    def noting(fast: nn.Module, plan: Plan) -> Plan:
        before.update({name: layer.prepared.stored() for name, layer in linears(fast).items()})
        return keep_what_runs(fast, plan)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys.modules[with_plan.__module__], "keep_what_runs", noting)
        fast = whole(model, EXAMPLE, dtype=dtype)
    own = linears(fast)
    given_up = {name for name, layer in own.items() if not layer.prepared.nbytes}
    assert given_up, "products of a graph have the rows of their layers"
    for name, layer in own.items():
        assert same(layer.prepared.stored(), before[name]), name
    assert any("are made when a call first wants them" in note for note in fast.plan.notes)
    with torch.inference_mode():
        want, found = model(*EXAMPLE), type(fast).forward(fast, *EXAMPLE)
    torch.testing.assert_close(found, want, atol=1e-4 if dtype == "float32" else 0.5, rtol=0.1)
    assert all(own[name].prepared.nbytes for name in given_up)


@pytest.mark.skipif(sys.platform != "linux", reason="weights have pages of their own on Linux alone")
def test_what_is_kept_stands_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "LEAST", 1 << 10)
    monkeypatch.setattr(pages, "_WEIGHTS", pages._Weights())
    held = list[tuple[int, int]]()

    def noting(tensors: Iterable[torch.Tensor]) -> None:
        tensors = list(tensors)
        for mapping in pages._WEIGHTS._mappings:  # pages of 2 MB are larger than this model
            mapping.large = {*range(0, pages.SHARED, pages.HUGE_PAGE)}
        pages._WEIGHTS.gather(tensors)
        (mapping,) = pages._WEIGHTS._mappings
        held.append((len(mapping.free), mapping.free[0][0]))

    monkeypatch.setattr(pages, "gather", noting)
    fast = whole(twofour.prune(Encoder().eval(), "2:4"), EXAMPLE)
    assert held and held[0][0] == 1, "nothing is free between the weights"
    assert held[0][1] <= fast.plan.bytes_after + 64 * len(fast.plan.layers)
    with torch.inference_mode():
        want = type(fast).forward(fast, *EXAMPLE)
        torch.testing.assert_close(fast(*EXAMPLE), want, atol=1e-4, rtol=1e-4)


def test_float32_takes_no_more_than_dense_and_says_when_it_will(caplog: pytest.LogCaptureFixture) -> None:
    for kind in ("dense", "2:4"):
        model = Encoder().eval()
        fast = whole(twofour.prune(model, "2:4") if kind == "2:4" else model, EXAMPLE)
        heads = 64 * 2 * len(fast.plan.layers)
        assert fast.plan.bytes_after <= fast.plan.bytes_before + heads, kind
    ledger = Ledger(dense=1000, kept=900)
    with caplog.at_level(logging.WARNING, logger="twofour.compiler"):
        ledger.add(50)
        assert not [record for record in caplog.records if "forms" in record.getMessage()]
        ledger.add(100 << 20)
        ledger.add(100)
    (record,) = (record for record in caplog.records if "forms" in record.getMessage())
    assert 'memory="small"' in record.getMessage()


def test_a_model_that_keeps_more_than_dense_says_so_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("twofour.compiler.prepared.too_many", lambda kept, dense: True)
    with caplog.at_level(logging.WARNING, logger="twofour.compiler"):
        fast = twofour.compile(nn.Sequential(nn.Linear(64, 64), nn.ReLU()).eval(), torch.randn(8, 64), progress=False)
    said = 'for speed some are kept in several forms; memory="small" keeps one of each'
    assert any(said in record.getMessage() for record in caplog.records)
    assert said in str(fast.plan)


def test_a_dense_layout_of_float32_is_kept_alone() -> None:
    rows, panels = "nm_matmul_2x4_f32_rows__scalar", "nm_matmul_2x4_f32_panels__scalar"
    sparse = [find(rows), find(panels)]
    dense = {1: {PLAIN.name: 1.0, ONEDNN.name: 2.0}, 64: {PLAIN.name: 8.0, ONEDNN.name: 5.0}}
    dense[8] = {PLAIN.name: 2.0, ONEDNN.name: 2.0}
    assert len(few_layouts([PLAIN, ONEDNN], dense).names) == 2
    assert few_layouts([PLAIN, ONEDNN], dense, 64, once=True).names == (ONEDNN.name,)
    assert few_layouts([PLAIN, ONEDNN], dense, 1, once=True).names == (PLAIN.name,)
    both = {1: {rows: 1.0, panels: 2.0}, 64: {rows: 9.0, panels: 4.0}}
    assert few_layouts(sparse, both, 64, once=True).names == (rows, panels), (
        "two of 2:4 are little more than one of dense"
    )


def test_a_layout_is_made_by_the_first_call_that_wants_it_and_travels() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 64)
    packed = pack(weight * twofour.patterns.parse("2:4").project(weight, absolute=True), "2:4")
    rows, panels = (find(f"nm_matmul_2x4_f32_{name}__scalar") for name in ("rows", "panels"))
    held = PreparedWeights([rows.prepare(packed), panels.prepare(packed)])
    whole_bytes, want = held.nbytes, held.source()
    held.keep({1})
    assert held.nbytes < whole_bytes and same(held.source(), want)
    again = pickle.loads(pickle.dumps(held))
    assert again.nbytes == held.nbytes and copy.deepcopy(held) is held
    for one in (held, again):
        one.ledger = Ledger(10 * whole_bytes, one.nbytes)
        assert one.layout(rows.layout) is None
        made = one.at(0)
        assert one.at(0) is made and one.nbytes == whole_bytes == one.ledger.kept
        assert torch.equal(made.tensor, rows.prepare(packed).tensor)
        assert len(one.tensors) == 2
    part = PreparedWeights([rows.prepare(pack(dense_of(packed)[16:48].contiguous(), "2:4"))])
    stored = part.stored()
    part.keep((), RowsOf(held, 16, 48))
    assert part.nbytes == 0 and same(part.stored(), stored) and same(part.source(), stored)


def test_torch_compile_makes_what_was_given_up() -> None:
    model = twofour.prune(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).eval(), "2:4")
    x = torch.randn(128, 64)
    fast = twofour.compile(model, x, graph=False, progress=False)
    for layer in linears(fast).values():
        layer.prepared.at(layer.prepared.first())
        layer.prepared.keep({layer.prepared.first()})
    outer = torch.compile(fast, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(outer(x), model(x), atol=1e-4, rtol=1e-4)


def test_saved_and_loaded_it_is_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = twofour.prune(Encoder().eval(), "2:4")
    fast = whole(model, EXAMPLE)
    twofour.save(fast, tmp_path / "model.safetensors")
    loaded = twofour.load(tmp_path / "model.safetensors", model)
    for name, layer in linears(loaded).items():
        assert torch.equal(dense_of(layer.prepared.source()), model.get_submodule(name).weight), name
    with torch.inference_mode():
        torch.testing.assert_close(loaded(*EXAMPLE), model(*EXAMPLE), atol=1e-4, rtol=1e-4)


def bert(seed: int = 0) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    sizes = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 128}
    config = transformers.BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)
    return transformers.BertModel(config).eval()


def bytes_held(fast: nn.Module) -> int:
    """Bytes of all weights of two axes and more that the model and its graph hold, each memory once."""
    programs = [one.python.names for one in _programs(vars(fast)["forward"])]
    found = (one for one in (*fast.parameters(), *tensors_in(programs)) if one.ndim > 1 and one.is_floating_point())
    every = {memory_of(one): one for one in found}
    tables = {memory_of(one.weight) for one in fast.modules() if isinstance(one, nn.Embedding)}
    return sum(one.nbytes for memory, one in every.items() if memory not in tables)


def test_small_keeps_dense_weights_of_a_graph_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = bert(), torch.randint(0, 50, (2, 16))
    example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    fast = whole(model, example, memory="small")
    twofour.save(fast, tmp_path / "model.safetensors")
    loaded = twofour.load(tmp_path / "model.safetensors", bert(1), memory="small")
    for one in (fast, loaded):
        assert isinstance(vars(one)["forward"], WholeModel), one.plan.account
        assert bytes_held(one) == one.plan.bytes_after == one.plan.bytes_before
        assert not [note for note in one.plan.notes if "kept in both" in note]
    monkeypatch.setattr("twofour.compiler.fused_matmuls.on_own", lambda made, own, **_: made)
    twice = whole(model, example, memory="small")
    assert bytes_held(twice) == twice.plan.bytes_after == 2 * fast.plan.bytes_before
    with torch.inference_mode():
        want, *found = (one(**example).last_hidden_state for one in (twice, fast, loaded))
    assert all(torch.equal(one, want) for one in found)


def test_small_keeps_weights_that_stand_turned_once() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_embd=64, n_layer=1, n_head=4, n_positions=32, use_cache=False)
    model, ids = transformers.GPT2Model(config).eval(), torch.randint(0, 50, (2, 16))
    fast = whole(model, {"input_ids": ids}, memory="small")
    assert isinstance(vars(fast)["forward"], WholeModel), fast.plan.account
    turned = sum(one.weight.nbytes for one in model.modules() if type(one).__name__ == "Conv1D")
    assert bytes_held(fast) == fast.plan.bytes_after == fast.plan.bytes_before == turned
    assert not [note for note in fast.plan.notes if "kept in both" in note]
    with torch.inference_mode():
        want, found = (one(input_ids=ids).last_hidden_state for one in (model, fast))
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)


def test_small_says_too_where_more_than_dense_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("twofour.compiler.prepared.HEADERS", 0)
    monkeypatch.setattr("twofour.compiler.fused_matmuls.on_own", lambda made, own, **_: made)
    with caplog.at_level(logging.WARNING, logger="twofour.compiler"):
        fast = whole(Encoder().eval(), EXAMPLE, memory="small")
    assert fast.plan.bytes_after > fast.plan.bytes_before
    for said in (caplog.text, str(fast.plan)):
        assert "kept in both; graph=False keeps one of each" in said


def test_two_bits_a_number() -> None:
    codes = torch.randint(0, 3, (1001,))
    assert torch.equal(_unpacked(_packed(codes), 1001), codes.int()) and len(_packed(codes)) == 251
