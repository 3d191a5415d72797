"""No native call reads or writes what is not there: every operand of every row through tensors that are none."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.conftest import each_row
from tests.turns import in_turn
from twofour import native, packing
from twofour.compiler.layer import CompiledLinear, PreparedWeights
from twofour.errors import KernelError
from twofour.kernels.attention import attention
from twofour.kernels.conv import ConvProblem, Geometry
from twofour.kernels.dense_conv import direct_rows
from twofour.kernels.dispatch import read_dispatch
from twofour.kernels.nm_conv.cpu import native_conv_rows
from twofour.kernels.nm_conv.layout import to_conv_layout
from twofour.kernels.nm_matmul import native_rows
from twofour.kernels.nm_matmul.layout import to_layout
from twofour.kernels.problem import Problem
from twofour.packing import HEADER_BYTES

EXT = native.extension()
ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("kinds", ["few", pytest.param("all", marks=pytest.mark.long)])
def test_every_row_refuses_operands_that_no_kernel_can_read(kinds: str) -> None:
    command = [sys.executable, "-m", "tests.native.border_cases", kinds]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    calls, refused = map(int, run.stdout.split()[-2:])
    assert calls >= 40 and refused >= 1500, run.stdout


def linear(bias: torch.Tensor) -> tuple[CompiledLinear, torch.Tensor]:
    """Return a compiled layer (64 -> 32) of the scalar row, and its weight."""
    weight = torch.randn(32, 64)
    weight *= torch.arange(64) % 4 < 2
    row = next(row for row in native_rows() if row.name == "nm_matmul_2x4_f32_rows__scalar")
    prepared = PreparedWeights([row.prepare(packing.pack(weight, "2:4"))])
    return CompiledLinear("fc", 64, Problem(32), read_dispatch(f"*={row.name}"), prepared, bias), weight


def test_a_refused_operand_names_its_layer_and_the_way_out() -> None:
    layer, _ = linear(torch.zeros(32))
    with pytest.raises(KernelError) as error:
        layer(torch._efficientzerotensor((3, 64)))  # pyright: ignore[reportPrivateImportUsage]
    for part in ("layer `fc`", "cannot read its input", "torch.float32 (3, 64)", "memory of its own", "freed storage"):
        assert part in str(error.value)


@pytest.mark.parametrize("bias", [torch.randn(64)[::2], torch.full((1,), 2.0).expand(32), torch.randn(32, 3)[:, 1]])
def test_a_bias_of_any_strides_is_added_as_it_stands(bias: torch.Tensor) -> None:
    layer, weight = linear(torch.zeros(32))
    layer.load_state_dict({"bias": bias}, strict=False, assign=True)
    x = torch.randn(5, 64)
    torch.testing.assert_close(layer(x), x @ weight.T + bias)


@each_row(native_rows(), "kernel")
def test_a_damaged_weight_gives_an_error_or_numbers(kernel) -> None:
    weight = torch.randn(100, 128)
    weight *= torch.arange(128) % 4 < 2
    good = kernel.prepare(packing.pack(weight, "2:4", dtype=kernel.dtype))
    generator = torch.Generator().manual_seed(0)
    for tokens in (1, 3, 40):
        bad = good.copy()
        noise = torch.randint(256, bad.tensor.shape, dtype=torch.uint8, generator=generator)
        bad.tensor[HEADER_BYTES:] = noise[HEADER_BYTES:]
        x = torch.randn(tokens, 128)
        if kernel.layout == "pairs":
            with pytest.raises(
                KernelError, match=r"damaged weight[\s\S]*behind a sound header[\s\S]*load the weight again"
            ):
                kernel.run(x, bad, None, Problem(100))
        else:
            assert kernel.run(x, bad, None, Problem(100)).shape == (tokens, 100)
        kernel.run(x, good, None, Problem(100))


@each_row(native_conv_rows(), "kernel")
def test_a_convolution_says_that_its_weight_is_damaged(kernel) -> None:
    conv = torch.nn.Conv2d(8, 12, 3)
    conv.weight.data *= (torch.arange(8) % 4 < 2)[:, None, None]
    geometry = Geometry.of(conv)
    bad = kernel.prepare(conv.weight, geometry)
    bad.tensor[HEADER_BYTES + 200 :] = 255
    with pytest.raises(KernelError, match="damaged weight"):
        kernel.run(torch.randn(2, 8, 6, 6), bad, None, ConvProblem.of(geometry))


def test_bytes_that_are_fewer_than_their_header_says_are_refused() -> None:
    for kernel in native_rows():
        if not kernel.unavailable():
            good = kernel.prepare(packing.pack(torch.zeros(64, 128), "2:4", dtype=kernel.dtype))
            with pytest.raises(KernelError, match="as many bytes as its header says"):
                kernel.run(torch.randn(2, 128), replace(good, tensor=good.tensor[:-64].clone()), None, Problem(64))


def test_an_answer_without_a_place_for_each_number_is_refused() -> None:
    q = torch.randn(2, 4, 3, 8)
    index = next(row.index for row in native.rows("attention") if row.dtype == "float32")
    for axis in range(3):
        out = torch.empty(q.shape).narrow(axis, 0, 1).expand_as(q)
        with pytest.raises(KernelError, match="a place of their own in memory"):
            EXT.attention(index, q, q, q, out, None, None, None, 1.0, False, 0.0, 0.0, 0, 1)
        held = torch.full((*q.shape, 2), float("nan"))[..., 0].movedim(axis, 0).contiguous().movedim(0, axis)
        EXT.attention(index, q, q, q, held, None, None, None, 1.0, False, 0.0, 0.0, 0, 1)
        assert held.isfinite().all()


def test_rows_are_taken_to_memory_of_their_own() -> None:
    places = torch.tensor([1, 0])
    with pytest.raises(KernelError, match="rows of their own memory"):
        EXT.take_rows(torch.randn(3, 8), places, torch.empty(8).expand(2, 8), 1)


def test_a_weight_of_whole_numbers_is_not_unpacked_without_room_for_its_scales() -> None:
    for layout in ("int8_rows", "int8_tiles"):
        row = next(row for row in native.rows("nm_matmul") if row.layout == layout)
        packed = packing.pack(torch.zeros(32, 128), "2:4", dtype="int8")
        buffer = to_layout(packed, row.layout)
        with pytest.raises(KernelError, match="room for the scales"):
            EXT.layout_unpack(buffer, packed.values.clone(), packed.indices.clone(), None, None)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -1.0, 2.0**101])
def test_a_search_over_scores_without_finite_sums_is_refused(score: float) -> None:
    memory = torch.zeros(16 * 16 + 16)
    held = memory[-memory.data_ptr() // 4 % 16 :][:256].view(16, 16)
    held[3, 5] = score
    row, order = native.best("nm_stripes").index, torch.arange(16)
    with pytest.raises(KernelError, match="scores from 0"):
        EXT.nm_stripes_refine(row, held, order, 2, 4, 0, 1, 8, 0, lambda done, of: None)
    with pytest.raises(KernelError, match="scores from 0"):
        EXT.nm_stripes_assign(row, held, order, 2, 4, 0, 1, 2, 1, 1)


def test_a_layout_that_cannot_be_written_anew_refuses_new_values() -> None:
    layouts = {row.layout: row for row in native_rows() if not EXT.layout_refills(row.layout)}
    assert layouts
    for row in layouts.values():
        buffer = row.prepare(packing.pack(torch.zeros(32, 128), "2:4", dtype=row.dtype))
        with pytest.raises(KernelError, match="written anew in place"):
            row.refill(buffer, torch.zeros(32, 128))


@in_turn(("batch", "queries", "keys"), [(0, 4, 4), (2, 0, 4), (2, 4, 0), (0, 0, 0)])
@in_turn("kind", [torch.bool, torch.float32])
def test_attention_of_nothing_is_nothing(batch: int, queries: int, keys: int, kind: torch.dtype) -> None:
    q, k, v = torch.randn(batch, 2, queries, 8), torch.randn(batch, 2, keys, 8), torch.randn(batch, 2, keys, 8)
    found = attention(q, k, v, torch.ones(1, 1, 1, keys).to(kind))
    assert found.shape == q.shape and not found.any()


@pytest.mark.parametrize("outer, length, inner", [(256, 16, 0), (0, 16, 1), (256, 0, 1), (0, 0, 0), (1 << 40, 16, 0)])
def test_groups_of_no_values_are_none(outer: int, length: int, inner: int) -> None:
    """One size of zero makes the product zero, whatever the others say."""
    bits = torch.zeros(8, dtype=torch.uint8)
    assert EXT.nm_groups(bits, outer, length, inner, 2, 4, False, False) == (0, 0, -1)
    widths = {"8 bits": torch.int8, "16 bits": torch.float16, "32 bits": torch.float32, "64 bits": torch.float64}
    for row in native.rows("nm_ties"):
        if native.unavailable(row.isa) is None:
            values = torch.zeros(0, dtype=widths[row.dtype])
            assert EXT.nm_ties(row.index, values, 1, outer, length, inner, 2, 4) == 0


def test_a_convolution_whose_workspace_no_number_holds_is_refused() -> None:
    x, answer = (torch.zeros(1, 4, 1, 1).to(memory_format=torch.channels_last) for _ in range(2))
    weight, geometry = torch.zeros(4, 4, 3, 2), Geometry.of(torch.nn.Conv2d(4, 4, (3, 2)))
    axes = [3, 1, 912363020, 912363020], [2, 1, 0, 315916328]
    calls = [(EXT.nm_conv, row, to_conv_layout(weight, geometry)) for row in native.rows("nm_conv")]
    calls += [(EXT.dense_conv, row, row.prepare(weight, geometry).tensor) for row in direct_rows()]
    calls = [one for one in calls if EXT.cpu_has(one[1].isa)]
    for call, row, moved in calls:
        with pytest.raises(ValueError, match="no such convolution"):
            call(row.index, x, moved, None, None, answer, 1, *axes, 0, 1)
    _, row, moved = calls[0]
    sizes = [1, 0, 4, 1, 1, *axes[0], *axes[1]]
    with pytest.raises(ValueError, match="no such convolution"):
        EXT.conv_chain([native.convolutions()[row.name]], x, [moved], [None], [None], answer, [sizes], 1, 1)


def test_a_convolution_whose_workspace_nobody_has_says_how_much_it_is() -> None:
    x, answer = (torch.zeros(1, 4, 1, 1).to(memory_format=torch.channels_last) for _ in range(2))
    moved, far = (
        to_conv_layout(torch.zeros(4, 4, 3, 3), Geometry.of(torch.nn.Conv2d(4, 4, 3))),
        [3, 1, 1 << 20, 1 << 20],
    )
    for row in native.rows("nm_conv"):
        if EXT.cpu_has(row.isa):
            with pytest.raises(MemoryError, match=r"no memory for the workspace of this call: \d{13,} bytes"):
                EXT.nm_conv(row.index, x, moved, None, None, answer, 1, far, far, 0, 1)


def test_a_chain_of_answers_that_no_memory_holds_is_refused() -> None:
    row = next(row for row in native.rows("depthwise_conv") if EXT.cpu_has(row.isa))
    x, filters = torch.zeros(1, 4, 1, 1).to(memory_format=torch.channels_last), torch.zeros(1, 4)
    count, sizes = 256, [4, 0, 4, 1, 1 << 30, *([1, 1, 0, 1] * 2)]
    kernels, nothing = [native.convolutions()[row.name]] * count, [None] * count
    with pytest.raises(ValueError, match="answers exceed"):
        EXT.conv_chain(kernels, x, [filters] * count, nothing, nothing, x.clone(), [sizes] * count, 1, 1)
