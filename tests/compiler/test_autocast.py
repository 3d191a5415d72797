"""Inside of `torch.autocast` compiled layers and models compute in the types that they were compiled for."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.compiler.small import mlp, quick
from tests.turns import in_turn
from twofour.compiler.conv import CompiledConv
from twofour.compiler.layer import CompiledLinear
from twofour.compiler.whole_model import WholeModel
from twofour.errors import KernelError

HALVES = (torch.bfloat16, torch.float16)


def pruned(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return twofour.prune(model, "2:4", criterion="magnitude").eval()


def inside(dtype: torch.dtype, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        return call(*args, **kwargs)


@in_turn("dtype", HALVES)
@in_turn("axes", [(5, 64), (2, 3, 64)])
def test_a_linear_reads_what_autocast_made(dtype: torch.dtype, axes: tuple[int, ...], no_measuring: None) -> None:
    fast, x = quick(pruned(mlp()), graph=False), torch.randn(axes).to(dtype)
    layer: Any = fast[0]
    assert isinstance(layer, CompiledLinear)
    want = layer(x.float())
    found = inside(dtype, layer, x)
    assert found.dtype is torch.float32 and torch.equal(found, want)
    with pytest.raises(KernelError, match="does not fit"):
        layer(x)
    with pytest.raises(KernelError, match="does not fit"):
        inside(dtype, layer, x[..., :63])
    with pytest.raises(KernelError, match=r"torch\.float64"):
        inside(dtype, layer, x.double())
    off = torch.autocast("cpu", enabled=False)
    with torch.autocast("cpu", dtype=dtype), off, pytest.raises(KernelError, match="outside of autocast"):
        layer(x)


@in_turn("dtype", HALVES)
def test_a_traced_linear_reads_what_autocast_made(dtype: torch.dtype, no_measuring: None) -> None:
    fast, x = quick(pruned(mlp()), graph=False), torch.randn(4, 64).to(dtype)
    traced: Any = torch.compile(fast[0], backend="eager")
    assert torch.equal(inside(dtype, traced, x), fast[0](x.float()))


@in_turn("dtype", HALVES)
@in_turn("graph", ["native", False])
def test_a_traced_model_reads_what_autocast_made(dtype: torch.dtype, graph: object, no_measuring: None) -> None:
    x = torch.randn(4, 64)
    fast = quick(pruned(mlp()), x, graph=graph)
    torch._dynamo.reset()
    traced: Any = torch.compile(nn.Sequential(fast), backend="eager", fullgraph=True)
    found, want = inside(dtype, traced, x.to(dtype)), fast(x.to(dtype).float())
    assert found.dtype is torch.float32
    assert torch.allclose(found, want, atol=1e-5 if graph else 3e-2)


@in_turn("dtype", HALVES)
@in_turn("computing", ["float32", "bfloat16", "int8"])
@in_turn("graph", [False, True])
def test_outer_layers_hand_over_what_autocast_made(
    dtype: torch.dtype, computing: str, graph: bool, no_measuring: None
) -> None:
    example = torch.randn(4, 64)
    fast = quick(pruned(mlp()), example, graph=graph, dtype=computing)
    outer = nn.Sequential(nn.Linear(32, 64), fast, nn.Linear(10, 3))
    x = torch.randn(4, 32)
    handed = inside(dtype, outer[0], x)
    assert handed.dtype is dtype
    found = inside(dtype, fast, handed)
    if graph or computing == "float32":
        assert found.dtype is torch.float32 and torch.isfinite(found).all()
    if graph:
        assert torch.equal(found, fast(handed.float()))
    assert inside(dtype, outer, x).dtype is dtype


@in_turn("dtype", HALVES)
@in_turn("dimensions", [1, 2])
def test_a_convolution_reads_what_autocast_made(dtype: torch.dtype, dimensions: int, no_measuring: None) -> None:
    kind: Any = nn.Conv2d if dimensions == 2 else nn.Conv1d
    model = pruned(nn.Sequential(kind(16, 32, 3, padding=1), nn.ReLU(), kind(32, 16, 1)))
    x = torch.randn(2, 16, *(9,) * dimensions)
    fast = twofour.compile(model, x, graph=False, memory="small")
    layer: Any = fast[0]
    assert isinstance(layer, CompiledConv)
    want = layer(x.to(dtype).float())
    found = inside(dtype, layer, x.to(dtype))
    assert found.dtype is torch.float32 and torch.equal(found, want)
    with pytest.raises(KernelError):
        layer(x.to(dtype))


@in_turn("dtype", HALVES)
@in_turn("graph", [False, True])
def test_convolutions_beside_layers_of_torch(dtype: torch.dtype, graph: bool, no_measuring: None) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(16, 16, 2, 2), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 8, 3))
    x = torch.randn(2, 16, 8, 8)
    fast = twofour.compile(pruned(model), x, graph=graph, memory="small")
    assert isinstance(fast[2], CompiledConv)
    want, found = fast(x), inside(dtype, fast, x)
    assert found.dtype is torch.float32
    if isinstance(vars(fast).get("forward"), WholeModel):
        assert torch.equal(found, want)
    else:
        assert torch.allclose(found, want, atol=3e-2)


@in_turn("dtype", HALVES)
@in_turn("cell", ["LSTM", "GRU", "RNN", "LSTMCell", "GRUCell"])
@in_turn("batch_first", [False, True])
def test_recurrent_layers_read_what_autocast_made(
    dtype: torch.dtype, cell: str, batch_first: bool, no_measuring: None
) -> None:
    torch.manual_seed(0)
    options = {} if cell.endswith("Cell") else {"batch_first": batch_first}
    fast = twofour.compile(
        pruned(getattr(nn, cell)(32, 64, **options)), torch.randn(*[3] * ("Cell" not in cell), 2, 32)
    )
    x = torch.randn(*[3] * ("Cell" not in cell), 2, 32).to(dtype)
    batch = 3 if batch_first and "Cell" not in cell else 2
    one = torch.randn(*[1] * ("Cell" not in cell), batch, 64).to(dtype)
    state, wide = ((one, one), (one.float(), one.float())) if "LSTM" in cell else (one, one.float())
    for given, exact in (((x,), (x.float(),)), ((x, state), (x.float(), wide))):
        found, want = inside(dtype, fast, *given), fast(*exact)
        pairs = zip(leaves(found), leaves(want), strict=True)
        assert all(a.dtype is torch.float32 and torch.equal(a, b) for a, b in pairs)
    with pytest.raises(KernelError):
        fast(x)


def leaves(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [leaf for one in value for leaf in leaves(one)]


def test_a_recurrent_layer_in_bfloat16_keeps_its_type(no_measuring: None) -> None:
    fast = twofour.compile(pruned(nn.GRU(32, 64).bfloat16()), torch.randn(3, 2, 32).bfloat16(), dtype="bfloat16")
    x = torch.randn(3, 2, 32).bfloat16()
    found, want = inside(torch.bfloat16, fast, x)[0], fast(x)[0]
    assert found.dtype is torch.bfloat16 and torch.equal(found, want)
    assert fast.bfloat16() is fast


@in_turn("dtype", HALVES)
def test_a_packed_sequence(dtype: torch.dtype, no_measuring: None) -> None:
    fast = twofour.compile(pruned(nn.GRU(32, 64)), torch.randn(3, 2, 32))
    x = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 2, 32), torch.tensor([3, 2]))
    found, want = inside(dtype, fast, x.to(dtype)), fast(x.to(dtype).float())
    assert found[0].data.dtype is torch.float32 and torch.equal(found[0].data, want[0].data)


@in_turn("dtype", HALVES)
@in_turn("widths", [("w4", "a8"), ("w1", "a2")])
def test_low_bits_answer(dtype: torch.dtype, widths: tuple[str, str], no_measuring: None) -> None:
    model = twofour.quantization.quantize(mlp().eval(), *widths)
    x = torch.randn(4, 64)
    for graph in (False, True):
        fast = quick(model, x, graph=graph)
        found = inside(dtype, fast, x)
        assert found.dtype is torch.float32 and torch.equal(found, fast(x))


@in_turn("dtype", HALVES)
@in_turn("kind", ["bfloat16", "int8"])
def test_tables_answer(dtype: torch.dtype, kind: str, no_measuring: None) -> None:
    model = pruned(nn.Sequential(nn.Embedding(50, 64), *mlp()))
    ids = torch.randint(0, 50, (2, 5))
    for graph in (False, True):
        fast = quick(deepcopy(model), ids, graph=graph, embeddings=kind)
        found = inside(dtype, fast, ids)
        assert found.dtype is torch.float32 and torch.equal(found, fast(ids))


class Attending(nn.Module):
    """One layer of attention, which answers its weights where it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.taking, self.giving, self.norm = nn.Linear(64, 192), nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor, weights: bool = False) -> Any:
        q, k, v = self.taking(x).chunk(3, -1)
        given = (q @ k.transpose(-1, -2) / 8).softmax(-1)
        y = self.norm(x + self.giving(given @ v))
        return (y, given) if weights else y


