"""The reference of what happens to a product, and what it refuses; every row of the table is compared with it."""

import pytest
import torch

from tests.conftest import each_row
from tests.turns import in_turn
from twofour.errors import KernelError
from twofour.kernels import rows
from twofour.kernels.activation import activation as activated
from twofour.kernels.activation import activation_gradient
from twofour.kernels.base import Row
from twofour.kernels.epilogue import ACTIVATIONS, COMBINES, Epilogue
from twofour.kernels.native_product import NativeProduct
from twofour.kernels.problem import Problem
from twofour.kernels.quantization import Quantization
from twofour.packing import Packed, pack


def taken(row: Row, weight: torch.Tensor) -> Packed | torch.Tensor:
    """Return a weight, 2:4 or of blocks that are all kept, as a row takes it."""
    pattern = {"block": "block:4x4@0", "hybrid": "2:4+25%"}.get(row.pattern, "2:4")
    return pack(weight, pattern, dtype=row.dtype) if row.sparse else weight


FLOAT32 = [row for row in rows() if row.dtype == "float32" and row.device == "cpu"]


def product(activation: str, combine: str, sums: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
    """The epilogue in float64, from the definitions."""
    y = sums.double()
    if activation == "gelu":
        y = y * 0.5 * (1 + torch.erf(y / 2**0.5))
    elif activation == "gelu_tanh":
        y = 0.5 * y * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3)))
    elif activation == "silu":
        y = y / (1 + torch.exp(-y))
    elif activation == "relu":
        y = y.clamp(min=0)
    if other is None:
        return y
    return y + other.double() if combine == "add" else y * other.double()


@each_row(FLOAT32)
@in_turn("activation", ACTIVATIONS)
@in_turn("combine", COMBINES)
def test_every_float32_row_has_every_epilogue(row, activation: str, combine: str) -> None:
    weight = torch.randn(37, 68) * torch.tensor([1.0, 0.0, 1.0, 0.0]).repeat(17)
    prepared = row.prepare(taken(row, weight))
    for tokens in (1, 5, 33):
        x, bias = 2 * torch.randn(tokens, 68), torch.randn(37)
        other = None if combine == "none" else torch.randn(tokens, 80)[:, :37]
        y = row.run(x, prepared, bias, Problem(37, Epilogue(activation, combine)), other)
        want = product(activation, combine, x.double() @ weight.double().T + bias.double(), other)
        assert (y.double() - want).norm() <= 2e-6 * want.norm()


@each_row(FLOAT32)
@in_turn("activation", ACTIVATIONS)
def test_no_row_loses_a_nan(row, activation: str) -> None:
    weight = torch.randn(37, 68) * torch.tensor([1.0, 0.0, 1.0, 0.0]).repeat(17)
    prepared, x = row.prepare(taken(row, weight)), torch.randn(5, 68)
    x[3] = torch.nan
    y = row.run(x, prepared, None, Problem(37, Epilogue(activation)))
    assert y[3].isnan().all() and not y[[0, 1, 2, 4]].isnan().any()


NATIVE = [row for row in FLOAT32 if isinstance(row, NativeProduct)]


def through(row: NativeProduct, activation: str, values: torch.Tensor) -> torch.Tensor:
    """The activation alone: what a product of zeros gives with the values as its bias."""
    weight = row.prepare(taken(row, torch.zeros(len(values), 4)))
    y = row.run(torch.zeros(2, 4), weight, values, Problem(len(values), Epilogue(activation)))
    assert torch.equal(y[0].nan_to_num(1), y[1].nan_to_num(1))
    return y[0]


@each_row(NATIVE)
@in_turn("activation", [name for name in ACTIVATIONS if name != "none"])
def test_activations_are_those_of_float64(row: NativeProduct, activation: str) -> None:
    tiny = torch.logspace(-30, 0, 2000)
    x = torch.cat([torch.linspace(-9, 9, 40_000), torch.linspace(-80, 80, 4000), tiny, -tiny])
    y, want = through(row, activation, x).double(), product(activation, "none", x, None)
    upper = product(activation, "none", x.abs(), None)
    assert ((y - want).abs() <= 3e-7 * upper).all()
    near = x > -4  # further down the values are below 1.3e-4 (gelu)
    if activation == "gelu":  # without the cancellation of 1 + erf
        want = torch.where(x < 0, x.double() / 2 * torch.special.erfc(-x.double() / 2**0.5), want)
    elif activation == "gelu_tanh":
        cubed = x.double() + 0.044715 * x.double() ** 3
        want = x.double() * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * cubed)
    assert ((y - want).abs() <= 2e-6 * want.abs() + 1e-37)[near].all()


