"""Products with weights of blocks: each row and block size against float64, layouts there and back, hostile layouts."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import each_row, threads
from tests.kernels.sweeps.products import assert_product
from tests.turns import in_turn
from twofour import native
from twofour.errors import KernelError, PackingError
from twofour.kernels import find, matmul, rows, select
from twofour.kernels.base import Prepared
from twofour.kernels.block_matmul import BlockMatmul, block_matmul_reference, from_layout, to_layout
from twofour.kernels.block_matmul.layout import Grid
from twofour.kernels.epilogue import ACTIVATIONS, COMBINES, Epilogue
from twofour.kernels.nm_matmul import Quantization, nm_matmul_int8_reference
from twofour.kernels.problem import Problem
from twofour.packing import HEADER_BYTES, Packed, pack
from twofour.patterns import parse
from twofour.patterns.block import LARGEST_SIDE

LAYOUTS = {"float32": "blocks", "bfloat16": "bf16_blocks", "int8": "int8_blocks"}
ROWS = [row for row in rows() if isinstance(row, BlockMatmul)]
USUAL = ("4x4", "8x1", "8x4", "16x1", "16x4", "8x8", "16x16", "16x32", "32x32", "1x16")
ODD = ("2x1", "1x2", "3x5", "12x6", "24x3", "2x8", "1x64", "64x2", "5x1", "1024x2")


def weight_of(out: int, columns: int, text: str, dtype: str = "float32", seed: int = 0) -> Packed:
    weight = torch.randn(out, columns, generator=torch.Generator().manual_seed(seed))
    rule = parse(f"block:{text}")
    return pack(weight * rule.project(weight, absolute=True), rule, dtype)


def assert_right(row: BlockMatmul, packed: Packed, x: Tensor, bias: Tensor | None = None) -> None:
    y = row.run(x, row.prepare(packed), bias, Problem(packed.header.rows))
    if row.dtype == "int8":
        assert torch.equal(y, nm_matmul_int8_reference(x, packed, bias))
    else:
        low = row.dtype == "bfloat16"
        assert_product(y, x.bfloat16() if low else x, packed.unpack(), bias, low and x.dtype is torch.bfloat16)


SHAPES = (((64, 96), (0, 1, 4, 64)), ((41, 131), (3, 7, 67)))


@each_row(ROWS)
@in_turn("block", USUAL + ODD)
def test_every_block_size(row: BlockMatmul, block: str) -> None:
    """A row meets each block in one shape, and half of the blocks in each."""
    place = ROWS.index(row) + (USUAL + ODD).index(block)
    assert_block(row, block, SHAPES[place % 2 :][:1])


@pytest.mark.long
@each_row(ROWS)
@in_turn("block", USUAL + ODD)
def test_every_block_size_in_every_shape(row: BlockMatmul, block: str) -> None:
    assert_block(row, block, SHAPES)


def assert_block(row: BlockMatmul, block: str, shapes: Sequence[tuple[tuple[int, int], tuple[int, ...]]]) -> None:
    for (out, columns), counts in shapes:
        packed = weight_of(out, columns, f"{block}@0.7", row.dtype)
        for tokens in counts:
            x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens))
            assert_right(row, packed, x, torch.randn(out) if tokens % 2 else None)


@each_row(ROWS)
@given(r=st.integers(1, 33), c=st.integers(2, 33), out=st.integers(1, 90), columns=st.integers(1, 90),
       tokens=st.integers(0, 70), sparsity=st.sampled_from((0, 0.3, 0.9, 0.999)), seed=st.integers(0, 999))  # fmt: skip
@settings(max_examples=10, deadline=None)
def test_any_shape(
    row: BlockMatmul, r: int, c: int, out: int, columns: int, tokens: int, sparsity: float, seed: int
) -> None:
    packed = weight_of(out, columns, f"{r}x{c}@{sparsity}", row.dtype, seed)
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed))
    with threads(1 + seed % 3):
        assert_right(row, packed, x, torch.randn(out))


@each_row([row for row in ROWS if row.tokens_least == 1])
@in_turn("block", ["8x1", "16x1", "4x4", "2x1"])
def test_more_units_than_leave_at_once_and_parts_that_end_inside_one(row: BlockMatmul, block: str) -> None:
    packed = weight_of(3 * 141, 40, f"{block}@0.6/3", row.dtype)
    for tokens in (1, 3, 9):
        assert_right(row, packed, torch.randn(tokens, 40), torch.randn(3 * 141))


def test_sizes_that_both_sides_know() -> None:
    assert native.extension().block_largest_side == LARGEST_SIDE


@each_row(ROWS)
def test_epilogues(row: BlockMatmul) -> None:
    packed = weight_of(37, 50, "8x2@0.5", row.dtype)
    prepared, plain = row.prepare(packed), Problem(37)
    for tokens, activation, combine in itertools.product((1, 21), ACTIVATIONS, COMBINES):
        epilogue = Epilogue(activation, combine)
        problem = Problem(37, epilogue)
        x, bias = torch.randn(tokens, 50), torch.randn(37)
        other = None if combine == "none" else torch.randn(tokens, 37)
        want = epilogue.apply(row.run(x, prepared, bias, plain).double(), None if other is None else other.double())
        torch.testing.assert_close(row.run(x, prepared, bias, problem, other).double(), want, rtol=2e-5, atol=2e-5)


@each_row([row for row in ROWS if row.dtype == "int8"])
@pytest.mark.parametrize("block", USUAL)
def test_int8_has_the_references_bits_in_every_range(row: BlockMatmul, block: str) -> None:
    packed, bias = weight_of(40, 72, f"{block}@0.6", "int8"), torch.randn(40)
    for tokens in (1, 19):
        x = torch.randn(tokens, 72) * 3
        for range_ in (
            Quantization(),
            Quantization(0.03, 120),
            Quantization(0.03, 120, torch.uint8, 0.05, 7),
            Quantization(y_dtype=torch.int8, y_scale=0.1, y_zero=-3),
        ):
            for given_ in (x, x.bfloat16(), *([(x * 9 + 128).clamp(0, 255).byte()] if not range_.dynamic else [])):
                y = row.run(given_, row.prepare(packed), bias, Problem(40, quantization=range_))
                assert torch.equal(y, nm_matmul_int8_reference(given_, packed, bias, range_))


@each_row(ROWS)
@in_turn("block", ["8x1", "16x16", "4x4", "3x2"])
def test_what_is_not_finite_reaches_the_outputs_of_kept_blocks_alone(row: BlockMatmul, block: str) -> None:
    if row.dtype == "int8":
        pytest.skip("a token that is not finite has no range: all its outputs are NaN, as in every int8 row")
    packed = weight_of(70, 64, f"{block}@0.8", row.dtype)
    for tokens in (5, 33):
        for bad in (float("nan"), float("inf")):
            x = torch.randn(tokens, 64)
            x[0, 17] = bad
            y = row.run(x, row.prepare(packed), None, Problem(70))
            want = block_matmul_reference(x, packed)
            assert torch.equal(y.isfinite(), want.isfinite())


def test_the_layout_gives_the_canonical_weight_back() -> None:
    for dtype in ("float32", "bfloat16", "int8"):
        for text in (*(f"{block}@0.7" for block in USUAL + ODD), "16x1@0.5/3", "4x4@0/3"):
            packed = weight_of(39, 70, text, dtype)
            back = from_layout(to_layout(packed, LAYOUTS[dtype]))
            assert back.header == packed.header
            assert torch.equal(back.values, packed.values) and torch.equal(back.indices, packed.indices)
            if packed.scales is not None:
                assert back.scales is not None and torch.equal(back.scales, packed.scales)


def test_a_weight_without_enough_non_zero_blocks_keeps_those_of_the_file() -> None:
    packed = pack(torch.zeros(32, 32), "block:8x8@0.5", "float32")
    assert torch.equal(from_layout(to_layout(packed, "blocks")).indices, packed.indices)
    y = matmul(torch.ones(3, 32), packed, torch.ones(32))
    assert torch.equal(y, torch.ones(3, 32))


@pytest.mark.parametrize("tokens", [1, 40])
def test_matmul_selects_a_kernel_of_blocks(tokens: int) -> None:
    packed = weight_of(48, 64, "8x4@0.5")
    row = select(packed, tokens)
    assert isinstance(row, BlockMatmul) and row.serves(tokens)
    assert_product(matmul(torch.ones(tokens, 64), packed), torch.ones(tokens, 64), packed.unpack(), None, False)


def test_other_weights_are_refused_with_the_reason() -> None:
    row = next(row for row in ROWS if row.dtype == "float32")
    dense = pack(torch.ones(8, 8) * (torch.arange(8) % 2), "2:4")
    assert "takes block weights, not 2:4" in str(row.refuses(dense))
    wide = pack(torch.ones(8, 70_000), "block:8x1@0", "float32")
    assert "65535" in str(row.refuses(wide))
    with pytest.raises(KernelError, match="no kernel multiplies"):
        matmul(torch.ones(1, 70_000), wide)
    assert "computes in float32" in str(row.refuses(weight_of(16, 16, "4x4@0.5", "bfloat16")))


@each_row(ROWS)
def test_bytes_for_another_shape_are_refused(row: BlockMatmul) -> None:
    prepared = row.prepare(weight_of(16, 32, "4x4@0.5", row.dtype))
    with pytest.raises(KernelError, match="made for another kernel"):
        row.run(torch.ones(1, 32), prepared, None, Problem(17))


def damaged(row: BlockMatmul, place: int, value: int, width: int) -> Prepared:
    """Return a layout with a number behind both headers changed."""
    prepared = row.prepare(weight_of(64, 64, "8x1@0.5", row.dtype))
    buffer = prepared.tensor.clone()
    at = HEADER_BYTES + place
    buffer[at : at + width] = torch.tensor(list(value.to_bytes(width, "little")), dtype=torch.uint8)
    return Prepared(row, buffer)


@each_row(ROWS)
@in_turn(
    ("place", "value", "width", "what"),
    [
        (64 + 4, 0xFFFFFFFF, 4, "a strip that begins behind the end"),
        (64 + 4, 160, 4, "a strip that ends before it begins"),
        (128, 0xFFFF, 2, "an input that is none, or more of them than a window has"),
        (0, 0, 4, "blocks without rows"),
        (4, 2048, 4, "blocks that are too wide"),
        (8, 7, 4, "parts that do not divide"),
        (8, 0, 4, "no parts"),
        (16, 1 << 40, 8, "more indices than bytes"),
        (16, 0, 8, "fewer indices than bytes"),
    ],
)
def test_damaged_layouts_are_refused(row: BlockMatmul, place: int, value: int, width: int, what: str) -> None:
    bad = damaged(row, place, value, width)
    for tokens in (1, 20):
        with pytest.raises(KernelError):
            row.run(torch.ones(tokens, 64), bad, None, Problem(64))
    with pytest.raises((PackingError, KernelError)):
        row.restore(bad)


@each_row([row for row in ROWS if row.dtype == "int8"])
@in_turn(("columns", "block"), [(128, "8x126"), (129, "8x510"), (128, "12x6")])
def test_a_last_block_may_reach_into_another_window(row: BlockMatmul, columns: int, block: str) -> None:
    """Its columns behind the inputs are counted there; they multiply the zeros behind a token."""
    packed = weight_of(24, columns, f"{block}@0", "int8")
    for tokens in (1, 20):
        x = torch.randn(tokens, columns)
        y = row.run(x, row.prepare(packed), None, Problem(24))
        assert torch.equal(y, nm_matmul_int8_reference(x, packed, None))


@each_row([row for row in ROWS if row.dtype == "int8"])
def test_counts_behind_the_last_window_are_refused(row: BlockMatmul) -> None:
    """They add up to what the strip has, and no kernel walks them."""
    prepared = row.prepare(weight_of(64, 64, "8x1@0.5", row.dtype))
    counts = HEADER_BYTES + Grid(row.restore(prepared).header).places(0).counts
    buffer = prepared.tensor.clone()
    assert int(buffer[counts]) == 32 and int(buffer[counts + 1 : counts + 8].sum()) == 0
    for moved in (1, 7):
        buffer[counts], buffer[counts + 1 : counts + 8] = 32 - 8, 0
        buffer[counts + moved] = 8
        for tokens in (1, 20):
            with pytest.raises(KernelError):
                row.run(torch.ones(tokens, 64), Prepared(row, buffer), None, Problem(64))


@each_row(ROWS)
@in_turn(("pattern", "entry"), [("8x1@0.5", 3), ("4x16@0.5", 1), ("32x4@0.5", 2)])
def test_an_index_that_names_another_block_is_not_restored(row: BlockMatmul, pattern: str, entry: int) -> None:
    """Kernels stay inside their operands whatever an index is; the way back tells that it is none of packing's."""
    prepared = row.prepare(weight_of(64, 64, pattern, row.dtype))
    grid = Grid(row.restore(prepared).header)
    places = grid.places(0)
    width = 1 if places.windows else 2
    at = HEADER_BYTES + places.indices + width * entry
    for value in (63, 255) if places.windows else (grid.zero - 1, grid.zero + 1):  # out of order, behind the end
        buffer = prepared.tensor.clone()
        buffer[at : at + width] = torch.tensor(list(value.to_bytes(width, "little")), dtype=torch.uint8)
        with pytest.raises(PackingError):
            row.restore(Prepared(row, buffer))


def test_a_damaged_name_of_the_pattern_is_refused() -> None:
    buffer = to_layout(weight_of(64, 64, "8x1@0.5", "float32"), "blocks").clone()
    buffer[HEADER_BYTES + 24] = ord("?")
    with pytest.raises(PackingError, match="the name of a pattern"):
        from_layout(buffer)


@in_turn("at", range(6))
@in_turn("value", [0, -1, 3, 1 << 62])
def test_sizes_of_no_blocks_are_refused(at: int, value: int) -> None:
    sizes = [64, 64, 8, 4, 1, 4]
    sizes[at] = value
    if at < 4 and value == 3:  # sides may be three
        return
    with pytest.raises(ValueError, match="no such blocks"):
        native.extension().block_shape(*sizes)
    with pytest.raises(ValueError, match="no such blocks"):
        native.extension().block_places(*sizes, 0)


def test_a_layout_of_another_pattern_is_no_layout_of_blocks() -> None:
    two_four = find("nm_matmul_2x4_f32_rows__scalar").prepare(pack(torch.ones(8, 8) * (torch.arange(8) % 2), "2:4"))
    with pytest.raises(PackingError, match="do not fit their header"):
        from_layout(two_four.tensor)
