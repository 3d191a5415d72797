"""A bias of any strides and signs, and of another size, on every row that multiplies on a CPU."""

import pytest
import torch
from torch import nn

from tests.conftest import each_row
from tests.turns import in_turn
from twofour.compiler.conv import CompiledConv
from twofour.compiler.layer import CompiledLinear, PreparedWeights
from twofour.errors import KernelError
from twofour.kernels.bits_matmul import BitWeight, twos
from twofour.kernels.conv import ConvProblem, Geometry
from twofour.kernels.dispatch import read_dispatch
from twofour.kernels.problem import Problem
from twofour.kernels.table import convolutions, rows
from twofour.packing import pack

ROWS = [row for row in rows() if row.device == "cpu" and row.pattern != "any"]
BIASES = {
    "strided": lambda: torch.randn(64)[::2],
    "a column": lambda: torch.randn(32, 3)[:, 1],
    "expanded": lambda: torch.full((1,), 2.0).expand(32),
    "negated": lambda: torch._neg_view(torch.randn(32)),
    "imaginary": lambda: torch.complex(torch.randn(32), torch.randn(32)).conj().imag,
}


def layer_of(kernel) -> CompiledLinear:
    weight = torch.randn(32, 64)
    weight *= torch.arange(64) % 4 < 2
    pattern = {"block": "block:4x4@0", "hybrid": "2:4+25%"}.get(kernel.pattern, kernel.pattern)
    if kernel.operation == "bits_matmul":
        codes = torch.randint(0, 4, (32, 64), dtype=torch.uint8)
        codes = torch.where(torch.arange(64) % 4 < 2, codes, 2).to(torch.uint8) if kernel.sparse else codes
        given = BitWeight(codes, twos(2), torch.rand(32) + 0.5)
    else:
        given = pack(weight, pattern, dtype=kernel.dtype) if kernel.sparse else weight
    prepared = PreparedWeights([kernel.prepare(given)])
    return CompiledLinear("fc", 64, Problem(32), read_dispatch(f"*={kernel.name}"), prepared, torch.zeros(32))


def convolution_of(kernel) -> CompiledConv:
    taps, padding = ((3, 3), (1, 1)) if kernel.close else ((1, 1), (0, 0))
    channels, groups = (32, 32) if kernel.operation == "depthwise_conv" else (64, 1)
    geometry = Geometry(channels, 32, taps, (1, 1), padding, padding, groups=groups)
    weight = torch.randn(32, channels // groups, *taps)
    if groups == 1:
        weight *= (torch.arange(64) % 4 < 2)[:, None, None]
    pattern = {"block": "block:4x4@0", "hybrid": "2:4+25%"}.get(kernel.pattern)
    given = pack(weight, pattern, axis=1) if pattern else weight
    prepared = PreparedWeights([kernel.prepare(given, geometry, (1, 4, 4))])
    return CompiledConv("fc", ConvProblem.of(geometry), read_dispatch(f"*={kernel.name}"), prepared, torch.zeros(32))


def assign(layer: nn.Module, bias: torch.Tensor) -> None:
    layer.load_state_dict({"bias": bias}, strict=False, assign=True)


@in_turn("bias", BIASES)
@each_row(ROWS, "kernel")
def test_a_bias_is_added_as_it_reads(kernel, bias):
    layer, given = layer_of(kernel), BIASES[bias]()
    for tokens in (1, 8):
        x = torch.randn(tokens, 64)
        without = layer(x)
        assign(layer, given)
        torch.testing.assert_close(layer(x), without + given.resolve_neg(), rtol=2e-2, atol=5e-2)
        assign(layer, torch.zeros(32))


@in_turn("bias", BIASES)
@each_row(convolutions(), "kernel")
def test_a_bias_of_a_convolution_is_added_as_it_reads(kernel, bias):
    layer, given = convolution_of(kernel), BIASES[bias]()
    x = torch.randn(1, layer.geometry.in_channels, 4, 4)
    without = layer(x)
    assign(layer, given)
    torch.testing.assert_close(layer(x), without + given.resolve_neg()[:, None, None], rtol=1e-4, atol=1e-4)


@in_turn("size", [1, 31, 33])
@each_row(ROWS, "kernel")
def test_a_bias_of_another_size_is_refused(kernel, size):
    layer = layer_of(kernel)
    layer.bias = nn.Parameter(torch.zeros(size), requires_grad=False)
    with pytest.raises(KernelError, match="layer `fc`"):
        layer(torch.randn(8, 64))


@in_turn("size", [1, 31, 33])
@each_row(convolutions(), "kernel")
def test_a_bias_of_another_size_is_refused_by_a_convolution(kernel, size):
    layer = convolution_of(kernel)
    layer.bias = nn.Parameter(torch.zeros(size), requires_grad=False)
    with pytest.raises(KernelError, match="layer `fc`"):
        layer(torch.randn(1, 64, 4, 4))
