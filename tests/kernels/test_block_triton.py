"""The GPU's product with weights of blocks, in Triton's interpreter where there is no GPU, against float64."""

import numpy as np
import pytest
import torch

from twofour.errors import KernelError
from twofour.kernels.block_matmul.cuda import block_rows, multiply, multiply_reference
from twofour.kernels.epilogue import Epilogue
from twofour.native import gpu
from twofour.packing import Packed, pack
from twofour.patterns import parse

if reason := gpu.unavailable(triton=True):
    pytest.skip(f"Triton kernels do not run: {reason}", allow_module_level=True)

LARGEST_ERROR = {"bfloat16": 6e-3, "float16": 8e-4, "float32": 2e-7}
"""Answers in float32 differ by sums alone: inputs here are rounded already."""


def packed(rows: int, columns: int, pattern: str, dtype: str) -> Packed:
    dense = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    return pack(dense * parse(pattern).project(dense, absolute=True), pattern, dtype=dtype)


def operands(weight: Packed, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(tokens, weight.header.reduction, generator=torch.Generator().manual_seed(1)).to(weight.values.dtype)
    return x.to(gpu.device()), x.double() @ weight.unpack().double().T


def off(y: torch.Tensor, want: torch.Tensor) -> float:
    return float((y.cpu().double() - want).norm() / want.norm().clamp_min(1e-30))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("rows", "columns", "pattern", "tokens"),
    [
        (32, 64, "block:16x16@0.5", 1),
        (37, 70, "block:16x32@0.6", 17),  # rims on both sides
        (60, 48, "block:16x16@0.7/4", 16),  # four gates of 15 rows: a block of each ends early
        (33, 130, "block:32x64@0", 70),  # no zero block; more than a tile of tokens
        (64, 64, "block:64x16@0.99", 3),  # one block stays
    ],
)
def test_the_product_is_float64s(rows: int, columns: int, pattern: str, tokens: int, dtype: str) -> None:
    weight = packed(rows, columns, pattern, dtype)
    opened = block_rows(weight)
    x, want = operands(weight, tokens)
    y = multiply(x, opened)
    assert y.dtype == x.dtype and y.shape == (tokens, rows) and off(y, want) < LARGEST_ERROR[dtype]
    assert off(multiply(x.float(), opened), want) < LARGEST_ERROR["float32"] * 10
    assert off(multiply_reference(x.double(), opened), want) < 1e-12


@pytest.mark.parametrize(
    "epilogue",
    [Epilogue("relu"), Epilogue("gelu", "add"), Epilogue("silu", "multiply")],
    ids=lambda e: f"{e.activation}-{e.combine}",
)
def test_epilogues(epilogue: Epilogue) -> None:
    weight = packed(30, 32, "block:16x16@0.5/2", "bfloat16")
    x, product = operands(weight, 5)
    bias = torch.randn(30, device=gpu.device())
    other = torch.randn(5, 30, device=gpu.device()) if epilogue.combine != "none" else None
    with np.errstate(over="ignore"):  # the interpreter's exp
        y = multiply(x.float(), block_rows(weight), bias, epilogue, other, block_tokens=32)
    want = epilogue.apply(product + bias.cpu().double(), None if other is None else other.cpu().double())
    assert off(y, want) < 2e-6


def test_what_it_does_not_read_is_refused() -> None:
    for pattern, dtype in (("block:8x16@0.5", "bfloat16"), ("block:16x16@0.5", "float32"), ("2:4", "bfloat16")):
        with pytest.raises(KernelError, match="cannot read a weight"):
            block_rows(packed(32, 32, pattern, dtype))
    opened = block_rows(packed(32, 32, "block:16x16@0.5", "float16"))
    with pytest.raises(KernelError, match="do not fit the weight"):
        multiply(torch.zeros(4, 16, device=gpu.device()), opened)
    assert multiply(torch.zeros(0, 32, device=gpu.device()), opened).shape == (0, 32)
    x = torch.zeros(4, 32, device=gpu.device())
    for wrong, said in (
        ({"bias": torch.zeros(31, device=gpu.device())}, "the bias does not fit"),
        ({"block_tokens": 24}, "block_tokens is impossible"),
        ({"epilogue": Epilogue("none", "add")}, "second operand"),
        ({"epilogue": Epilogue("none", "add"), "other": torch.zeros(4, 31, device=gpu.device())}, "second operand"),
        ({"other": torch.zeros(4, 32, device=gpu.device())}, "second operand"),
    ):
        with pytest.raises(KernelError, match=said):
            multiply(x, opened, **wrong)
    with pytest.raises(KernelError, match="does not read"):
        multiply(x.double(), opened)
