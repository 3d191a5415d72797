"""Models with blocks beside 2:4 and dense layers: compile, the plan, files, the registered operator."""

from pathlib import Path

import pytest
import torch
from torch import nn

import twofour
from tests.compiler.small import quick
from twofour.compiler.computing import Computing
from twofour.compiler.layer import CompiledLinear
from twofour.compiler.plan import LayerPlan, Plan
from twofour.kernels import find
from twofour.patterns import parse

PATTERNS = {"0": "block:16x16@0.9", "2": "2:4", "4": "block:8x1@0.8", "5": "dense"}


def mixed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 300), nn.Linear(300, 64)
    ).eval()


def pruned(dtype: torch.dtype = torch.float32) -> nn.Module:
    return twofour.prune(mixed(), PATTERNS, eligibility="any").to(dtype)


def of_blocks(fast: nn.Module) -> list[str]:
    """Names of layers that run on blocks at the first token count."""
    layers = [(name, layer) for name, layer in fast.named_modules() if isinstance(layer, CompiledLinear)]
    return [name for name, layer in layers if find(layer.dispatch.names[0]).operation == "block_matmul"]


def layers_of(fast: nn.Module) -> tuple[LayerPlan, ...]:
    assert isinstance(fast.plan, Plan)
    return fast.plan.layers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("memory", ["fast", "small"])
def test_a_mixed_model_compiles_is_saved_and_loaded(dtype: str, memory: str, tmp_path: Path) -> None:
    held = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    model, x = pruned(held), torch.randn(4, 256, dtype=held)
    fast = quick(model, x, dtype=dtype, memory=memory)
    rtol = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 5e-2}[dtype]
    with torch.inference_mode():
        want = model(x)
        assert (fast(x) - want).norm() <= rtol * want.norm()
        if memory == "small":  # what is measured may run dense; a sparse weight that is kept alone may not
            assert of_blocks(fast) == ["0", "4"]
        twofour.save(fast, tmp_path / "model.24")
        again = twofour.load(tmp_path / "model.24", mixed().to(held), memory=memory)
        assert (again(x) - want).norm() <= rtol * want.norm()
    assert [layer.name for layer in layers_of(fast)] == ["0", "2", "4", "5"]
    masked = twofour.load(tmp_path / "model.24", mixed().to(held), masked=True)
    assert twofour.masks.of(masked)["0.weight"].pattern == parse("block:16x16@0.9")


def test_two_sparsities_of_one_shape_are_measured_apart() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).eval()
    twofour.prune(model, {"0": "block:8x8@0.5", "1": "block:8x8@0.9"}, eligibility="any")
    fast = quick(model, torch.randn(2, 64), memory="small")
    times = [layer.sparse_ms for layer in layers_of(fast)]
    assert len(of_blocks(fast)) == 2 and None not in times


def test_the_operator_serves_torch_export() -> None:
    model = twofour.prune(nn.Sequential(nn.Linear(64, 48)).eval(), {"0": "block:8x4@0.7"}, eligibility="any")
    fast, x = quick(model, torch.randn(3, 64), memory="small"), torch.randn(3, 64)
    program = torch.export.export(fast, (x,))
    with torch.inference_mode():
        assert torch.equal(program.module()(x), fast(x))


def test_blocks_without_kernels_say_what_is_read() -> None:
    weight = torch.ones(16, 32)
    _, reason = Computing("int4").encode(weight, parse("block:8x8@0"))
    assert "block:8x8@0" in reason and "2:4" in reason
