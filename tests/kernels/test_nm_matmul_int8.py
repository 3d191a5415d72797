"""int8 rows of the native table: the same bits as the reference, at odd shapes, with poisoned outputs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import assert_undisturbed, each_row, threads
from tests.turns import in_turn
from twofour import native
from twofour.errors import KernelError
from twofour.kernels import matmul, rows, select
from twofour.kernels.dense_matmul import ONEDNN_INT8
from twofour.kernels.epilogue import Epilogue
from twofour.kernels.nm_matmul import (
    DYNAMIC,
    NativeMatmul,
    Quantization,
    from_layout,
    nm_matmul_int8_reference,
    quantize_input,
    to_layout,
)
from twofour.kernels.problem import Problem
from twofour.kernels.quantization import LARGEST_REDUCTION
from twofour.packing import HEADER_BYTES, Packed, pack
from twofour.patterns import parse

ROWS = [row for row in rows() if isinstance(row, NativeMatmul) and row.dtype == "int8"]
SHAPES = [(1, 4), (5, 12), (16, 64), (17, 68), (33, 260), (96, 32), (65, 132), (400, 4), (40, 1604)]
STATIC = Quantization(0.02, 117)


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def sparse(out: int, columns: int, seed: int = 0) -> Packed:
    weight = random(out, columns, seed=seed)
    return pack(weight * parse("2:4").project(weight, absolute=True), "2:4", dtype="int8")


def run(row: NativeMatmul, x: Tensor, packed: Packed, bias: Tensor | None, quantization: Quantization) -> Tensor:
    return row.run(x, row.prepare(packed), bias, Problem(packed.header.rows, quantization=quantization))


def assert_same(y: Tensor, want: Tensor) -> None:
    assert (y.shape, y.dtype) == (want.shape, want.dtype)
    assert torch.equal(y, want), f"{int((y != want).sum())} of {y.numel()} differ"


def test_a_row_runs_on_every_cpu() -> None:
    assert any(row.isa == "scalar" and row.unavailable() is None for row in ROWS)


@each_row(ROWS)
def test_odd_shapes_in_three_threads(row: NativeMatmul, count: int = 3) -> None:
    with threads(count):
        for out, columns in SHAPES:
            packed = sparse(out, columns)
            for tokens in (0, 1, 2, 3, 7, 8, 9, 17, 65, 130):
                x, bias = random(tokens, columns, seed=tokens), random(out, seed=1) if tokens % 2 else None
                for quantization in (DYNAMIC, STATIC):
                    want = nm_matmul_int8_reference(x, packed, bias, quantization)
                    assert_same(run(row, x, packed, bias, quantization), want)


@each_row(ROWS)
@given(tokens=st.integers(0, 60), out=st.integers(1, 100), groups=st.integers(1, 80), bias=st.booleans(),
       size=st.sampled_from([1e-30, 1e-3, 1.0, 1e4]), shift=st.sampled_from([-3.0, 0.0, 3.0]),
       reads=st.sampled_from([torch.float32, torch.bfloat16]), static=st.booleans(),
       answers=st.sampled_from([None, torch.float32, torch.bfloat16, torch.uint8, torch.int8]),
       seed=st.integers(0, 2**31))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_any_call(
    row: NativeMatmul, tokens: int, out: int, groups: int, bias: bool, size: float, shift: float, reads: torch.dtype,
    static: bool, answers: torch.dtype | None, seed: int,
) -> None:  # fmt: skip
    packed = sparse(out, 4 * groups, seed)
    x = ((random(tokens, 4 * groups, seed=seed) + shift) * size).to(reads)
    ranges = Quantization.of_range(-2 * size, (2 + shift) * size) if static else DYNAMIC
    quantization = replace(ranges, y_dtype=answers, y_scale=size / 8, y_zero=100 if answers is torch.uint8 else 0)
    b = random(out, seed=seed) * size if bias else None
    want = nm_matmul_int8_reference(x, packed, b, quantization)
    assert_same(run(row, x, packed, b, quantization), want)


@each_row(ROWS)
def test_extreme_sums_do_not_saturate(row: NativeMatmul) -> None:
    """255 * 127 twice exceeds int16, and 4096 inputs of it exceed a float's 24 bits."""
    for columns in (8, 4096):
        weight = torch.zeros(3, columns)
        weight[0, 0::4] = weight[0, 3::4] = 1.0
        weight[1, 1::4] = weight[1, 2::4] = -1.0
        weight[2, 0::4], weight[2, 1::4] = 1.0, -1.0
        packed = pack(weight, "2:4", dtype="int8")
        x = torch.full((2, columns), 255, dtype=torch.uint8)
        y = run(row, x, packed, None, Quantization(1.0, 0))
        assert_same(y, nm_matmul_int8_reference(x, packed, None, Quantization(1.0, 0)))
        assert y[0].tolist() == [255.0 * columns / 2, -255.0 * columns / 2, 0.0]


