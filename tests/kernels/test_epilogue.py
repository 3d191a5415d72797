"""The reference of what happens to a product, and what it refuses; every row of the table is compared with it."""

import pytest
import torch

from tests.conftest import runs
from twofour.errors import KernelError
from twofour.kernels import rows
from twofour.kernels.epilogue import ACTIVATIONS, COMBINES, Epilogue
from twofour.packing import pack

FLOAT32 = [row for row in rows() if row.dtype == "float32" and (row.isa == "any" or runs(row.isa))]


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


@pytest.mark.parametrize("row", FLOAT32, ids=lambda row: row.name)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("combine", COMBINES)
def test_every_float32_row_has_every_epilogue(row, activation: str, combine: str) -> None:
    weight = torch.randn(37, 68) * torch.tensor([1.0, 0.0, 1.0, 0.0]).repeat(17)
    prepared = row.prepare(pack(weight, "2:4") if row.operation == "nm_matmul" else weight)
    for tokens in (1, 5, 33):
        x, bias = 2 * torch.randn(tokens, 68), torch.randn(37)
        other = None if combine == "none" else torch.randn(tokens, 80)[:, :37]
        y = row.run(x, prepared, bias, 37, Epilogue(activation, combine), other)
        want = product(activation, combine, x.double() @ weight.double().T + bias.double(), other)
        assert (y.double() - want).norm() <= 2e-6 * want.norm()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(KernelError, match="no such epilogue"):
        Epilogue("swish")
    with pytest.raises(KernelError, match="second operand"):
        Epilogue("relu", "add").apply(torch.zeros(2, 3))
    with pytest.raises(KernelError, match="second operand"):
        Epilogue("relu").apply(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(KernelError, match=r"of shape \(3, 2\)"):
        Epilogue("none", "multiply").apply(torch.zeros(2, 3), torch.zeros(3, 2))
