"""Our own GPU kernel for few tokens: its bytes, and its product in Triton's interpreter where there is no GPU."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twofour.errors import KernelError
from twofour.kernels.epilogue import PLAIN_EPILOGUE, Epilogue
from twofour.kernels.nm_matmul.cuda.few_tokens import FEW_TOKENS, FewTokens, default_way
from twofour.kernels.nm_matmul.cuda.reference import opened_weight
from twofour.kernels.problem import Problem
from twofour.native import gpu
from twofour.packing import Packed, pack
from twofour.patterns import parse

if reason := gpu.unavailable(triton=True):
    pytest.skip(f"Triton kernels do not run: {reason}", allow_module_level=True)

FEW = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LARGEST_ERROR = {"bfloat16": 6e-3, "float16": 8e-4, "int4": 6e-3}
"""Inputs and answers are rounded to 8 or 11 bits; of int4 the scaled weights are, too."""


TENSOR, VECTOR = (32, 64, 1, 4, 3, 1), (8, 64, 1, 4, 1, 0)
"""With tensor cores, and without."""


def packed(rows: int, columns: int, dtype: str, *, group: int = 32, symmetric: bool = True, seed: int = 0) -> Packed:
    dense = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    dense *= parse("2:4").project(dense, absolute=True)
    scaled = {"group": group, "symmetric": symmetric} if dtype == "int4" else {}
    return pack(dense, "2:4", dtype, **scaled)


def operands(row: FewTokens, weight: Packed, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs the row reads without rounding, and the float64 product."""
    kind = torch.float16 if row.dtype == "float16" else torch.bfloat16
    x = torch.randn(tokens, weight.header.reduction, generator=torch.Generator().manual_seed(1)).to(kind)
    return x.to(dtype).to(gpu.device()), x.double() @ weight.unpack().double().T


