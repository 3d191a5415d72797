"""compile(..., graph=True): the same answers for every size and mask, from fewer and wider calls."""

import copy
import io
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.compiler.small import Branching, mlp, quick
from tests.graph.small import Encoder, GatedBlock, PreNormBlock
from twofour.compiler import fused_matmuls
from twofour.compiler import graph as compiled_graph
from twofour.compiler.layer import CompiledLinear, PreparedWeights
from twofour.compiler.terms import Terms
from twofour.compiler.whole_model import WholeModel
from twofour.errors import CompileError
from twofour.export import read
from twofour.export.file import write
from twofour.graph.blocks import Always, Blocks
from twofour.packing import Packed, pack
from twofour.patterns import parse

NONE = PreparedWeights(())

pytestmark = pytest.mark.usefixtures("no_measuring")


def pruned(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    if isinstance(model, PreNormBlock):  # its weights are (in, out) and no layer's
        for weight in model.weights:
            weight.data *= parse("2:4").project(weight.data.t(), absolute=True).t()
        return model.eval()
    return twofour.prune(model.eval(), "2:4")


def whole(model: nn.Module, example: object, **options: object) -> nn.Module:
    fast = quick(model, example, graph=True, **options)
    assert isinstance(fast.forward, WholeModel), fast.plan.account
    return fast


def served(fast: nn.Module, caplog: pytest.LogCaptureFixture, *inputs: Tensor) -> Tensor:
    """The answer, which must come from the graph."""
    with caplog.at_level(logging.WARNING, "twofour.compiler"), torch.inference_mode():
        y = fast(*inputs)
    assert "layer by layer" not in caplog.text
    return y


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want.detach(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("block", [GatedBlock, PreNormBlock])
def test_blocks_serve_every_batch_and_length(block: type[nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    model = pruned(block())
    fast = whole(model, torch.randn(1, 12, 64))
    for shape in ((1, 12, 64), (3, 5, 64), (2, 1, 64), (1, 1, 64), (1, 40, 64)):
        x = torch.randn(shape)
        close(served(fast, caplog, x), model(x))


def test_an_encoder_with_padding_masks(caplog: pytest.LogCaptureFixture) -> None:
    model = pruned(Encoder())
    fast = whole(model, (torch.randint(0, 50, (1, 16)), torch.ones(1, 16, dtype=torch.long)))
    for batch, length in ((1, 16), (4, 9), (2, 40)):
        ids, mask = torch.randint(0, 50, (batch, length)), torch.ones(batch, length, dtype=torch.long)
        mask[-1, length // 2 :] = 0
        got, real = served(fast, caplog, ids, mask), mask == 1
        close(got[real], model(ids, mask)[real])
        assert not got[~real].any(), "zeros stand at padding"
    rewrites = fast.plan.account.rewrites
    assert rewrites["products of one input joined"] == 2 and rewrites["attention fused"] == 2


def test_a_call_of_another_structure_runs_layer_by_layer_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model = pruned(Encoder())
    ids = torch.randint(0, 50, (2, 8))
    fast = whole(model, (ids, torch.ones(2, 8)))
    with caplog.at_level(logging.WARNING, "twofour.compiler"):
        close(fast(ids), model(ids))
        close(fast(ids=ids), model(ids))
    assert caplog.text.count("layer by layer") == 1
    close(fast(mask=torch.ones(2, 8), ids=ids), model(ids))


@pytest.mark.parametrize("norm_first", [False, True])
def test_torch_encoder_layers(norm_first: bool, caplog: pytest.LogCaptureFixture) -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=norm_first, activation="gelu")
    model = pruned(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    joined = model.layers[0].self_attn.in_proj_weight
    joined.data *= parse("2:4").project(joined.data, absolute=True)
    fast = whole(model, torch.randn(1, 10, 64))
    for shape in ((1, 10, 64), (3, 7, 64)):
        x = torch.randn(shape)
        with torch.inference_mode():
            torch.testing.assert_close(served(fast, caplog, x), model(x), atol=1e-4, rtol=1e-4)
    assert fast.plan.account.rewrites["attention fused"] == 2
    found = {entry.name: entry for entry in fast.plan.layers}
    assert len(found) == len(fast.plan.layers), "each layer is listed once"
    attention = found["layers.0.self_attn"]
    assert attention.sparse and attention.kind == "MultiheadAttention", "in_proj runs packed too"
    assert attention.bytes_after > attention.bytes_before == joined.nbytes, "beside the dense weight"


def test_the_plan_accounts_for_the_time() -> None:
    fast = whole(pruned(Encoder()), (torch.randint(0, 50, (2, 16)), torch.ones(2, 16)))
    account = fast.plan.account
    assert account.engine == "graph" and set(account.engine_ms) == {"layers", "graph"}
    before = {entry.operator: entry for entry in account.before}
    after = {entry.operator: entry for entry in account.after}
    assert before["linear"].calls == 12 and before["scaled_dot_product_attention"].calls == 2
    fused = "mlp+gelu+add+norm", "linear+add+norm", "attention"
    assert [after[operator].calls for operator in fused] == [2, 2, 2]
    text = str(fast.plan)
    assert "whole model: graph" in text and "before:" in text and "after:" in text
    assert fast.plan.to_dict()["account"]["engine"] == "graph"
    found = {entry.name: entry for entry in fast.plan.layers}
    assert len(found) == len(fast.plan.layers), "each is listed once"
    assert "12 of 12 layers run sparse" in text, "joined products are no layers"
    joined = found["layers.0.(query + key + value)"]
    assert joined.parts == tuple(f"layers.0.{part}" for part in ("query", "key", "value"))
    assert all("a part of `layers.0.(query" in found[part].reason for part in joined.parts)


def test_dense_products_share_their_layers_weights_and_their_reason() -> None:
    fast = whole(Encoder().eval(), (torch.randint(0, 50, (2, 16)), torch.ones(2, 16)), dtype="int8")
    text = str(fast.plan)
    assert "no sparse kernel runs here" not in text and "dense: not 2:4, 1024 of 1024 groups have 3 or 4" in text
    assert "(int8, a range of each token, " in text
    layers = {name: module for name, module in fast.named_modules() if isinstance(module, CompiledLinear)}
    called = [getattr(call, "__self__", None) for call in fast.forward.program.python.names.values()]
    products = {call.name: call for call in called if isinstance(call, CompiledLinear) and call.name in layers}
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


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_other_computing_types(dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    model = pruned(Encoder(layers=1))
    example = torch.randint(0, 50, (2, 8)), torch.ones(2, 8)
    fast = whole(model, example, dtype=dtype)
    torch.testing.assert_close(served(fast, caplog, *example), model(*example).detach(), atol=0.1, rtol=0.1)


def test_a_frozen_branch_on_a_size_is_noticed() -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y * 2 if x.shape[0] == 1 else y

    model = pruned(Single())
    fast = whole(model, torch.randn(4, 64))
    for count in (1, 3):
        x = torch.randn(count, 64)
        close(fast(x), model(x))


def test_graph_needs_an_example() -> None:
    with pytest.raises(CompileError, match="graph=True needs an example"):
        quick(mlp(), graph=True)


def test_copies_and_pickles() -> None:
    model = pruned(Encoder())
    example = torch.randint(0, 50, (2, 8)), torch.ones(2, 8)
    fast = whole(model, example)
    want = fast(*example)
    twin = copy.deepcopy(fast)
    assert twin.forward.model is twin and torch.equal(twin(*example), want)
    stream = io.BytesIO()
    torch.save(fast, stream)
    stream.seek(0)
    torch.testing.assert_close(torch.load(stream, weights_only=False)(*example), want)


def test_several_threads_at_once() -> None:
    model = pruned(Encoder())
    fast = whole(model, (torch.randint(0, 50, (2, 8)), torch.ones(2, 8)))
    inputs = [(torch.randint(0, 50, (1 + i % 3, 5 + i)), torch.ones(1 + i % 3, 5 + i)) for i in range(12)]
    wanted = [model(*entry).detach() for entry in inputs]

    def run(entry: tuple[Tensor, Tensor]) -> Tensor:
        with torch.inference_mode():
            return fast(*entry)

    with ThreadPoolExecutor(4) as pool:
        for got, want in zip(pool.map(run, inputs * 3), wanted * 3, strict=True):
            close(got, want)


def test_save_and_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = pruned(Encoder())
    example = torch.randint(0, 50, (2, 8)), torch.ones(2, 8)
    twofour.save(whole(model, example), tmp_path / "model.safetensors")
    loaded = twofour.load(tmp_path / "model.safetensors", Encoder(), graph=True, example=example)
    assert isinstance(loaded.forward, WholeModel)
    close(served(loaded, caplog, *example), model(*example))
    plain = twofour.load(tmp_path / "model.safetensors", Encoder())
    close(plain(*example), model(*example))


def test_every_level_compiles(every_isa: str, caplog: pytest.LogCaptureFixture) -> None:
    model = pruned(Encoder(layers=1))
    example = torch.randint(0, 50, (1, 8)), torch.ones(1, 8)
    fast = quick(model, example, graph=True, memory="small")
    close(served(fast, caplog, *example), model(*example))


def test_torch_compile_around_it() -> None:
    model = pruned(Encoder())
    example = torch.randint(0, 50, (2, 8)), torch.ones(2, 8)
    fast = whole(model, example)
    torch._dynamo.reset()
    with torch.inference_mode():
        close(torch.compile(fast, backend="aot_eager")(*example), model(*example))


def test_a_small_convolutional_net(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
            self.second, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu_(self.norm(self.first(x)))
            return self.head((x + self.second(x)).relu().mean((2, 3)))

    model = Net().eval()
    model.norm.running_mean.uniform_(-1, 1)
    model.norm.running_var.uniform_(0.5, 2)
    fast = whole(model, torch.randn(1, 3, 8, 8))
    for shape in ((1, 3, 8, 8), (2, 3, 12, 6)):
        x = torch.randn(shape)
        close(served(fast, caplog, x), model(x))


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
    called = [getattr(call, "__self__", None) for call in loaded.forward.program.python.names.values()]
    joined = next(call for call in called if isinstance(call, CompiledLinear) and "query" in call.name)
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


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_weights_left_to_torch_are_not_rounded(dtype: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    twofour.prune(model, "2:4", skip="*self_attn").eval()  # attention's own weights: dense, and torch's
    example = torch.randn(4, 1, 64)
    layers = twofour.compile(model, example, dtype=dtype, tokens=(1, 8))
    graph = twofour.compile(model, example, dtype=dtype, tokens=(1, 8), graph=True)
    assert "differs" not in graph.plan.account.reason, graph.plan.account.reason
    kernels = [row.kernel for row in graph.plan.layers if "self_attn" in row.name]
    assert kernels and all(dtype not in kernel for kernel in kernels), kernels
    assert graph.plan.error <= 1.2 * layers.plan.error


def test_small_memory_keeps_no_weight_twice(caplog: pytest.LogCaptureFixture) -> None:
    model = pruned(Encoder())
    example = torch.randint(0, 50, (2, 16)), torch.ones(2, 16)
    fast = whole(model, example, memory="small")
    plain = quick(model, memory="small")
    assert fast.plan.bytes_after == plain.plan.bytes_after
    assert "products of one input joined" not in fast.plan.account.rewrites
    held = {tensor.data_ptr() for layer in plain.modules() for tensor in getattr(layer, "prepared", NONE).tensors}
    called = [getattr(value, "__self__", None) for value in fast.forward.program.python.names.values()]
    layers = [layer for layer in called if isinstance(layer, fused_matmuls.ProductLayer)]
    own = {tensor.data_ptr() for layer in fast.modules() for tensor in getattr(layer, "prepared", NONE).tensors}
    assert len(own) == len(held) and layers
    assert {tensor.data_ptr() for layer in layers for tensor in layer.prepared.tensors} <= own
    close(served(fast, caplog, *example), model(*example))


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


@pytest.mark.parametrize(
    ("block", "dtype"),
    [
        (GatedBlock, "bfloat16"),
        (PreNormBlock, "int8"),
        pytest.param(GatedBlock, "int8", marks=pytest.mark.long),
        pytest.param(PreNormBlock, "bfloat16", marks=pytest.mark.long),
    ],
)
def test_coarser_types_hand_bfloat16_on(block: type[nn.Module], dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    model = pruned(block())
    fast = whole(model, torch.randn(2, 12, 64), dtype=dtype)
    assert fast.plan.account.rewrites["activations between layers in bfloat16"] > 10
    assert "activations between layers in bfloat16" in str(fast.plan)
    for shape in ((2, 12, 64), (1, 40, 64), (1, 1, 64)):
        x = torch.randn(shape)
        y, want = served(fast, caplog, x), model(x)
        assert y.dtype is torch.float32 and (y - want).norm() <= 0.03 * want.norm()
    few = whole(model, torch.randn(1, 12, 64), dtype=dtype)
    assert "activations between layers in bfloat16" not in few.plan.account.rewrites


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