@each_row(ROWS)
def test_int8_weights_without_scales_and_with_the_lowest_value(row: NativeMatmul) -> None:
    weight = torch.tensor([[-128, 0, 127, 0, 0, -128, 0, -128]], dtype=torch.int8)
    packed = pack(weight, "2:4")
    x = torch.tensor([[255, 9, 255, 9, 9, 254, 9, 255]], dtype=torch.uint8)
    assert run(row, x, packed, None, Quantization(1.0, 0)).item() == (x.double() @ weight.double().T).item()


@each_row(ROWS)
def test_u8_inputs_and_static_ranges(row: NativeMatmul) -> None:
    for tokens, columns in ((11, 76), (16, 64), (24, 204)):
        packed, x, bias = sparse(40, columns), random(tokens, columns + 5)[:, :columns], random(40)
        prepared, ranged = row.prepare(packed), Problem(40, quantization=STATIC)
        want = nm_matmul_int8_reference(x, packed, bias, STATIC)
        assert_same(row.run(x, prepared, bias, ranged), want)
        whole, _, _ = quantize_input(x, STATIC)
        wide = torch.full((tokens, columns + 11), 255, dtype=torch.uint8)  # rows that stand apart
        wide[:, :columns] = whole
        assert_same(row.run(wide[:, :columns], prepared, bias, ranged), want)
    with pytest.raises(KernelError, match=r"does not know what its input stands for[\s\S]*Quantization\(x_scale"):
        row.run(whole, prepared, bias, Problem(40))


@each_row([*ROWS, ONEDNN_INT8], "row")
def test_inputs_of_other_whole_numbers_are_refused(row: NativeMatmul) -> None:
    prepared = row.prepare(pack(torch.eye(8), "2:4", dtype="int8"))
    for other in (Quantization(bits=4), Quantization(1.0, 8, bits=4), Quantization(1.0, levels="twos")):
        with pytest.raises(KernelError, match="8 bits, unsigned"):
            row.run(torch.ones(2, 8), prepared, None, Problem(8, quantization=other))


@each_row(ROWS)
def test_views_with_strides(row: NativeMatmul) -> None:
    packed = sparse(24, 32)
    wide = torch.full((40, 80), float("nan"))
    wide[:20, :32] = random(20, 32)
    x = wide[:20, :32]
    assert_same(run(row, x, packed, None, DYNAMIC), nm_matmul_int8_reference(x, packed))
    transposed = random(32, 20).T
    assert_same(run(row, transposed, packed, None, DYNAMIC), nm_matmul_int8_reference(transposed, packed))


@each_row(ROWS)
def test_what_is_not_finite_stays_in_its_token(row: NativeMatmul) -> None:
    packed, x = sparse(35, 44), random(5, 44)
    x[1, 43], x[3, 0], x[4] = float("nan"), float("-inf"), 0.0
    y = run(row, x, packed, None, DYNAMIC)
    assert y[[1, 3]].isnan().all()
    assert_same(y[[0, 2, 4]], nm_matmul_int8_reference(x[[0, 2, 4]], packed))
    assert (y[4] == 0).all()
    static = run(row, x, packed, None, STATIC)  # saturates; NaN is the least value
    assert_same(static, nm_matmul_int8_reference(x, packed, None, STATIC))


