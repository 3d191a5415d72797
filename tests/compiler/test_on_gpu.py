"""compile for a GPU: on one where there is one, else the same path on CPU tensors with Triton's interpreter."""

import copy
import pickle
import sys

import pytest
import torch
from torch import nn

import twofour
from twofour.compiler import choose, compile
from twofour.compiler.computing import Computing
from twofour.errors import CompileError, KernelError
from twofour.kernels.cuda import CudaKernel
from twofour.kernels.dispatch import DispatchTable
from twofour.kernels.nm_matmul.cuda import FEW_TOKENS, few_tokens
from twofour.kernels.nm_matmul.cuda.tuning import Tuning
from twofour.native import gpu
from twofour.packing import Packed

FEW, FEW_F16, FEW_INT4 = (row.name for row in FEW_TOKENS)
DENSE = "dense_matmul_bf16_linear__cuda"


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take CPU tensors for a GPU's: what the interpreter runs, and cuBLAS's rows, which call torch."""
    if not gpu.interpreted() or gpu.unavailable(triton=True):
        pytest.skip("Triton's interpreter is off, or Triton is not installed")
    libraries = CudaKernel.unavailable

    def unavailable(row: CudaKernel) -> str | None:
        return None if "linear__cuda" in row.name else libraries(row)

    monkeypatch.setattr(CudaKernel, "unavailable", unavailable)
    monkeypatch.setattr(sys.modules["twofour.compiler.compile"], "device_of", lambda _: "cuda")
    monkeypatch.setattr(gpu, "name", lambda: "interpreter")
    monkeypatch.setattr(gpu, "l2_bytes", lambda: 1 << 20)
    monkeypatch.setattr(few_tokens, "tuned", lambda: Tuning(None))
    monkeypatch.setenv("TWOFOUR_CACHE", "off")
    times = {FEW: 1.0, FEW_F16: 1.0, FEW_INT4: 1.0}

    def measured(source, kernels, layout, case, copies, cache, key) -> dict[str, float]:
        return {row.name: times.get(row.name, 2.0) * (case.tokens if row.triton else 1) for row in kernels}

    monkeypatch.setattr(choose, "times_on_gpu", measured)


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).to(dtype)


def pruned(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return twofour.prune(model(dtype), "2:4")


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype,limit", [("bfloat16", 2e-2), ("float16", 2e-2), ("int4", 0.2)])
def test_the_compiled_model_computes_what_the_masked_one_does(dtype: str, limit: float) -> None:
    masked, x = pruned(), torch.randn(3, 64, dtype=torch.bfloat16)
    fast = compile(masked, x, dtype=dtype, tokens=(1, 16), group=32 if dtype == "int4" else None)
    with torch.no_grad():
        want = masked(x)
    got = fast(x)
    assert got.dtype is torch.bfloat16 and off(got, want) < limit
    plan = fast.plan
    assert plan.isa == "interpreter" and all(layer.kernel.startswith(("nm_", "dense_")) for layer in plan.layers)
    assert "__" in str(plan) and fast(torch.randn(40, 64, dtype=torch.bfloat16)).shape == (40, 32)


@pytest.mark.usefixtures("interpreted")
def test_few_tokens_run_packed_and_many_dense() -> None:
    fast = compile(pruned(), torch.randn(1, 64, dtype=torch.bfloat16), dtype="bfloat16", tokens=(1, 64))
    assert fast[0].dispatch.names == (FEW, DENSE)
    assert fast[0].dispatch.at(1)[0].name == FEW and fast[0].dispatch.at(64)[0].name == DENSE


@pytest.mark.usefixtures("interpreted")
def test_a_dense_model_keeps_torchs_layers() -> None:
    fast = compile(model(), torch.randn(1, 64, dtype=torch.bfloat16), dtype="bfloat16")
    assert type(fast[0]) is nn.Linear and fast.plan.layers[0].kernel == DENSE


@pytest.mark.usefixtures("interpreted")
def test_the_gradient_of_the_input_goes_through_packed_weights() -> None:
    masked = pruned()
    x = torch.randn(2, 3, 64, dtype=torch.bfloat16, requires_grad=True)
    fast = compile(masked, tokens=(1,), dtype="bfloat16")
    fast(x).float().square().sum().backward()
    got, x.grad = x.grad, None
    masked(x).float().square().sum().backward()
    assert got is not None and x.grad is not None and off(got, x.grad) < 3e-2
    assert all(not p.requires_grad for p in fast.parameters())


@pytest.mark.usefixtures("interpreted")
def test_it_is_copied_pickled_saved_and_compiled_around(tmp_path) -> None:
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    fast = compile(pruned(), tokens=(1,), dtype="bfloat16")
    want = fast(x)
    assert torch.equal(copy.deepcopy(fast)(x), want)
    assert torch.equal(pickle.loads(pickle.dumps(fast))(x), want)
    assert isinstance(fast[0].source(), Packed)
    twofour.save(fast, tmp_path / "m.safetensors")
    back = twofour.load(tmp_path / "m.safetensors", model(), masked=True)
    assert twofour.check(back).ok
    with torch.no_grad():
        traced = torch.compile(fast, backend="eager", fullgraph=True)(x)
    assert torch.equal(traced, want)


@pytest.mark.usefixtures("interpreted")
def test_the_registered_operator_has_a_gradient_on_the_gpu_alone() -> None:
    layer = compile(pruned(), tokens=(1,), dtype="bfloat16")[0]
    x = torch.randn(2, 64, dtype=torch.bfloat16, requires_grad=True)
    arguments = layer.prepared.tensors, layer.bias, layer.dispatch_text, 96
    torch.ops.twofour.linear(x, *arguments).sum().backward()
    assert x.grad is not None
    with pytest.raises(KernelError, match="gradient"):
        torch.ops.twofour.linear(x, *arguments, "relu")


def test_types_of_the_gpu_are_the_gpus_alone() -> None:
    assert Computing.of("float8", "cuda").stored == "float32"
    for dtype in ("float16", "float8"):
        with pytest.raises(CompileError, match="dtype is not known"):
            twofour.compile(model(torch.float32), dtype=dtype)


@pytest.mark.usefixtures("interpreted")
def test_what_is_planned_on_a_gpu_is_refused() -> None:
    x = torch.randn(1, 64, dtype=torch.bfloat16)
    with pytest.raises(CompileError, match="planned"):
        compile(pruned(), x, dtype="int8", data=[x])
    with pytest.raises(CompileError, match="planned"):
        compile(pruned(), x, dtype="bfloat16", graph=True)


def test_a_dispatch_table_of_the_gpu_reads_every_type() -> None:
    if reason := gpu.unavailable(triton=True):
        pytest.skip(reason)
    assert DispatchTable((), (FEW,)).reads == (torch.float32, torch.bfloat16, torch.float16)
    assert DispatchTable((), (FEW,)).device == "cuda"
