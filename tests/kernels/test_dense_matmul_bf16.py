"""The dense bfloat16 rows: input and answer of both dtypes, with bias and epilogue."""

import pytest
import torch

from twofour.kernels.dense_matmul import ONEDNN_BF16, PLAIN_BF16, Bf16Matmul
from twofour.kernels.epilogue import Epilogue
from twofour.packing import pack
from twofour.patterns import parse


@pytest.mark.parametrize("row", [PLAIN_BF16, ONEDNN_BF16], ids=lambda row: row.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_round_no_more_than_their_operands_and_answer(row: Bf16Matmul, dtype: torch.dtype) -> None:
    if reason := row.unavailable():
        pytest.skip(reason)
    weight = torch.randn(48, 64) * 64**-0.5
    weight *= parse("2:4").project(weight, absolute=True)
    bias, other = torch.randn(48), torch.randn(9, 48, dtype=dtype)
    x = torch.randn(9, 64, dtype=dtype)
    for given in (weight, pack(weight, "2:4", dtype="bfloat16")):
        prepared = row.prepare(given)
        assert prepared.numel() * prepared.element_size() >= row.least_bytes(48, 64)
        y = row.run(x, prepared, bias, 48)
        want = x.bfloat16().double() @ weight.bfloat16().double().T + bias.double()
        assert y.dtype == dtype
        assert (y.double() - want).norm() <= 5e-3 * want.norm()
        y = row.run(x, prepared, bias, 48, Epilogue("silu", "multiply"), other)
        want = torch.nn.functional.silu(want) * other.double()
        assert y.dtype == dtype
        assert (y.double() - want).norm() <= 1e-2 * want.norm()
