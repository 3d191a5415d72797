"""compile(..., graph=True): the same answers for every size and mask, from fewer and wider calls."""

import copy
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.compiler.small import mlp, quick
from tests.compiler.whole import close, pruned, served, whole
from tests.graph.small import Encoder, GatedBlock, PreNormBlock
from twofour.compiler.whole_model import WholeModel
from twofour.errors import CompileError
from twofour.patterns import parse

pytestmark = pytest.mark.usefixtures("no_measuring")


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
