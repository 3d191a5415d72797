"""The bfloat16 rows against float64 on the rounded operands, at odd shapes, with poisoned outputs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import OF_FLOATS, assert_undisturbed, each_row
from tests.turns import in_turn
from twofour import native
from twofour.errors import KernelError
from twofour.kernels import matmul, rows, select
from twofour.kernels.epilogue import ACTIVATIONS, COMBINES, Epilogue
from twofour.kernels.nm_matmul import NativeMatmul, from_layout, to_layout
from twofour.kernels.problem import Problem
from twofour.packing import HEADER_BYTES, Packed, pack
from twofour.patterns import parse

ROWS = [row for row in rows() if isinstance(row, NativeMatmul) and row.name.startswith("nm_matmul_2x4_bf16_")]
SHAPES = [(1, 4), (5, 12), (16, 64), (17, 68), (33, 260), (96, 32), (72, 112), (385, 132), (400, 4)]
DTYPES = (torch.float32, torch.bfloat16)
every_row = each_row(ROWS)


def sparse(out: int, columns: int, seed: int = 0) -> torch.Tensor:
    weight = torch.randn(out, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return weight * parse("2:4").project(weight, absolute=True)


def packed_of(weight: torch.Tensor) -> Packed:
    return pack(weight, "2:4", dtype="bfloat16")


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    want = x.bfloat16().double() @ weight.double().T
    return want if bias is None else want + bias.double()


def assert_product(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """float32 answers to 4 eps K^0.5 |x||w| in norm; bfloat16 ones to their own rounding, 2^-8 each, above that."""
    want = exact(x, weight, bias)
    assert y.dtype == x.dtype
    assert torch.isfinite(y).all()
    bound = 4 * torch.finfo(torch.float32).eps * x.shape[-1] ** 0.5 * x.double().norm() * weight.double().norm()
    rounding = 2**-8 if x.dtype == torch.bfloat16 else 2**-24
    assert (y.double() - want).norm() <= bound + 1.01 * rounding * want.norm()


def test_a_row_runs_on_every_cpu() -> None:
    assert any(row.isa == "scalar" and row.unavailable() is None for row in ROWS)


@every_row
def test_odd_shapes_in_three_threads(row: NativeMatmul, count: int = 3) -> None:
    generator = torch.Generator().manual_seed(count)
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        for out, columns in SHAPES:
            weight = sparse(out, columns)
            packed = packed_of(weight)
            for tokens in (1, 2, 7, 9, 16, 17, 33, 65, 130):
                x = torch.randn(tokens, columns, generator=generator).to(DTYPES[tokens % 3 % 2])
                bias = torch.randn(out, generator=generator) if tokens % 2 else None
                assert_product(matmul(x, packed, bias, kernel=row.name), x, weight, bias)
    finally:
        torch.set_num_threads(before)


@every_row
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_tokens_than_pass_over_the_weights_at_once(row: NativeMatmul, dtype: torch.dtype) -> None:
    """Groups of panels follow each other, the last one short; two threads share them."""
    weight = sparse(100, 176)
    packed, before = packed_of(weight), torch.get_num_threads()
    try:
        for count, tokens in ((1, 530), (2, 275)):
            torch.set_num_threads(count)
            x, bias = torch.randn(tokens, 176).to(dtype), torch.randn(100)
            assert_product(matmul(x, packed, bias, kernel=row.name), x, weight, bias)
    finally:
        torch.set_num_threads(before)


@every_row
@given(tokens=st.integers(0, 140), out=st.integers(1, 200), groups=st.integers(1, 80), bias=st.booleans(),
       dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**31))  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_any_shape(
    row: NativeMatmul, tokens: int, out: int, groups: int, bias: bool, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = sparse(out, 4 * groups, seed)
    x = torch.randn(tokens, 4 * groups, generator=generator).to(dtype)
    b = torch.randn(out, generator=generator) if bias else None
    y = matmul(x, packed_of(weight), b, kernel=row.name)
    assert y.shape == (tokens, out)
    assert_product(y, x, weight, b)


@every_row
def test_rows_agree_to_a_few_last_bits_on_a_long_reduction(row: NativeMatmul) -> None:
    weight, x = sparse(64, 4096), torch.randn(40, 4096, generator=torch.Generator().manual_seed(3))
    y, want = matmul(x, packed_of(weight), kernel=row.name), exact(x, weight, None)
    assert (y.double() - want).norm() <= 2e-6 * want.norm()


@every_row
def test_every_code_selects_its_inputs(row: NativeMatmul) -> None:
    """All 36 pairs of codes in neighbouring groups, each input a different power of two: the answer is exact."""
    kept = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    weight = torch.zeros(36, 24, dtype=torch.bfloat16)
    for out in range(36):
        for group in range(6):
            for place, input_ in enumerate(kept[(out // 6 ** (group % 2) + group) % 6]):
                weight[out, 4 * group + input_] = 1 + place
    for tokens in (3, 50):
        x = 2.0 ** (torch.arange(24) % 8).repeat(tokens, 1) * (torch.arange(tokens)[:, None] % 2 + 1)
        assert torch.equal(matmul(x, packed_of(weight), kernel=row.name).double(), exact(x, weight, None))


@every_row
@in_turn("dtype", DTYPES)
@in_turn("activation", ACTIVATIONS)
@in_turn("combine", COMBINES)
def test_epilogues(row: NativeMatmul, dtype: torch.dtype, activation: str, combine: str) -> None:
    weight = sparse(37, 68)
    prepared = row.prepare(packed_of(weight))
    for tokens in (1, 5, 33):
        x, bias = torch.randn(tokens, 68).to(dtype), torch.randn(37)
        other = None if combine == "none" else torch.randn(tokens, 80).to(dtype)[:, :37]
        y = row.run(x, prepared, bias, Problem(37, Epilogue(activation, combine)), other)
        want = Epilogue(activation, combine).apply(exact(x, weight, bias), None if other is None else other.double())
        assert y.dtype == dtype
        assert (y.double() - want).norm() <= (2e-6 if dtype == torch.float32 else 2**-8) * want.norm()


@every_row
def test_float32_input_is_rounded_to_nearest_even(row: NativeMatmul) -> None:
    weight = torch.zeros(2, 8, dtype=torch.bfloat16)
    weight[0, 0] = weight[1, 5] = 1
    halves = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 1e-3, 3e38, 0.1, -0.0])
    for tokens in (8, 40):
        x = torch.ones(tokens, 8)
        x[:8, 0], x[:8, 5] = halves, halves
        y = matmul(x, packed_of(weight), kernel=row.name)
        assert torch.equal(y[:8, 0], halves.bfloat16().float())
        assert torch.equal(y[:8, 1], halves.bfloat16().float())


@each_row(row for row in ROWS if row.layout != "bf16_tiles")
@in_turn("dtype", DTYPES)
def test_infinities_and_nan_reach_the_outputs_that_keep_them_only(row: NativeMatmul, dtype: torch.dtype) -> None:
    weight = sparse(5, 12)
    weight[:, 8:] = torch.tensor([1.0, 1.0, 0.0, 0.0])
    weight[2, 8:] = torch.tensor([0.0, 0.0, 1.0, 1.0])
    for tokens in (3, 20):
        x = torch.randn(tokens, 12).to(dtype)
        x[1, 11], x[2, 10] = float("inf"), torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)[0]
        y = matmul(x, packed_of(weight), kernel=row.name)
        bad = ~torch.isfinite(y)
        assert bad.nonzero().tolist() == [[1, 2], [2, 2]]
        assert torch.isnan(y[2, 2])


@every_row
def test_views_with_strides(row: NativeMatmul) -> None:
    weight = sparse(24, 32)
    wide = torch.full((40, 80), float("nan"), dtype=torch.bfloat16)
    wide[:20, :32] = torch.randn(20, 32)
    for x in (wide[:20, :32], torch.randn(32, 20).T):
        assert_product(matmul(x, packed_of(weight), kernel=row.name), x, weight, None)


@every_row
def test_calls_from_several_threads_do_not_disturb_each_other(row: NativeMatmul) -> None:
    packed = packed_of(sparse(96, 128))
    inputs = [torch.randn(tokens, 128) for tokens in (1, 16, 33, 70)]
    want = [matmul(x, packed, kernel=row.name) for x in inputs]
    assert_undisturbed(lambda x: matmul(x, packed, kernel=row.name), inputs, want)


@pytest.mark.parametrize("layout", ["bf16_panels", "bf16_rows"])
@given(out=st.integers(1, 800), groups=st.integers(1, 40), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_layouts_come_back_as_the_canonical_form(layout: str, out: int, groups: int, seed: int) -> None:
    packed = packed_of(sparse(out, 4 * groups, seed))
    back = from_layout(to_layout(packed, layout))
    assert torch.equal(back.values, packed.values)
    assert torch.equal(back.indices, packed.indices)


def test_layouts_take_nine_sixteenths_of_the_dense_bytes() -> None:
    packed = packed_of(sparse(384, 256))
    for layout in ("bf16_panels", "bf16_rows"):
        buffer = to_layout(packed, layout)
        assert buffer.data_ptr() % 64 == 0
        assert buffer.nbytes - HEADER_BYTES == 384 * 256 * 2 * 9 // 16


def test_every_level_has_a_row_for_few_and_for_many_tokens(isa: str) -> None:
    packed = packed_of(sparse(32, 64))
    few, many = select(packed, 1), select(packed, 512)
    level = native.level(OF_FLOATS.get(isa, isa))
    assert (few.layout, many.layout) == ("bf16_rows", "bf16_panels")
    assert (native.level(few.isa), native.level(many.isa)) == (level, level)


def test_other_dtypes_are_refused() -> None:
    packed = packed_of(sparse(8, 16))
    with pytest.raises(KernelError, match="float32 or bfloat16 on the CPU"):
        matmul(torch.randn(2, 16, dtype=torch.float16), packed)
    row = next(row for row in ROWS if row.unavailable() is None)
    with pytest.raises(KernelError, match="cannot read its input"):
        row.run(torch.randn(2, 16).half(), row.prepare(packed), None, Problem(8))