@in_turn("dtype", HALVES)
def test_a_call_that_the_graph_does_not_hold_for(dtype: torch.dtype, no_measuring: None) -> None:
    x = torch.randn(2, 16, 64)
    fast = quick(pruned(Attending()), x, graph="native")
    assert isinstance(vars(fast)["forward"], WholeModel), fast.plan.account
    for options in ({}, {"weights": True}):
        for given in (x, x.to(dtype)):
            found, want = inside(dtype, fast, given, **options), fast(given.float(), **options)
            pairs = zip(leaves(found), leaves(want), strict=True)
            assert all(a.dtype is torch.float32 and torch.equal(a, b) for a, b in pairs)
    alone = quick(pruned(Attending()), x, graph=False)
    found, want = inside(dtype, alone, x), alone(x)
    assert found.dtype is torch.float32 and torch.allclose(found, want, atol=3e-2)


@in_turn("dtype", HALVES)
def test_a_model_in_bfloat16_keeps_its_own_type(dtype: torch.dtype, no_measuring: None) -> None:
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    fast = quick(pruned(mlp().bfloat16()), x, graph=True, dtype="bfloat16")
    found = inside(dtype, fast, x)
    assert found.dtype is torch.bfloat16 and torch.equal(found, fast(x))


@in_turn("dtype", HALVES)
def test_a_decoder(dtype: torch.dtype, no_measuring: None) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=100, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=99
    )
    torch.manual_seed(0)
    model = pruned(transformers.GPT2LMHeadModel(config))
    ids = torch.randint(1, 98, (1, 12))
    fast: Any = quick(model, {"input_ids": ids})
    for given in ({"input_ids": ids}, {"input_ids": ids, "labels": ids}, {"input_ids": ids, "output_attentions": True}):
        found, want = inside(dtype, fast, **given).logits, fast(**given).logits
        assert found.dtype is torch.float32 and torch.equal(found, want), given
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    for beams in (1, 2):
        want = fast.generate(ids, num_beams=beams, **options)
        assert torch.equal(inside(dtype, fast.generate, ids, num_beams=beams, **options), want)
