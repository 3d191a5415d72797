"""Compiled models that are cast, moved, shared, traced or called under transforms: the same numbers, or a refusal."""

import copy
import pickle

import pytest
import torch
from torch import nn

import twofour
from tests.compiler.small import quick
from twofour.errors import KernelError, LayerError
from twofour.kernels import available, convolutions
from twofour.kernels.attention import attention
from twofour.kernels.conv import ConvProblem, Geometry
from twofour.kernels.norm import norm
from twofour.kernels.problem import Problem
from twofour.packing import pack

pytestmark = pytest.mark.usefixtures("no_measuring")

CASTS = ("half", "bfloat16", "double", "float")


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return twofour.prune(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)), "2:4").eval()


def _images() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 1)
    return twofour.prune(nn.Sequential(*layers), "2:4").eval()


CASES = [(_mlp, (16, 64), False), (_images, (2, 16, 9, 9), False), (_mlp, (16, 64), True)]


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize(("make", "shape", "graph"), CASES)
def test_a_cast_that_no_kernel_reads_changes_nothing(make, shape, graph, cast: str) -> None:
    example = torch.randn(shape)
    model = nn.Sequential(*make(), nn.GroupNorm(1, shape[1]))
    fast = quick(model, example, memory="small", graph=graph)
    want, held = fast(example), fast.state_dict()
    for copied in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        around = nn.ModuleDict({"inner": copied})
        if cast == "float":
            assert around.float()["inner"] is copied
        else:
            with pytest.raises(LayerError, match=r"layer `0`: a compiled layer cannot be put in[\s\S]*TwoFourConfig"):
                getattr(around, cast)()
            with pytest.raises(LayerError, match="layer `0`"):
                getattr(copied[0], cast)()
        assert all(torch.equal(tensor, held[name]) for name, tensor in copied.state_dict().items())
        assert {tensor.dtype for tensor in copied.state_dict().values()} == {torch.float32}
        assert torch.equal(copied(example), want)
        torch.testing.assert_close(type(fast).forward(copied, example), want, rtol=1e-5, atol=1e-5)


def test_tables_and_recurrent_layers_refuse_it() -> None:
    torch.manual_seed(0)
    table = quick(nn.Sequential(nn.Embedding(50, 64), *_mlp()), dtype="int8", embeddings="int8", memory="small")
    recurrent = twofour.compile(twofour.prune(nn.LSTM(32, 64), "2:4").eval(), torch.randn(3, 2, 32))
    for fast in (table, recurrent):
        for cast in CASTS[:3]:
            with pytest.raises(LayerError, match="cannot be put in another type"):
                getattr(fast, cast)()
        assert fast.float().to(device="cpu") is fast


@pytest.mark.parametrize(("dtype", "cast"), [("bfloat16", torch.bfloat16), ("int8", torch.bfloat16)])
def test_the_natural_call_of_a_bfloat16_model(dtype: str, cast: torch.dtype) -> None:
    model, example = _mlp(), torch.randn(16, 64)
    fast = quick(model, example, dtype=dtype, memory="small").to(cast)
    y = fast(example.to(cast))
    assert y.dtype is cast
    torch.testing.assert_close(y.float(), model(example).detach(), rtol=0.1, atol=0.1)


@pytest.mark.parametrize(("make", "shape", "graph"), CASES)
@pytest.mark.parametrize("bias", [True, False])
def test_another_device_is_refused(make, shape, graph, bias: bool) -> None:
    fast = quick(make(), torch.randn(shape), memory="small", graph=graph)
    if not bias:
        for module in fast:
            module.register_parameter("bias", None)
    with pytest.raises(LayerError, match=r"layer `0`: a compiled layer cannot be moved[\s\S]*meta[\s\S]*on the CPU"):
        fast.to("meta")


def test_what_changes_nothing_goes_on_working() -> None:
    example = torch.randn(16, 64)
    fast = quick(_mlp(), example, memory="small")
    want = fast(example)
    for same in (fast.to("cpu"), fast.cpu(), fast.float(), fast.eval(), fast.share_memory(), copy.deepcopy(fast)):
        assert torch.equal(same(example), want)
    assert fast[0].bias.is_shared()
    assert torch.equal(pickle.loads(pickle.dumps(fast))(example), want)


