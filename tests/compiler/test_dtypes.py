"""Models compiled in bfloat16, int8 and int4: what they compute, what they take, and their way through a file."""

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import twofour
from tests.compiler.small import mlp, quick
from twofour.compiler import CompiledLinear, Plan
from twofour.errors import CompileError, FormatError
from twofour.packing import Packed

TOLERANCE = {"bfloat16": 1e-2, "int8": 2e-2, "int4": 0.2}
"""Relative error against the masked model: rounding of weights and, but for int4, of activations."""


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_each_type_computes_what_the_masked_model_does(dtype: str) -> None:
    model = twofour.prune(mlp(), "2:4").eval()
    fast = quick(model, torch.randn(7, 64), dtype=dtype)
    assert isinstance(fast.plan, Plan)
    assert fast.plan.dtype == dtype and fast.plan.error is not None
    assert fast.plan.error <= TOLERANCE[dtype]
    with torch.inference_mode():
        for shape in ((1, 64), (40, 64), (2, 3, 64), (0, 64)):
            x = torch.randn(shape)
            y = fast(x)
            assert y.dtype == torch.float32 and y.shape == (*shape[:-1], 10)
            if y.numel():
                assert relative(y, model(x)) <= 1.5 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_bfloat16_models_stay_bfloat16_outside(dtype: str) -> None:
    model = twofour.prune(mlp(), "2:4").eval().to(torch.bfloat16)
    fast = quick(model, torch.randn(7, 64).bfloat16(), dtype=dtype)
    x = torch.randn(9, 64).bfloat16()
    with torch.inference_mode():
        assert fast(x).dtype == torch.bfloat16
        assert relative(fast(x), model(x)) <= TOLERANCE[dtype] + 2e-2


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_small_memory_keeps_fewer_bytes_than_float32_packed(dtype: str) -> None:
    torch.manual_seed(0)
    model = twofour.prune(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)), "2:4")
    fast = quick(model, dtype=dtype, memory="small")
    assert isinstance(fast, nn.Sequential) and isinstance(fast.plan, Plan)
    dense = 4 * 2 * 256 * 512
    # Values, a quarter of a byte of indices a kept value, and 4 bytes a scale.
    packed = {"bfloat16": 0.28125, "int8": 0.15625, "int4": 0.09375}[dtype] * dense
    assert packed <= fast.plan.bytes_after <= 1.25 * packed
    assert all(isinstance(layer.prepared.source(), Packed) for layer in fast if isinstance(layer, CompiledLinear))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("inside", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_torch_compile_around_each_type(dtype: str, inside: torch.dtype) -> None:
    model = twofour.prune(mlp(), "2:4").eval().to(inside)
    fast = quick(model, dtype=dtype, memory="small")
    torch._dynamo.reset()
    outer = torch.compile(fast, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        for tokens in (4, 40):
            x = torch.randn(tokens, 64).to(inside)
            y = outer(x)
            assert y.dtype == inside and relative(y, model(x)) <= 1.5 * TOLERANCE[dtype] + 2e-2
            assert relative(y, fast(x)) <= 1e-2 * (inside is torch.bfloat16) + 1e-5, "the kernels of the layers"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("memory", ["fast", "small"])
def test_a_file_brings_the_same_model_back(dtype: str, memory: str, tmp_path: Path) -> None:
    model = twofour.prune(mlp(), "2:4").eval()
    fast = quick(model, dtype=dtype, memory=memory)
    twofour.save(fast, tmp_path / "m.safetensors")
    back = twofour.load(tmp_path / "m.safetensors", mlp(1))
    assert back.plan.dtype == dtype
    x = torch.randn(5, 64)
    with torch.inference_mode():
        assert relative(back(x), fast(x)) <= 0.5 * TOLERANCE[dtype]
        for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
            torch.testing.assert_close(other(x), fast(x))


def test_static_ranges_come_from_data_and_travel_in_the_file(tmp_path: Path) -> None:
    model = twofour.prune(mlp(), "2:4").eval()
    data = [(3 * torch.randn(50, 64), torch.zeros(50)) for _ in range(3)]
    fast = quick(model, dtype="int8", data=data)
    assert isinstance(fast, nn.Sequential)
    first = fast[0]
    assert isinstance(first, CompiledLinear) and not first.problem.quantization.dynamic
    assert "(int8, static ranges of the data, " in str(fast.plan)
    low, high = min(x.min() for x, _ in data), max(x.max() for x, _ in data)
    assert first.problem.quantization.x_scale == pytest.approx(float(high - low) / 255, rel=1e-5)
    x = data[0][0]
    with torch.inference_mode():
        assert relative(fast(x), model(x)) <= 3e-2
        small = 1e-3 * x  # below the step of the static range: all that is left is the rounding
        assert relative(fast(small), model(small)) > relative(quick(model, dtype="int8")(small), model(small))
        path = tmp_path / "m.safetensors"
        twofour.save(fast, path)
        back = twofour.load(path, mlp(1))
        assert back.get_submodule("0").problem.quantization == first.problem.quantization
        assert relative(back(x), fast(x)) <= 1e-2
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        described = json.loads(file.metadata()["twofour"])
    described["settings"]["ranges"]["0"] = [0.0, 3]
    save_file(tensors, path, {"format": "pt", "twofour": json.dumps(described)})
    with pytest.raises(FormatError, match="impossible input range"):
        twofour.load(path, mlp(1))


def test_data_that_do_not_serve_are_refused() -> None:
    model = twofour.prune(mlp(), "2:4")
    with pytest.raises(CompileError, match="data are for int8 alone"):
        quick(model, dtype="bfloat16", data=[torch.randn(2, 64)])
    with pytest.raises(CompileError, match="no data"):
        quick(model, dtype="int8", data=[])
    with pytest.raises(CompileError, match="does not run on the data"):
        quick(model, dtype="int8", data=[torch.randn(2, 63)])
    with pytest.raises(CompileError, match="infinite"):
        quick(model, dtype="int8", data=[torch.full((2, 64), float("inf"))])