@each_row(NATIVE)
@in_turn("activation", [name for name in ACTIVATIONS if name != "none"])
def test_activations_at_the_ends_of_the_number_line(row: NativeProduct, activation: str) -> None:
    large = torch.tensor([torch.inf, 1e38, 1e30, 200.0]).repeat(9)
    assert torch.equal(through(row, activation, large), large)
    lowest = through(row, activation, -large)
    endless = torch.isinf(large)
    assert (lowest[~endless].abs() < 1e-30).all()
    assert lowest[endless].isnan().all() if activation != "relu" else (lowest[endless] == 0).all()
    assert through(row, activation, torch.full((17,), torch.nan)).isnan().all()
    assert (through(row, activation, torch.zeros(5)) == 0).all()


WHOLE = [row for row in rows() if row.dtype == "int8" and row.device == "cpu" and isinstance(row, NativeProduct)]


@each_row(WHOLE)
@in_turn("activation", [name for name in ACTIVATIONS if name != "none"])
@in_turn("scale", [2e-4, 1.6e-3, 0.03])
def test_an_activation_is_off_by_an_eighth_of_a_byte_before_it_is_rounded(
    row: NativeProduct, activation: str, scale: float
) -> None:
    x = torch.cat([torch.linspace(-9, 9, 500), torch.linspace(-300, -9, 20), torch.linspace(-20, 260, 500) * scale])
    weight, nothing = row.prepare(taken(row, torch.zeros(len(x), 4))), torch.full((6, 4), 128, dtype=torch.uint8)
    quantization = Quantization(0.1, 128, torch.uint8, scale, 20)
    y = row.run(nothing, weight, x, Problem(len(x), Epilogue(activation), quantization))
    want = (product(activation, "none", x, None) / scale + 20).clamp(0, 255)
    assert (y == y[0]).all() and ((y[0].double() - want).abs() <= 0.5 + 0.125 + 1e-3).all()


@each_row(NATIVE)
@in_turn("tokens", [3, 40])
def test_the_second_operand_may_be_any_view(row: NativeProduct, tokens: int) -> None:
    weight = torch.randn(21, 8) * torch.tensor([0.0, 1.0, 1.0, 0.0]).repeat(2)
    prepared, x = row.prepare(taken(row, weight)), torch.randn(tokens, 8)
    wide = torch.full((tokens, 50), torch.nan)
    wide[:, 3:24] = torch.randn(tokens, 21)
    negated = torch._neg_view(torch.randn(tokens, 21))
    for other in (wide[:, 3:24], torch.randn(21, tokens).T, torch.randn(1, 21).expand(tokens, 21), negated):
        y = row.run(x, prepared, None, Problem(21, Epilogue("none", "multiply")), other)
        assert torch.allclose(y, x @ weight.T * other, rtol=1e-5, atol=1e-5)
    with pytest.raises(KernelError, match=r"other of torch\.float64"):
        row.run(x, prepared, None, Problem(21, Epilogue("none", "add")), torch.zeros(tokens, 21).double())
    with pytest.raises(KernelError, match="second operand"):
        row.run(x, prepared, None, Problem(21, Epilogue("none", "add")), torch.zeros(tokens, 20))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(KernelError, match="no such epilogue"):
        Epilogue("swish")
    with pytest.raises(KernelError, match="second operand"):
        Epilogue("relu", "add").apply(torch.zeros(2, 3))
    with pytest.raises(KernelError, match="second operand"):
        Epilogue("relu").apply(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(KernelError, match=r"of shape \(3, 2\)"):
        Epilogue("none", "multiply").apply(torch.zeros(2, 3), torch.zeros(3, 2))


@in_turn("dtype", [torch.float32, torch.bfloat16])
@in_turn("activation", [name for name in ACTIVATIONS if name != "none"])
def test_activations_and_their_gradients_alone(isa: str, activation: str, dtype: torch.dtype) -> None:
    for shape in ((), (1,), (3, 37), (2, 5, 4, 33), (0, 7), (20, 1000)):
        x, upstream = (3 * torch.randn(shape)).to(dtype), torch.randn(shape).to(dtype)
        leaf = x.double().requires_grad_()
        y = product(activation, "none", leaf, None)
        (want,) = torch.autograd.grad(y, leaf, upstream.double())
        limit = 4e-6 if dtype is torch.float32 else 2**-8 + 1e-5
        for got, exact in ((activated(x, activation), y), (activation_gradient(upstream, x, activation), want)):
            assert got.dtype is dtype and got.shape == x.shape
            assert ((got.double() - exact).abs() <= limit * exact.abs() + 3e-6).all()
    strided = torch.randn(6, 8).to(dtype)[:, ::2]
    assert torch.equal(activated(strided, activation), activated(strided.contiguous(), activation))
    expanded = torch.ones((), dtype=dtype).expand(strided.shape)
    want = activation_gradient(expanded.contiguous(), strided.contiguous(), activation)
    assert torch.equal(activation_gradient(expanded, strided, activation), want)