@each_row(ROWS)
@in_turn("activation", ["none", "relu", "gelu", "gelu_tanh", "silu"])
@in_turn("combine", ["none", "add", "multiply"])
def test_epilogues(row: NativeMatmul, activation: str, combine: str) -> None:
    packed, x, bias = sparse(37, 64), random(9, 64), random(37)
    epilogue = Epilogue(activation, combine)
    other = None if combine == "none" else random(9, 37, seed=5)
    y = row.run(x, row.prepare(packed), bias, Problem(37, epilogue), other)
    torch.testing.assert_close(y, nm_matmul_int8_reference(x, packed, bias, DYNAMIC, epilogue, other))
    whole = Quantization(y_dtype=torch.int8, y_scale=0.1)
    y = row.run(x, row.prepare(packed), bias, Problem(37, epilogue, quantization=whole), other)
    want = nm_matmul_int8_reference(x, packed, bias, whole, epilogue, other)
    assert (y.int() - want.int()).abs().max() <= 1  # a value between two may fall to either side


@each_row(ROWS)
def test_calls_from_several_threads_do_not_disturb_each_other(row: NativeMatmul) -> None:
    packed = sparse(96, 128)
    prepared = row.prepare(packed)
    inputs = [random(tokens, 128) for tokens in (1, 16, 33, 70)]
    want = [nm_matmul_int8_reference(x, packed) for x in inputs]
    assert_undisturbed(lambda x: row.run(x, prepared, None, Problem(96)), inputs, want)


@given(out=st.integers(1, 200), groups=st.integers(1, 40), seed=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_layouts_come_back_as_the_canonical_form(out: int, groups: int, seed: int) -> None:
    packed = sparse(out, 4 * groups, seed)
    for layout in sorted({row.layout for row in ROWS}):
        buffer = to_layout(packed, layout)
        assert buffer.data_ptr() % 64 == 0
        back = from_layout(buffer)
        assert torch.equal(back.values, packed.values)
        assert torch.equal(back.indices, packed.indices)
        assert back.scales is not None and packed.scales is not None
        assert torch.equal(back.scales, packed.scales)


def test_a_layout_is_five_eighths_of_a_byte_per_input() -> None:
    size = to_layout(sparse(384, 256), "int8_rows").nbytes
    assert size == HEADER_BYTES + 384 * 8 + 384 * 256 * 5 // 8


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx_vnni", "avx512_vnni", "avx512"])
def test_every_level_is_served(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := native.unavailable("avx512_vnni" if isa == "avx512" else isa):
        pytest.skip(reason)
    monkeypatch.setenv("TWOFOUR_ISA", isa)
    packed, x = sparse(32, 64), random(9, 64)
    chosen = select(packed, 9)
    assert chosen.isa == ("avx512_vnni" if isa == "avx512" else isa)
    assert_same(matmul(x, packed), nm_matmul_int8_reference(x, packed))


def test_the_product_is_near_the_real_one() -> None:
    weight = random(256, 1024)
    weight *= parse("2:4").project(weight, absolute=True)
    x = random(16, 1024, seed=1)
    want = x @ weight.T
    for quantization in (DYNAMIC, Quantization.of_range(x.min().item(), x.max().item())):
        y = nm_matmul_int8_reference(x, pack(weight, "2:4", dtype="int8"), None, quantization)
        assert (y - want).norm() / want.norm() < 0.02


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"x_scale": 0.0}, "scale 0.0"),
        ({"x_scale": float("nan")}, "scale nan"),
        ({"x_scale": 1.0, "x_zero": 256}, "zero point 256"),
        ({"y_dtype": torch.int8, "y_zero": 128}, "zero point 128"),
        ({"y_dtype": torch.float64}, "float64"),
    ],
)
def test_impossible_quantizations_are_refused(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(KernelError, match=said):
        Quantization(**arguments)  # pyright: ignore[reportArgumentType]


def test_sums_that_could_overflow_are_refused() -> None:
    packed = pack(torch.zeros(1, LARGEST_REDUCTION + 4), "2:4", dtype="int8")
    with pytest.raises(KernelError, match="may exceed int32"):
        matmul(torch.zeros(1, LARGEST_REDUCTION + 4), packed)
