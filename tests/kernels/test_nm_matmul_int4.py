"""int4 weights under 2:4: every row of the table against the product with the dequantised weight in float64."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import assert_undisturbed, each_row
from tests.kernels.bounds import in_fixed_point, int4_bound
from tests.turns import in_turn
from twofour import native
from twofour.errors import PackingError
from twofour.kernels import find, matmul, rows
from twofour.kernels.epilogue import ACTIVATIONS, COMBINES, Epilogue
from twofour.kernels.nm_matmul import NativeMatmul, from_layout, to_layout
from twofour.kernels.problem import Problem
from twofour.packing import HEADER_BYTES, Packed, pack
from twofour.patterns import parse

ROWS = [row for row in rows() if isinstance(row, NativeMatmul) and row.dtype == "int4"]


def packed_weight(out: int, columns: int, group: int, symmetric: bool, seed: int = 0) -> Packed:
    weight = torch.randn(out, columns, generator=torch.Generator().manual_seed(seed))
    weight *= parse("2:4").project(weight, absolute=True)
    return pack(weight, "2:4", "int4", group=group, symmetric=symmetric)


def assert_product(
    y: torch.Tensor, x: torch.Tensor, packed: Packed, bias: torch.Tensor | None, row: NativeMatmul
) -> None:
    weight = packed.unpack().double()
    want = x.double() @ weight.T
    want = want if bias is None else want + bias.double()
    assert torch.isfinite(y).all()
    bound = int4_bound(x, weight, in_fixed_point(row))
    if y.dtype == torch.bfloat16:
        bound = bound + want.abs() / 256
    assert ((y.double() - want).abs() <= bound + 2 * torch.finfo(torch.float32).eps * want.abs()).all()


def test_a_row_runs_on_every_cpu() -> None:
    assert any(row.isa == "scalar" and row.unavailable() is None for row in ROWS)


@each_row(ROWS)
@given(tokens=st.integers(0, 70), out=st.integers(1, 100), groups=st.integers(1, 5),
       group=st.sampled_from([32, 64, 128]), symmetric=st.booleans(), bias=st.booleans(),
       dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=st.integers(0, 2**31))  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_any_shape(row: NativeMatmul, tokens: int, out: int, groups: int, group: int, symmetric: bool, bias: bool,
                   dtype: torch.dtype, seed: int) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    packed = packed_weight(out, group * groups, group, symmetric, seed)
    x = torch.randn(tokens, group * groups, generator=generator).to(dtype)
    b = torch.randn(out, generator=generator) if bias else None
    y = matmul(x, packed, b, kernel=row.name)
    assert y.shape == (tokens, out) and y.dtype == dtype
    assert_product(y, x, packed, b, row)


@each_row(ROWS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_long_reduction_in_several_threads(row: NativeMatmul, symmetric: bool) -> None:
    packed = packed_weight(130, 4096, 64, symmetric)
    before = torch.get_num_threads()
    try:
        for threads, counts in ((1, range(1, 10)), (2, (1, 6, 9)), (3, (2, 5, 8))):
            torch.set_num_threads(threads)
            for tokens in counts:
                x = torch.randn(tokens, 4096, generator=torch.Generator().manual_seed(tokens))
                assert_product(matmul(x, packed, kernel=row.name), x, packed, None, row)
    finally:
        torch.set_num_threads(before)


@each_row(ROWS)
@in_turn("dtype", [torch.float32, torch.bfloat16])
def test_epilogues(row: NativeMatmul, dtype: torch.dtype) -> None:
    packed = packed_weight(37, 64, 32, True)
    x, other, bias = torch.randn(3, 64).to(dtype), torch.randn(3, 50)[:, :37].to(dtype), torch.randn(37)
    plain = x.float() @ packed.unpack().T + bias
    for activation in ACTIVATIONS:
        for combine in COMBINES:
            epilogue = Epilogue(activation, combine)
            second = None if combine == "none" else other
            y = row.run(x, row.prepare(packed), bias, Problem(37, epilogue), second)
            want = epilogue.apply(plain, None if second is None else second.float())
            tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-3
            torch.testing.assert_close(y.float(), want, rtol=tolerance, atol=tolerance)


@each_row(ROWS)
def test_tokens_of_any_size_and_views(row: NativeMatmul) -> None:
    packed = packed_weight(40, 128, 64, False)
    x = torch.randn(6, 256)[:, ::2] * torch.tensor([[1.0], [0.0], [1e-30], [1e30], [1e-44], [-3.0]])
    y = matmul(x, packed, kernel=row.name)
    assert_product(y, x, packed, None, row)
    assert (y[1] == 0).all()
    x[0, 5], x[5] = float("inf"), float("nan")  # one value, and all of a token: whole numbers of both are the least
    assert torch.isfinite(matmul(x, packed, kernel=row.name)[1:5]).all()
    if in_fixed_point(row):
        assert matmul(x, packed, kernel=row.name)[[0, 5]].isnan().all()


@each_row(ROWS)
def test_calls_from_several_threads_do_not_disturb_each_other(row: NativeMatmul) -> None:
    packed = packed_weight(96, 128, 32, True)
    inputs = [torch.randn(tokens, 128) for tokens in (1, 3, 8, 17)]
    want = [matmul(x, packed, kernel=row.name) for x in inputs]
    assert_undisturbed(lambda x: matmul(x, packed, kernel=row.name), inputs, want)


@given(out=st.integers(1, 130), groups=st.integers(1, 6), group=st.sampled_from([32, 64, 128]),
       symmetric=st.booleans(), seed=st.integers(0, 2**31))  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_layouts_come_back_as_the_canonical_form(out: int, groups: int, group: int, symmetric: bool, seed: int) -> None:
    packed = packed_weight(out, group * groups, group, symmetric, seed)
    for layout in {row.layout for row in ROWS}:
        back = from_layout(to_layout(packed, layout))
        assert back.header == packed.header
        assert torch.equal(back.unpack(), packed.unpack())
        for part in ("values", "indices", "scales", "zeros"):
            ours, theirs = getattr(packed, part), getattr(back, part)
            assert (ours is None) == (theirs is None) and (ours is None or torch.equal(ours, theirs))


def test_bytes_per_weight() -> None:
    # 3/8 byte of values and codes, 2 bytes of scale and 1 of zero point a group, 4 bytes a row.
    for symmetric, size in ((True, 0.375 + 2 / 64 + 4 / 4096), (False, 0.375 + 3 / 64 + 4 / 4096)):
        buffer = to_layout(packed_weight(64, 4096, 64, symmetric), "int4_rows")
        assert (buffer.nbytes - HEADER_BYTES) / (64 * 4096) == size
        assert buffer.data_ptr() % 64 == 0


def test_scales_that_the_layout_cannot_hold_are_refused() -> None:
    packed = packed_weight(8, 64, 32, True)
    assert packed.scales is not None
    with pytest.raises(PackingError, match="bfloat16"):
        to_layout(replace(packed, scales=packed.scales * 1.001), "int4_rows")


@each_row(ROWS)
def test_scales_by_which_sums_would_overflow_are_refused(row: NativeMatmul) -> None:
    packed = packed_weight(8, 64, 32, True)
    assert packed.scales is not None
    packed.scales[1, 0] = 2.0**80
    y = row.run(torch.full((1, 64), 3e4), row.prepare(packed), None, Problem(8))
    assert y.isfinite().all()
    packed.scales[1, 0] = 2.0**81
    with pytest.raises(PackingError, match="stay finite"):
        row.prepare(packed)


def test_the_reference_multiplies_by_the_dequantised_weight() -> None:
    packed, x = packed_weight(8, 64, 32, False), torch.randn(2, 64)
    reference = find("nm_matmul_any_reference__torch")
    assert reference.refuses(packed) is None
    assert torch.equal(matmul(x, packed, kernel=reference.name), x @ packed.unpack().T)


def test_a_level_above_the_cap_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOUR_ISA", "scalar")
    for row in ROWS:
        assert (row.unavailable() is None) == (row.isa == "scalar")
    assert native.isa() == "scalar"