def off(y: torch.Tensor, want: torch.Tensor) -> float:
    return ((y.cpu().double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("row", FEW_TOKENS, ids=lambda row: row.dtype)
@pytest.mark.parametrize("tokens,way", [(1, TENSOR), (17, TENSOR), (1, VECTOR), (2, VECTOR), (7, VECTOR)], ids=str)
def test_the_product_is_the_references(row: FewTokens, tokens: int, way: tuple[int, ...]) -> None:
    weight = packed(37, 288, row.dtype)
    x, want = operands(row, weight, tokens, torch.float32)
    y = row.run_as(way, x, row.prepare(weight), None, Problem(37))
    assert y.dtype is torch.float32 and y.shape == (tokens, 37)
    assert off(y, want) < LARGEST_ERROR[row.dtype]


@pytest.mark.parametrize("group,symmetric", [(32, False), (64, True), (128, False)])
def test_int4_scales_and_zero_points(group: int, symmetric: bool) -> None:
    row = FEW_TOKENS[2]
    weight = packed(16, 128, "int4", group=group, symmetric=symmetric)
    x, want = operands(row, weight, 3, torch.bfloat16)
    for way in ((16, 32, 2, 4, 3, 1), (4, 32, 2, 4, 1, 0)):
        assert off(row.run_as(way, x, row.prepare(weight), None, Problem(16)), want) < 8e-3


EPILOGUES = [Epilogue("relu"), Epilogue("gelu", "add"), Epilogue("gelu_tanh"), Epilogue("silu", "multiply")]
WAYS = [(16, 32, 1, 4, 3, 1), (16, 32, 4, 4, 3, 1), (4, 64, 1, 4, 1, 0), (4, 64, 2, 4, 1, 0)]


@pytest.mark.parametrize(
    ("way", "epilogue"),
    [
        # Each way and each epilogue twice; every pair by `make test-long`.
        pytest.param(way, epilogue, marks=[pytest.mark.long] * ((first - second) % 4 > 1))
        for first, way in enumerate(WAYS)
        for second, epilogue in enumerate(EPILOGUES)
    ],
)
def test_epilogues_with_and_without_a_split(way: tuple[int, ...], epilogue: Epilogue) -> None:
    row, weight = FEW_TOKENS[0], packed(16, 512, "bfloat16")
    x, product = operands(row, weight, 3, torch.float32)
    bias = torch.randn(16, device=gpu.device())
    other = torch.randn(3, 16, device=gpu.device()) if epilogue.combine != "none" else None
    with np.errstate(over="ignore"):  # the interpreter's exp
        y = row.run_as(way, x, row.prepare(weight), bias, Problem(16, epilogue), other)
    want = epilogue.apply(product + bias.cpu().double(), None if other is None else other.cpu().double())
    assert off(y, want) < LARGEST_ERROR["bfloat16"]


@FEW
@given(
    st.sampled_from(FEW_TOKENS), st.integers(1, 40), st.integers(1, 90), st.sampled_from((32, 64, 128)), st.booleans()
)
def test_bytes_open_to_the_weight_and_back(row: FewTokens, rows: int, groups: int, group: int, symmetric: bool) -> None:
    columns = group * (1 + groups // 30) if row.dtype == "int4" else 4 * groups
    weight = packed(rows, columns, row.dtype, group=group, symmetric=symmetric)
    prepared = row.prepare(weight)
    back = row.restore(prepared)
    assert torch.equal(back.values, weight.values) and torch.equal(back.indices, weight.indices)
    assert torch.equal(row.dense(prepared, rows, columns).cpu().float(), weight.unpack().float())
    for found, want in ((back.scales, weight.scales), (back.zeros, weight.zeros)):
        assert (found is None) == (want is None) and (found is None or torch.equal(found, want))
    assert prepared.nbytes >= row.least_bytes(rows, columns)


def test_the_reference_opens_what_is_drawn_in_the_page() -> None:
    """One group: values 1 and 2 at places 1 and 3."""
    values = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16).view(torch.int32).repeat(1, 8)
    codes = torch.tensor([[0xDDDDDDDD - (1 << 32)]], dtype=torch.int32)
    dense = opened_weight(values, codes, (), 0, torch.bfloat16)
    assert dense.tolist() == [[0.0, 1.0, 0.0, 2.0] * 8]


def test_every_configuration_covers_the_inputs() -> None:
    row = FEW_TOKENS[0]
    for columns in (64, 768, 4096, 11008):
        groups = -(-columns // 256) * 64
        for tokens in (1, 4, 5):
            tried = row.configurations(4096, columns, tokens)
            assert all(groups % (block * split) == 0 for _, block, split, _, _, _ in tried)
            assert {way[-1] for way in tried} == ({0, 1} if tokens <= 4 else {1})


@pytest.mark.parametrize("columns", [64, 260, 768, 2048])
def test_what_runs_where_nothing_was_searched_fits(columns: int) -> None:
    row, weight = FEW_TOKENS[0], packed(16, columns, "bfloat16")
    for tokens in (1, 3):
        x, want = operands(row, weight, tokens, torch.bfloat16)
        y = row.run_as(default_way(columns, tokens), x, row.prepare(weight), None, Problem(16))
        assert off(y, want) < LARGEST_ERROR["bfloat16"]


@pytest.mark.parametrize("way", [TENSOR, VECTOR], ids=str)
@pytest.mark.parametrize("row", FEW_TOKENS, ids=lambda row: row.dtype)
def test_what_is_not_finite_takes_its_token_and_no_other(row: FewTokens, way: tuple[int, ...]) -> None:
    weight = packed(16, 64, row.dtype)
    x, want = operands(row, weight, 5, torch.float32)
    x[0, 3], x[2, 8], x[4, 63] = torch.nan, torch.inf, -torch.inf
    with np.errstate(invalid="ignore"):
        y = row.run_as(way, x, row.prepare(weight), None, Problem(16)).cpu()
    assert not y[[0, 2, 4]].isfinite().any() and (way is TENSOR or y[[0, 2, 4]].isnan().all())
    assert off(y[[1, 3]], want[[1, 3]]) < LARGEST_ERROR[row.dtype]


def test_a_token_of_a_wider_tensor_is_read() -> None:
    row, weight = FEW_TOKENS[0], packed(16, 64, "bfloat16")
    x = torch.zeros(3, 66, dtype=torch.bfloat16, device=gpu.device())[:1, :64]
    assert not row.run_as(VECTOR, x, row.prepare(weight), None, Problem(16)).any()


def test_foreign_bytes_and_no_tokens() -> None:
    row, weight = FEW_TOKENS[0], packed(16, 64, "bfloat16")
    prepared = row.prepare(weight)
    empty = row.run_as(TENSOR, torch.zeros(0, 64, device=gpu.device()), prepared, None, Problem(16, PLAIN_EPILOGUE))
    assert empty.shape == (0, 16)
    with pytest.raises(KernelError, match="bytes made for another kernel"):
        row.run_as(TENSOR, torch.zeros(1, 4096, device=gpu.device()), prepared, None, Problem(16))
