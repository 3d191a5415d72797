"""Kernels write through addresses: the size of their answers must not follow torch's default dtype."""

import pytest
import torch

from twofour.kernels import matmul
from twofour.kernels.attention import attention
from twofour.kernels.nm_matmul import from_layout, to_layout
from twofour.kernels.norm import norm
from twofour.packing import pack


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_answers_do_not_depend_on_the_default_dtype(default: torch.dtype) -> None:
    """A kernel is handed an address: an answer of half the size would be written past its end."""
    weight = torch.randn(32, 64) * torch.tensor([1.0, 0.0, 0.0, 1.0]).repeat(16)
    x, scale = torch.randn(3, 64), torch.ones(64)
    heads = torch.randn(1, 5, 2, 32)
    torch.set_default_dtype(default)
    try:
        packed = pack(weight, "2:4")
        back = from_layout(to_layout(pack(weight, "2:4", dtype="int8"), "int8_rows")).unpack()
        y = matmul(x, packed)
        normed = norm(x, scale, None, 1e-5)
        attended = attention(heads, heads, heads)
    finally:
        torch.set_default_dtype(torch.float32)
    assert packed.values.dtype == back.dtype == y.dtype == normed.dtype == attended.dtype == torch.float32
    torch.testing.assert_close(y, x @ weight.T)
    torch.testing.assert_close(normed, torch.nn.functional.layer_norm(x, (64,)))
