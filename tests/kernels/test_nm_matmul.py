"""Every row of the native table against float64, at odd shapes, with poisoned outputs (conftest fills torch.empty)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import OF_FLOATS, assert_undisturbed, each_row, threads
from tests.turns import in_turn
from twofour import native
from twofour.errors import KernelError, PackingError
from twofour.kernels import find, matmul, rows, select
from twofour.kernels.dense_matmul import ONEDNN
from twofour.kernels.nm_matmul import NativeMatmul, from_layout, nm_matmul_reference, to_layout
from twofour.kernels.problem import Problem
from twofour.packing import HEADER_BYTES, Packed, layout_header, pack
from twofour.patterns import parse

EPSILON = torch.finfo(torch.float32).eps
ROWS = [row for row in rows() if isinstance(row, NativeMatmul) and row.dtype == "float32"]
SHAPES = [(1, 4), (5, 12), (193, 8), (16, 64), (17, 68), (33, 260), (96, 32), (385, 132), (400, 4)]


def sparse(out: int, columns: int, seed: int = 0) -> torch.Tensor:
    weight = torch.randn(out, columns, generator=torch.Generator().manual_seed(seed))
    return weight * parse("2:4").project(weight, absolute=True)


def assert_product(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """|err| <= 4 eps K^0.5 |x||w| in norm, against float64."""
    want = x.double() @ weight.double().T
    want = want if bias is None else want + bias.double()
    assert torch.isfinite(y).all()
    bound = 4 * EPSILON * x.shape[-1] ** 0.5 * x.double().norm() * weight.double().norm()
    assert (y.double() - want).norm() <= bound + EPSILON * want.norm()


def test_a_row_runs_on_every_cpu() -> None:
    assert any(row.isa == "scalar" and row.unavailable() is None for row in ROWS)


@each_row(ROWS)
def test_odd_shapes_in_three_threads(row: NativeMatmul, count: int = 3) -> None:
    generator = torch.Generator().manual_seed(count)
    with threads(count):
        for out, columns in SHAPES:
            weight = sparse(out, columns)
            packed = pack(weight, "2:4")
            for tokens in (1, 2, 7, 11, 16, 17, 33, 65, 130):
                x = torch.randn(tokens, columns, generator=generator)
                bias = torch.randn(out, generator=generator) if tokens % 2 else None
                assert_product(matmul(x, packed, bias, kernel=row.name), x, weight, bias)


@each_row(ROWS)
@given(tokens=st.integers(0, 140), out=st.integers(1, 200), groups=st.integers(1, 80), bias=st.booleans(),
       seed=st.integers(0, 2**31))  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_any_shape(row: NativeMatmul, tokens: int, out: int, groups: int, bias: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = sparse(out, 4 * groups, seed)
    x = torch.randn(tokens, 4 * groups, generator=generator)
    b = torch.randn(out, generator=generator) if bias else None
    y = matmul(x, pack(weight, "2:4"), b, kernel=row.name)
    assert y.shape == (tokens, out)
    assert_product(y, x, weight, b)


@each_row([row for row in ROWS if row.layout == "pairs"])
def test_padding_of_the_last_tile_is_left_out_and_nothing_else(row: NativeMatmul) -> None:
    """From one group to a whole tile: rows that share every input, and those that share an odd number."""
    generator = torch.Generator().manual_seed(0)
    for columns in range(68, 132, 4):
        for out in (1, 2, 7):
            weight = sparse(out, columns, columns)
            if columns % 8:
                weight[:] = weight[:1]
            x = torch.randn(33, columns, generator=generator)
            assert_product(matmul(x, pack(weight, "2:4"), kernel=row.name), x, weight, None)


@each_row([row for row in ROWS if row.layout == "pairs"])
@in_turn("count", [1, 2])
def test_tails_of_panels_of_every_width(row: NativeMatmul, count: int) -> None:
    """The last vector holds one token, a half, one more than that, or all; scratch memory holds NaN before."""
    weight, bias = sparse(101, 132), torch.randn(101)
    packed = pack(weight, "2:4")
    with threads(count):
        for tokens in (16 * vectors + rest for vectors in range(10) for rest in (1, 8, 9, 16)):
            matmul(torch.full((tokens, 132), torch.nan), packed, kernel=row.name)
            x = torch.randn(tokens, 132, generator=torch.Generator().manual_seed(tokens))
            assert_product(matmul(x, packed, bias, kernel=row.name), x, weight, bias)


@each_row(ROWS)
def test_a_long_reduction_stays_accurate(row: NativeMatmul) -> None:
    weight, x = sparse(64, 4096), torch.randn(40, 4096, generator=torch.Generator().manual_seed(3))
    assert_product(matmul(x, pack(weight, "2:4"), kernel=row.name), x, weight, None)


@each_row(ROWS)
@pytest.mark.parametrize("count", [1, 2])
def test_several_runs_of_inputs_pieces_of_tokens_and_chunks_of_rows(row: NativeMatmul, count: int) -> None:
    weight, bias = sparse(1990, 300), torch.randn(1990)
    packed = pack(weight, "2:4")
    with threads(count):
        for tokens in (20, 140):
            x = torch.randn(tokens, 300, generator=torch.Generator().manual_seed(tokens))
            assert_product(matmul(x, packed, bias, kernel=row.name), x, weight, bias)


@each_row(ROWS)
@in_turn("tokens", [2, 40])
def test_a_long_reduction_errs_less_than_twice_onednn(row: NativeMatmul, tokens: int) -> None:
    weight, x = sparse(192, 4096), torch.randn(tokens, 4096, generator=torch.Generator().manual_seed(3))
    want = x.double() @ weight.double().T

    def error(y: torch.Tensor) -> float:
        return float((y.double() - want).norm() / want.norm())

    if ONEDNN.unavailable() is not None:
        pytest.skip(str(ONEDNN.unavailable()))
    dense = error(ONEDNN.run(x, ONEDNN.prepare(weight), None, Problem(192)))
    assert error(matmul(x, pack(weight, "2:4"), kernel=row.name)) <= 2 * dense


@each_row(ROWS)
def test_views_with_strides(row: NativeMatmul) -> None:
    weight = sparse(24, 32)
    packed = pack(weight, "2:4")
    wide = torch.full((40, 80), float("nan"))
    wide[:20, :32] = torch.randn(20, 32)
    x = wide[:20, :32]
    assert_product(matmul(x, packed, kernel=row.name), x, weight, None)
    transposed = torch.randn(32, 20).T
    assert_product(matmul(transposed, packed, kernel=row.name), transposed, weight, None)
    assert matmul(torch.randn(3, 5, 32), packed, kernel=row.name).shape == (3, 5, 24)


@each_row(ROWS)
def test_padding_does_not_leak_infinities(row: NativeMatmul) -> None:
    weight = sparse(5, 12)
    x = torch.randn(3, 12)
    x[1, 11] = float("inf")
    y = matmul(x, pack(weight, "2:4"), kernel=row.name)
    assert torch.isfinite(y[[0, 2]]).all()


@each_row(ROWS)
def test_calls_from_several_threads_do_not_disturb_each_other(row: NativeMatmul) -> None:
    weight = sparse(96, 128)
    packed = pack(weight, "2:4")
    inputs = [torch.randn(tokens, 128) for tokens in (1, 16, 33, 70)]
    want = [matmul(x, packed, kernel=row.name) for x in inputs]
    assert_undisturbed(lambda x: matmul(x, packed, kernel=row.name), inputs, want)


@pytest.mark.parametrize("layout", sorted({row.layout for row in ROWS}))
@given(out=st.integers(1, 800), groups=st.integers(1, 40), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_layouts_come_back_as_the_canonical_form(layout: str, out: int, groups: int, seed: int) -> None:
    packed = pack(sparse(out, 4 * groups, seed), "2:4")
    back = from_layout(to_layout(packed, layout))
    assert torch.equal(back.values, packed.values)
    assert torch.equal(back.indices, packed.indices)


def test_a_layout_behind_another_header_is_refused() -> None:
    buffer = to_layout(pack(sparse(8, 16), "2:4"), "panels")

    def put_before(layout: str, rows: int, columns: int, pattern: str = "2:4") -> None:
        head = bytearray(layout_header(pattern, "float32", layout, rows, columns))
        buffer[:HEADER_BYTES] = torch.frombuffer(head, dtype=torch.uint8)

    for layout, columns in (("nowhere", 16), ("pairs", 16), ("panels", 160)):
        put_before(layout, 8, columns)
        with pytest.raises(KernelError, match="as many bytes as its header says"):
            from_layout(buffer)
    for high, wide, pattern in ((1 << 20, 1 << 20, "2:4"), (8, 16, "1:2"), (8, 16, "dense")):
        put_before("panels", high, wide, pattern)
        with pytest.raises(PackingError, match="do not fit their header"):  # before memory is asked for
            from_layout(buffer)


def test_every_level_has_a_row_for_few_and_for_many_tokens(isa: str) -> None:
    packed = pack(sparse(32, 64), "2:4")
    few, many = select(packed, 1), select(packed, 512)
    level = OF_FLOATS.get(isa, isa)
    assert (few.isa, many.isa) == (level, level)
    assert (few.layout, many.layout) == ("rows", "pairs")
    x = torch.randn(9, 64)
    assert_product(matmul(x, packed), x, packed.unpack(), None)


@pytest.mark.parametrize("pattern", ["1:2", "4:8", "1:4", "3:5"])
def test_other_patterns_run_by_the_reference_when_asked(pattern: str) -> None:
    rule = parse(pattern)
    weight = torch.randn(6, 4 * rule.group)
    weight *= rule.project(weight, absolute=True)
    packed, x = pack(weight, pattern), torch.randn(3, 4 * rule.group)
    assert_product(matmul(x, packed, kernel="nm_matmul_any_reference__torch"), x, weight, None)
    assert torch.equal(nm_matmul_reference(x, packed), x @ weight.T)
    with pytest.raises(KernelError, match=f"takes 2:4 weights, not {pattern}") as caught:
        matmul(x, packed)
    assert "reason" in str(caught.value)


def test_a_level_above_the_cap_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOUR_ISA", "scalar")
    packed = pack(sparse(8, 8), "2:4")
    for row in ROWS:
        if row.isa != "scalar":
            assert "needs" in (row.unavailable() or "")
            with pytest.raises(KernelError, match="needs avx"):
                matmul(torch.randn(1, 8), packed, kernel=row.name)
    monkeypatch.setenv("TWOFOUR_ISA", "sse9")
    with pytest.raises(KernelError, match="TWOFOUR_ISA='sse9'"):
        native.isa()


def test_bytes_made_for_another_kernel_are_refused() -> None:
    packed = pack(sparse(16, 32), "2:4")
    by_layout = {row.layout: row for row in ROWS if row.isa == "scalar"}
    panels, other = by_layout["panels"], by_layout["rows"]
    x, prepared = torch.randn(4, 32), by_layout["panels"].prepare(packed)
    assert torch.isfinite(panels.run(x, prepared, None, Problem(16))).all()
    for kernel, weight, out in ((other, prepared, 16), (panels, prepared, 15)):
        with pytest.raises(KernelError, match="bytes made for another kernel"):
            kernel.run(x, weight, None, Problem(out))
    damaged = prepared.copy()
    damaged.tensor[0] = 0
    with pytest.raises(KernelError, match="bytes made for another kernel"):
        panels.run(x, damaged, None, Problem(16))


@pytest.mark.parametrize(
    ("x", "bias", "said"),
    [
        (torch.randn(2, 12), None, r"x of shape \(2, 12\)"),
        (torch.randn(2, 16).double(), None, "torch.float64"),
        (torch.randn(2, 16, device="meta"), None, "meta"),
        (torch.randn(2, 16), torch.randn(7), r"bias of shape \(7,\)"),
        (torch.randn(2, 16, requires_grad=True), None, "gradient"),
        (torch.tensor(1.0), None, r"x of shape \(\)"),
    ],
)
def test_operands_that_do_not_fit_are_refused(x: torch.Tensor, bias: torch.Tensor | None, said: str) -> None:
    with pytest.raises(KernelError, match=said):
        matmul(x, pack(sparse(8, 16), "2:4"), bias)


def test_inconsistent_packed_weights_are_refused_before_the_kernel_sees_them() -> None:
    packed = pack(sparse(8, 16), "2:4")
    stream = packed.indices.clone()
    stream[3, 1] = 0xFF
    with pytest.raises(ValueError, match="ascending"):
        matmul(torch.randn(1, 16), Packed(packed.header, packed.values, stream))
    with pytest.raises(KernelError, match="no such kernel"):
        find("nm_matmul_2x4_f32_best__avx1024")


def test_layout_buffers_are_aligned_and_sized() -> None:
    packed = pack(sparse(384, 256), "2:4")
    # 2 bytes of values and 1/8 byte of indices per dense element: 17/32 of float32. "pairs" writes a byte per index
    # and 192 bytes per 96 rows x 64 inputs.
    sizes = {"panels": 384 * 256 * 17 // 8, "rows": 384 * 256 * 17 // 8, "pairs": 4 * 4 * (48 * 320 + 192)}
    assert sizes.keys() == {row.layout for row in ROWS}
    for layout, size in sizes.items():
        buffer = to_layout(packed, layout)
        assert buffer.data_ptr() % 64 == 0
        assert buffer.nbytes - HEADER_BYTES == size
