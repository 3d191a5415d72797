"""compile on a GPU: what it answers, captured, compiled around, differentiated and saved."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import twofour
from twofour.errors import KernelError

LIMITS = {"bfloat16": 3e-2, "int8": 0.1, "float8": 0.15, "int4": 0.3, "float32": 1e-2}


def masked(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 256))
    return twofour.prune(model, "2:4").cuda().to(dtype)


def off(got: Tensor, want: Tensor) -> float:
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


def compiled(dtype: str = "bfloat16") -> tuple[nn.Module, nn.Module, Tensor]:
    model, x = masked(), torch.randn(16, 512, device="cuda", dtype=torch.bfloat16)
    return twofour.compile(model, x, dtype=dtype, tokens=(1, 256)), model, x


@pytest.mark.parametrize("dtype", LIMITS)
def test_it_computes_what_the_masked_model_does(dtype: str) -> None:
    fast, model, x = compiled(dtype)
    for tokens in (1, 16, 300):
        x = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            assert off(fast(x), model(x)) < LIMITS[dtype]
    print(fast.plan)
    assert "sm_" in fast.plan.isa and all(layer.times for layer in fast.plan.layers)


def test_a_cuda_graph_holds_it() -> None:
    fast, _, x = compiled()
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            want = fast(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fast(x)
    graph.replay()
    assert torch.equal(y, want)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_compile_goes_around_it(mode: str) -> None:
    fast, _, x = compiled()
    with torch.no_grad():
        want, around = fast(x), torch.compile(fast, fullgraph=True, mode=mode)
        for _ in range(3):
            assert off(around(x), want) < 1e-2


def test_the_gradient_of_the_input() -> None:
    fast, model, x = compiled()
    grads = []
    for module in (fast, model):
        leaf = x.clone().requires_grad_()
        module(leaf).float().square().sum().backward()
        assert leaf.grad is not None
        grads.append(leaf.grad)
    assert off(grads[0], grads[1]) < 3e-2


def test_it_is_copied_saved_and_refuses_the_cpu(tmp_path: Path) -> None:
    fast, model, x = compiled()
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(fast)(x), fast(x))
    twofour.save(fast, tmp_path / "m.safetensors")
    back = twofour.load(tmp_path / "m.safetensors", masked().cpu(), masked=True)
    assert twofour.check(back).ok
    with torch.no_grad():
        assert off(back.cuda()(x), model(x)) < 1e-2
    with pytest.raises(KernelError, match="does not fit"):
        twofour.compile(masked(), dtype="int8", tokens=(1,))[0](x.cpu())
