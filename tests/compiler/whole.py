"""Models pruned and compiled whole, and the answers that must come from their graphs."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.compiler.small import quick
from tests.graph.small import PreNormBlock
from twofour.compiler.whole_model import WholeModel
from twofour.patterns import parse


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


def called(fast: Any) -> list[object]:
    """Return what the graph's calls are methods of: layers and products; None for a function."""
    return [getattr(call, "__self__", None) for call in fast.forward.program.python.names.values()]
