"""A mask's pattern goes with its weight through compile, save, check and load, whatever runs in between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import twofour
from twofour import masks

PATTERNS = ("1:4", "1:2", "2:4", "2:4-transposable", "64:2:8", "4:8")


def linears() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3))


def patterns_of(model: nn.Module) -> set[str]:
    return {mask.pattern.name for mask in masks.of(model).values()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_linear_layers(tmp_path: Path, pattern: str, dtype: str) -> None:
    model, x, path = twofour.prune(linears(), pattern), torch.randn(4, 64), tmp_path / "model.safetensors"
    keep = {name: mask.keep.clone() for name, mask in masks.of(model).items()}
    fast = twofour.compile(model, x, dtype, tokens=(4,))
    sparse = any(layer.sparse_ms is not None for layer in fast.plan.layers)
    assert sparse == (pattern != "4:8")  # no kernel reads 4:8
    twofour.save(fast, path)
    report = twofour.check(path)
    assert report.ok and {layer.promised for layer in report.layers} == {pattern}
    back = twofour.load(path, linears(), masked=True)
    assert patterns_of(back) == {pattern}
    for name, mask in masks.of(back).items():
        assert not (mask.keep & ~keep[name]).any() or dtype in ("int8", "int4")  # a kept value may round to zero
    again = tmp_path / "again.safetensors"
    twofour.save(twofour.load(path, linears()), again)
    assert patterns_of(twofour.load(again, linears(), masked=True)) == {pattern}


@pytest.mark.parametrize("pattern", ["1:4", "2:4", "2:4-transposable"])
def test_convolutions(tmp_path: Path, pattern: str) -> None:
    model, x = twofour.prune(convolutions(), pattern, eligibility="any"), torch.randn(1, 16, 8, 8)
    fast = twofour.compile(model, x)
    path = tmp_path / "model.safetensors"
    twofour.save(fast, path)
    assert patterns_of(twofour.load(path, convolutions(), masked=True)) == {pattern}
    torch.testing.assert_close(twofour.load(path, convolutions())(x), model(x), atol=1e-4, rtol=1e-4)


def test_a_tighter_pattern_takes_fewer_bytes_in_a_file(tmp_path: Path) -> None:
    sizes = {}
    for pattern in ("2:4", "1:4"):
        fast = twofour.compile(twofour.prune(linears(), pattern), torch.randn(4, 64), tokens=(4,))
        twofour.save(fast, tmp_path / pattern)
        sizes[pattern] = sum(layer.bytes_in_file for layer in fast.plan.layers)
        held = twofour.export.read(tmp_path / pattern).packed.values()
        assert sizes[pattern] == sum(weight.nbytes for weight in held)
    assert sizes["1:4"] == sizes["2:4"] / 2


def test_zeros_without_a_mask_are_found(tmp_path: Path) -> None:
    model = twofour.prune(linears(), "1:4")
    plain = linears()
    plain.load_state_dict(model.state_dict())
    fast = twofour.compile(plain, memory="small", tokens=(4,))
    twofour.save(fast, tmp_path / "model.safetensors")
    # 2:4 is the form that kernels read; that the weight is tighter was promised by nobody.
    assert patterns_of(twofour.load(tmp_path / "model.safetensors", linears(), masked=True)) == {"2:4"}