def _biases(rows: int) -> list[torch.Tensor]:
    kinds = (torch.float16, torch.bfloat16, torch.float64)
    return [*(torch.zeros(rows, dtype=kind) for kind in kinds), torch.zeros(rows, device="meta"), torch.zeros(rows - 1)]


@pytest.mark.parametrize("operation", ["nm_matmul", "dense_matmul"])
def test_no_native_product_reads_another_bias(operation: str) -> None:
    torch.manual_seed(0)
    weight = twofour.prune(nn.Linear(64, 32), "2:4").weight.detach()
    seen = 0
    for kernel in available(operation):
        if "torch" in kernel.name or "onednn" in kernel.name or "mkl" in kernel.name:
            continue
        given = pack(weight, "2:4", kernel.dtype, **({"group": 32} if kernel.dtype == "int4" else {}))
        if operation == "nm_matmul" and (kernel.pattern != "2:4" or kernel.refuses(given)):
            continue
        prepared = kernel.prepare(given if operation == "nm_matmul" else weight)
        for bias in _biases(32):
            seen += 1
            with pytest.raises(KernelError, match=r"cannot read its bias[\s\S]*torch.float32 \(32,\)"):
                kernel.run(torch.randn(3, 64), prepared, bias, Problem(32))
    assert seen


def test_no_native_convolution_reads_another_bias() -> None:
    conv = twofour.prune(nn.Conv2d(16, 32, 1), "2:4")
    geometry = Geometry.of(conv)
    kernels = [k for k in convolutions() if k.operation == "nm_conv" and not k.refuses(geometry) and k.isa != "any"]
    assert kernels
    for kernel in kernels:
        prepared = kernel.prepare(conv.weight.detach(), geometry)
        for bias in _biases(32):
            with pytest.raises(KernelError, match="cannot read its bias"):
                kernel.run(torch.randn(2, 16, 5, 5), prepared, bias, ConvProblem.of(geometry))


def test_no_normalisation_reads_a_weight_elsewhere() -> None:
    with pytest.raises(KernelError, match="a normalisation cannot read an operand"):
        norm(torch.randn(2, 8), torch.ones(8, device="meta"), None, 1e-5)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace.* is deprecated")
@pytest.mark.parametrize(("make", "shape", "graph"), CASES)
def test_a_trace_holds_the_products(make, shape, graph) -> None:
    model, example = make(), torch.randn(shape)
    fast = quick(model, example, memory="small", graph=graph)
    with torch.no_grad():
        traced = torch.jit.trace(fast, (example,))
        fewer = torch.randn(1, *shape[1:])
        torch.testing.assert_close(traced(fewer), model(fewer), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace.* is deprecated")
def test_a_trace_holds_attention_and_normalisation() -> None:
    q, other = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
    traced = torch.jit.trace(lambda q: attention(q, q, q), (q,))
    torch.testing.assert_close(traced(other), nn.functional.scaled_dot_product_attention(other, other, other))
    traced = torch.jit.trace(lambda x: norm(x, None, None, 1e-5), (q,))
    torch.testing.assert_close(traced(other), nn.functional.layer_norm(other, (8,)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda x: x.numpy(), r"a numpy.ndarray[\s\S]*torch.as_tensor\(x\)"),
        (lambda x: x.tolist(), r"a builtins.list[\s\S]*torch.as_tensor\(x\)"),
        (lambda x: x.to_sparse(), r"layout torch.sparse_coo[\s\S]*x.to_dense\(\)"),
    ],
)
@pytest.mark.parametrize(("make", "shape", "graph"), CASES)
def test_an_input_without_an_address_is_refused(make, shape, graph, given, said: str) -> None:
    example = torch.randn(shape)
    fast = quick(make(), example, memory="small", graph=graph)
    with pytest.raises(KernelError, match=rf"layer `0`: the input of a compiled layer does not fit[\s\S]*{said}"):
        fast(given(example))


@pytest.mark.parametrize(("make", "shape", "graph"), CASES)
def test_transforms_of_torch_func_are_refused(make, shape, graph) -> None:
    example = torch.randn(shape)
    fast = quick(make(), example, memory="small", graph=graph)
    with pytest.raises(KernelError, match=r"inside torch.vmap[\s\S]*on the whole batch"):
        torch.vmap(fast)(example.expand(3, *shape))
