"""Workspaces of kernels: kept between calls, and given back where a compilation ends."""

import torch
from torch import nn

from twofour import native
from twofour.kernels import find
from twofour.kernels.problem import Problem


def test_workspaces_go_back_and_the_next_call_takes_its_own() -> None:
    kernel = find("dense_matmul_int8_panels__scalar")
    torch.manual_seed(0)
    weight, x = nn.Linear(256, 64).weight.detach(), torch.randn(64, 256)
    held = kernel.prepare(weight)
    want = kernel.run(x, held, None, Problem(64))
    native.release_free_memory()
    assert native.extension().release_free_memory() == 0
    assert torch.equal(kernel.run(x, held, None, Problem(64)), want)
    assert native.extension().release_free_memory() >= x.numel(), "the input in bytes"
    assert torch.equal(kernel.run(x, held, None, Problem(64)), want)
