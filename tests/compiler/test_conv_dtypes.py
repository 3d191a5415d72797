"""Convolutions in a computing type that has no kernels of them run as in float32, and the plan says what that means."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import twofour
from tests.compiler.small import TOKENS, mlp, quick
from tests.compiler.test_conv import image, network
from tests.turns import in_turn
from twofour.compiler import CompiledConv, CompiledLinear, choose_conv
from twofour.compiler.computing import FLOAT32, Computing, convolved
from twofour.compiler.notes import mostly_convolved
from twofour.compiler.plan import LayerPlan
from twofour.kernels import find
from twofour.kernels.conv import ConvKernel

SAID = "is that of the Linear layers alone: there are no convolutions in it"


def native_first(times: dict[str, float], memory: str, **_: object) -> ConvKernel:
    """Choose as if a kernel of this package was faster, sparse where there is one."""
    kernels = [find(name, ConvKernel) for name in times]
    return min(kernels, key=lambda kernel: (kernel.isa == "any", not kernel.sparse))


@pytest.mark.parametrize("dtype", ["bfloat16", "int4"])
def test_convolutions_run_as_in_float32(
    dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stayed torch's own, without what a graph folds into them: the model was slower than in float32, untold."""
    monkeypatch.setattr(choose_conv, "pick", native_first)
    model, x = twofour.prune(network(), "2:4").eval(), image(2, 3, 16, 14)
    with caplog.at_level(logging.WARNING, "twofour.compiler"):
        fast: Any = quick(model, x, dtype=dtype, effort="quick", graph=True)
    convs = {name: module for name, module in fast.named_modules() if isinstance(module, CompiledConv)}
    assert convs.keys() == {"0", "3", "5", "6"}
    assert {module.dispatch.kernels[0].dtype for module in convs.values()} == {"float32"}
    assert caplog.text.count(SAID) == str(fast.plan).count(SAID) == 1
    wide: Any = quick(model, x, effort="quick", graph=True)
    sizes = [{one.name: one.bytes_in_file for one in plan.layers} for plan in (fast.plan, wide.plan)]
    assert [sizes[0][name] for name in convs] == [sizes[1][name] for name in convs]
    torch.testing.assert_close(fast(x), model(x).detach(), atol=0.1, rtol=0.1)
    twofour.save(fast, tmp_path / "m.safetensors")
    again = twofour.load(tmp_path / "m.safetensors", network().eval())
    assert [m.dispatch.names for m in again.modules() if isinstance(m, CompiledConv)] == [
        m.dispatch.names for m in convs.values()
    ]
    torch.testing.assert_close(again(x), fast(x), atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_weights_in_bfloat16_are_widened(
    dtype: str, graph: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stayed torch's own, so that a pruned network in bfloat16 had no sparse layer."""
    monkeypatch.setattr(choose_conv, "pick", native_first)
    wide = twofour.prune(network(), "2:4").eval()
    x, model = image(2, 3, 16, 14), copy.deepcopy(wide).bfloat16()
    own: Any = model
    fast: Any = quick(model, x.bfloat16(), dtype=dtype, effort="quick", graph=graph)
    convs = {name: module for name, module in fast.named_modules() if isinstance(module, CompiledConv)}
    sparse = {one.name for one in fast.plan.layers if one.sparse}
    assert {"0", "3", "5", "6"} <= convs.keys() and sparse & convs.keys()
    assert "its bfloat16 weight is widened to float32 once" in str(fast.plan)
    answer, exact = fast(x.bfloat16()), wide(x).detach()
    assert answer.dtype is torch.bfloat16
    assert (answer.float() - exact).norm() <= (0.06 if dtype == "int8" else 0.03) * exact.norm()
    if graph:
        assert "convolution" in str(fast.plan.account.rewrites) and fast.plan.account.engine == "graph"
    twofour.save(fast, tmp_path / "m.safetensors")
    again: Any = twofour.load(tmp_path / "m.safetensors", network().bfloat16().eval())
    for name in convs:
        assert torch.equal(again.get_submodule(name).weight.clone(), fast.get_submodule(name).weight.clone())
    torch.testing.assert_close(again(x.bfloat16()), answer, atol=0.05, rtol=0.05)
    if dtype != "int8":
        assert torch.equal(fast.get_submodule("3").weight.clone(), own.get_submodule("3").weight)


def entry(name: str, kind: str, ms: float | None) -> LayerPlan:
    return LayerPlan(name, kind, (4, 4), 1, "torch", "", ms, None, "", 64, 64)


@in_turn(
    ("dtype", "images", "rest", "said"),
    [
        ("bfloat16", 3.0, 1.0, "the 1 convolutions, 3.000 of the layers' 4.000 ms, run in float32"),
        ("int4", 3.0, 1.0, "the 1 convolutions, 3.000 of the layers' 4.000 ms, run in float32"),
        ("bfloat16", 0.1, 1.0, ""),  # the patches of a vision transformer
        ("bfloat16", None, 1.0, ""),
        ("bfloat16", None, None, ""),
        ("int8", 3.0, 1.0, ""),
        ("float32", 3.0, 1.0, ""),
    ],
)
def test_it_is_said_where_convolutions_take_most_of_the_time(
    dtype: str, images: float | None, rest: float | None, said: str
) -> None:
    layers = [entry("a", "Conv2d", images), entry("b", "Linear", rest), entry("c", "Conv1D (Hugging Face)", rest and 0)]
    found = mostly_convolved(layers, Computing(dtype))
    assert (said in found[0]) if said else found == ()
    assert "same time" not in str(found), "the others' time in float32 is not known"
    assert convolved(Computing(dtype)) == (Computing(dtype) if dtype == "int8" else FLOAT32)


def test_a_model_of_linear_layers_has_no_word_on_convolutions(no_measuring: None) -> None:
    fast: Any = twofour.compile(twofour.prune(mlp(), "2:4"), torch.randn(3, 64), "bfloat16", tokens=TOKENS)
    assert SAID not in str(fast.plan) and any(isinstance(m, CompiledLinear) for m in fast.modules())
    assert not [m for m in fast.modules() if isinstance(m, nn.Conv2d)]
