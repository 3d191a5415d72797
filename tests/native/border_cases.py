"""The child of test_border: each row of each native operation, its tensors replaced by what no kernel reads.

One process imports torch, on one thread, and forks for every 32 calls: a crash ends that child, whose last line
names the call. A fork copies the tables of all of torch's memory, which takes longer than a call's refusals.
Prints how many calls and how many refusals there were.
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from twofour import native, packing
from twofour.errors import KernelError
from twofour.kernels.bits_matmul import GROUPS, BitWeight, CodeSteps, bits_rows, twos
from twofour.kernels.bits_matmul.coded import PLAINLY
from twofour.kernels.bits_matmul.conv import CodedImages, bits_conv_rows
from twofour.kernels.block_matmul import block_rows
from twofour.kernels.conv import Geometry
from twofour.kernels.dense_conv import direct_rows, winograd_rows
from twofour.kernels.dense_matmul import native_dense_rows
from twofour.kernels.fused_block import Expression, program
from twofour.kernels.nm_conv.layout import to_conv_layout
from twofour.kernels.nm_matmul import native_rows
from twofour.kernels.nm_matmul.hybrid import hybrid_rows
from twofour.kernels.window_conv import window_conv_rows
from twofour.packing import layout_header
from twofour.patterns import parse

Call = tuple[str, Callable[..., Any], list[Any]]

EXT = native.extension()

BEGIN, CODES = torch.tensor([-9, 0, 1 << 29], dtype=torch.int32), torch.tensor([0, 1, 3], dtype=torch.uint8)
STEPS = CodeSteps(1.0, 1.0, BEGIN, CODES, CODES, torch.zeros_like(CODES), CODES // 2, torch.ones(1, 256) > 0).table()


class Wrapper(Tensor):
    """A tensor whose numbers stand elsewhere."""

    @staticmethod
    def __new__(cls, like: Tensor) -> Wrapper:
        """Make one of that shape and dtype."""
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)  # pyright: ignore

    @classmethod
    def __torch_dispatch__(cls, *arguments: Any) -> Any:
        """Refuse every operator."""
        raise NotImplementedError


def freed(tensor: Tensor) -> Tensor:
    """Return a copy whose storage was given back, as FSDP and offloading do."""
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


BAD: dict[str, Callable[[Tensor], Any]] = {
    "meta": lambda t: t.to("meta"),
    "fake": FakeTensorMode().from_tensor,
    "functional": torch._to_functional_tensor,  # pyright: ignore[reportPrivateImportUsage]
    "zero": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),  # pyright: ignore
    "wrapper": Wrapper,
    "freed": freed,
    "of complex numbers": lambda t: t.to(torch.complex128),
    "sparse": lambda t: t.to_sparse(),
    "a number": lambda t: 5,
    "an address": lambda t: t.data_ptr(),
    "small": lambda t: t.flatten()[: t.numel() // 2].clone(),
    "empty": lambda t: t.flatten()[:0],
    "a scalar": lambda t: t.flatten()[0],
}
"""Kinds of tensors that every operand of every call is refused in."""

SIZES = ("small", "empty", "a scalar")

OF_ROWS = (*SIZES, "freed", "of complex numbers")
"""Kinds whose numbers a row's own sizes and types decide on; the others are told before it is known which row."""

ANY_SIZE = {("nm_nonzero", 1), ("nm_stripes_refine", 2), ("nm_stripes_assign", 2)}
"""Operands that may be shorter: pieces of a weight, and of an order of columns."""

BROADCAST = {("fused_block", 1), ("fused_block", 2)}
"""Operands that may be one number."""

ODD: dict[str, Callable[[Tensor], Any]] = {
    "spread": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "turned": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded": lambda t: t.flatten()[:1].expand(t.shape),
}
"""Kinds that are read as they stand or refused."""


def header(dtype: str, layout: str, rows: int, columns: int, size: int) -> Tensor:
    """Return a buffer of a layout, to be written."""
    head = torch.frombuffer(bytearray(layout_header("2:4", dtype, layout, rows, columns)), dtype=torch.uint8)
    return torch.cat([head, torch.zeros(size, dtype=torch.uint8)])


def sparse(rows: int, columns: int) -> Tensor:
    """Return a 2:4 weight."""
    return torch.randn(rows, columns) * (torch.arange(columns) % 4 < 2)


def fused(scale: int) -> Iterator[Call]:
    """Calls of products in a row, of every family: with a gate and norms, and one alone."""
    rows, tokens = 32 * scale, 3 * scale
    x, bias, hidden = torch.randn(tokens, 128), torch.randn(rows), torch.randn(64)
    other, y = torch.randn(tokens, rows), torch.empty(tokens, rows)
    norm = native.best("norm", dtype="float32").index
    before, after = (norm, torch.randn(128), torch.randn(128), 1e-5, True), (norm, bias, bias.clone(), 1e-5, True)
    each = {
        row.layout: row
        for row in (*native_rows(), *hybrid_rows(), *block_rows(), *native_dense_rows())
        if row.unavailable() is None
    }
    for row in each.values():  # of one of each layout
        place = native.products()[row.name]
        blocks, dense = row.operation == "block_matmul", row.operation == "dense_matmul"
        weights = [sparse(n, m) for n, m in ((64, 128), (64, 128), (rows, 64), (rows, 128))]
        if blocks:
            weights = [torch.ones_like(weight) * (torch.arange(weight.shape[1]) % 8 < 4) for weight in weights]
        pattern = "block:8x4@0.5" if blocks else "2:4+25%" if row.operation == "hybrid_matmul" else "2:4"
        first, gate, last, alone = (
            row.prepare(weight if dense else packing.pack(weight, pattern, dtype=row.dtype)).tensor
            for weight in weights
        )
        parts = (first, hidden, gate, hidden.clone(), last, bias)
        beside = (other, *before, *after, y.clone(), 1)
        yield row.isa, EXT.fused_matmul, [place, place, place, x, *parts, y, 64, 1, 0, 1, *beside]
        parts = (None, None, None, None, alone, bias)
        yield row.isa, EXT.fused_matmul, [-1, -1, place, x, *parts, y, 0, 0, 1, 1, *beside]


def products(scale: int) -> Iterator[Call]:
    """Calls of the products, each with a bias and a second operand."""
    rows, tokens = 32 * scale, 3 * scale
    x, bias = torch.randn(tokens, 128), torch.randn(rows)
    other, y = torch.randn(tokens, rows), torch.empty(tokens, rows)
    for row in native_rows():
        packed = row.prepare(packing.pack(sparse(rows, 128), "2:4", dtype=row.dtype)).tensor
        yield row.isa, EXT.nm_matmul, [row.index, x, packed, bias, y, 1, 1, other, True, 1.0, 0, 1.0, 0, 1]
        if row.layout in ("panels", "pairs", "bf16_panels"):
            yield row.isa, EXT.nm_matmul_columns, [row.index, x.T.contiguous(), packed, y.T.contiguous(), 1]
    regions = sparse(rows, 128) + torch.randn(rows, 128) * (torch.arange(128) % 16 < 4)
    for row in hybrid_rows():
        packed = row.prepare(packing.pack(regions, "2:4+25%", dtype=row.dtype)).tensor
        yield row.isa, EXT.hybrid_matmul, [row.index, x, packed, bias, y, 1, 1, other, True, 1.0, 0, 1.0, 0, 1]
    blocks = torch.randn(rows, 128) * (torch.arange(128) % 16 < 4)
    for row in block_rows():
        packed = row.prepare(packing.pack(blocks, "block:8x4@0.75", dtype=row.dtype)).tensor
        yield row.isa, EXT.block_matmul, [row.index, x, packed, bias, y, 1, 1, other, True, 1.0, 0, 1.0, 0, 1]
    codes = BitWeight(torch.randint(0, 4, (rows, 128), dtype=torch.uint8), twos(2), torch.ones(rows))
    kept = BitWeight(torch.where(torch.arange(128) % 4 < 2, codes.codes, 2).to(torch.uint8), twos(2), codes.scales)
    for row in bits_rows():
        packed, many = row.prepare(kept if row.sparse else codes).tensor, (True, 1.0, 0, 1.0, 0, 3, 1, False, 1)
        yield row.isa, EXT.bits_matmul, [row.index, x, packed, bias, y, 1, 1, other, *PLAINLY, *many]
        marked = torch.zeros(tokens, 129, dtype=torch.uint8), torch.zeros(tokens, rows + 1, dtype=torch.uint8)
        handing = torch.ones(2, rows), STEPS, True, (0, 3), 0.4
        of_codes = [row.index, marked[0], packed, bias, marked[1], 2, 0, None, *handing, False, *many[1:]]
        yield row.isa, EXT.bits_matmul, of_codes
        if row.layout == GROUPS:
            packed = row.prepare(
                BitWeight(codes.codes, twos(2), torch.ones(rows, 4), torch.zeros(rows, 4, dtype=torch.int8))
            )
            many = (True, 1.0, 0, 1.0, 0, 255, 0, False, 1)
            yield row.isa, EXT.bits_matmul, [row.index, x, packed.tensor, bias, y, 1, 1, other, *PLAINLY, *many]
    geometry, codes = Geometry(8, 12, (3, 3)), BitWeight(codes.codes[:12, :72].contiguous(), twos(2), torch.ones(12))
    image, sizes = torch.randn(2 * scale, 8, 6, 6).contiguous(memory_format=torch.channels_last), ([6, 6], [4, 4])
    images, answer = CodedImages(False, 12, 2, 2, 2).image_bytes, torch.empty(2 * scale, 12, 4, 4)
    affine, of_codes = torch.ones(2, 12), (1.0, 0, 3, 1, False)
    for row in bits_conv_rows():
        packed, axes = row.prepare(codes, geometry).tensor, ((3, 1, 0, 1), (3, 1, 0, 1))
        last = answer.contiguous(memory_format=torch.channels_last)
        many = (8, 12, *axes, *sizes)
        means = torch.empty(2 * scale, 12, 1, 1)
        for to, back in (((0, 1, 1), last), ((0, 0, 2), means)):
            given = [row.index, image, packed, bias[:12], None, affine, last.clone(), back, *many, to]
            yield row.isa, EXT.bits_conv, [*given, True, *of_codes, True, 1]
        numbers, coded = (
            torch.zeros(4 * 4 * row.panel, dtype=torch.uint8),
            torch.empty(2 * scale, images, dtype=torch.uint8),
        )
        yield (
            row.isa,
            EXT.bits_conv,
            [row.index, image, packed, None, numbers, None, None, coded, *many, (0, 3, 2), False, *of_codes, False, 1],
        )
    for row in native_dense_rows():
        dense = row.prepare(torch.randn(rows, 128)).tensor
        yield row.isa, EXT.dense_matmul, [row.index, x, dense, bias, y, 1, 1, other, True, 1.0, 0, 1.0, 0, 1]
        if row.looks_up:
            places = torch.arange(tokens).clamp_max(rows - 1)
            yield row.isa, EXT.dense_rows, [row.index, dense, places, torch.empty(tokens, 128, dtype=row.value), 1]
    yield from fused(scale)
    geometry = Geometry.of(torch.nn.Conv2d(8, 12, 3))
    weight = sparse(12 * 9, 8).view(12, 3, 3, 8).permute(0, 3, 1, 2)
    image, answer = (
        torch.randn(size).contiguous(memory_format=torch.channels_last)
        for size in ((2 * scale, 8, 6, 6), (2 * scale, 12, 4, 4))
    )
    axes = ((3, 1, 0, 1), (3, 1, 0, 1))
    filters, codes = torch.randn(9, 8), (4, 1)
    for row in native.rows("depthwise_conv"):
        yield (
            row.isa,
            EXT.depthwise_conv,
            [
                row.index,
                image,
                filters,
                bias[:8],
                answer[:, :8].contiguous(memory_format=torch.channels_last),
                *axes,
                *codes,
            ],
        )
    small, scaled = torch.randn(4, 8), image.clone(memory_format=torch.preserve_format)
    for row in native.rows("squeeze_excite"):
        weights = small, bias[:4], small.clone(), bias[:8]
        yield row.isa, EXT.squeeze_excite, [row.index, image, *weights, scaled, *codes, 1]
    for row in native.rows("column_sums"):
        yield row.isa, EXT.pixel_means, [row.index, image, torch.empty(image.shape[:2]), 1]
    for row in native.rows("nm_conv"):
        yield (
            row.isa,
            EXT.nm_conv,
            [row.index, image, to_conv_layout(weight, geometry), bias[:12], answer.clone(), answer, 1, *axes, 1, 1],
        )
    rule = parse("2:4+25%")
    regions = torch.randn(12, 3, 3, 8)
    regions = (regions * rule.project(regions, absolute=True)).movedim(-1, 1)
    for row in native.rows("hybrid_conv"):
        moved = to_conv_layout(regions, geometry, rule)
        given = [row.index, image, moved, bias[:12], answer.clone(), answer, 1, *axes, 1, 1]
        yield row.isa, EXT.hybrid_conv, given
    for row in window_conv_rows():
        for x, ranged in ((image, (True, 1.0, 0)), (image.to(torch.uint8), (False, 0.1, 3))):
            moved = row.prepare(weight, geometry).tensor
            given = row.index, x, moved, bias[:12], answer.clone(), answer, *axes, 1, *ranged, 1.0, 0, 1
            yield row.isa, EXT.window_conv, [*given]
    for row in (*direct_rows(), *winograd_rows()):
        moved = row.prepare(weight, geometry).tensor
        yield (
            row.isa,
            EXT.dense_conv,
            [row.index, image, moved, bias[:12], answer.clone(), answer, 1, *axes, 1, 1],
        )
        between = [8, 4, 8, 6, 6, 3, 1, 1, 1, 3, 1, 1, 1], [1, 1, 12, 4, 4, 3, 1, 0, 1, 3, 1, 0, 1]
        first = next(name for name in native.convolutions() if "depthwise" in name and name.endswith(f"__{row.isa}"))
        chained = [native.convolutions()[first], row.native_convolution], image, [filters, moved], [bias[:8], bias[:12]]
        yield row.isa, EXT.conv_chain, [*chained, [None, answer.clone()], answer, [*between], 2, 1]


def recurrent(scale: int) -> Iterator[Call]:
    """Calls of recurrent layers, a projected LSTM's with every operand there is."""
    inner, width, batch = 12 * scale, 8, 2
    x, sizes = torch.randn(3, 4), torch.tensor([2, 1])
    for row in native.rows("recurrent"):
        products = [one for one in native_dense_rows() if (one.dtype, one.isa) == ("float32", row.isa)]
        product = next(iter(products), native_dense_rows()[0])
        weights = [
            product.prepare(torch.randn(*shape)).tensor
            for shape in ((4 * inner, 4), (4 * inner, width), (width, inner))
        ]
        biases = torch.randn(4 * inner), torch.randn(4 * inner)
        first = torch.randn(2, batch, width), torch.randn(2, batch, inner)
        last = torch.zeros(3, width), torch.zeros(2, batch, width), torch.zeros(2, batch, inner)
        given = x, sizes, weights[0], biases[0], weights[1], biases[1], weights[2], *first, *last
        yield row.isa, EXT.recurrent, [row.index, 0, *[product.native_product] * 3, *given, 1, 1]


def layouts(scale: int) -> Iterator[Call]:
    """Calls that write, read and refill layouts."""
    for layout, dtype in {(row.layout, row.dtype) for row in native_rows()}:
        weight = sparse(32 * scale, 128)
        packed = packing.pack(weight, "2:4", dtype=dtype)
        buffer = next(row for row in native_rows() if row.layout == layout).prepare(packed).tensor
        parts = [packed.values, packed.indices, packed.scales, packed.zeros]
        yield "scalar", EXT.layout_pack, [buffer, *parts]
        yield "scalar", EXT.layout_unpack, [buffer, *parts]
        if EXT.layout_refills(layout):
            yield "scalar", EXT.layout_refill, [buffer, weight, 1]
            yield "scalar", EXT.layout_refill_kept, [buffer, packed.values, packed.indices, False, 1]
            across = packing.pack(sparse(128, 32 * scale), "2:4", dtype=dtype)
            yield "scalar", EXT.layout_refill_kept, [buffer, across.values, across.indices, True, 1]
    for dtype in (torch.float32, torch.bfloat16):
        weight = sparse(32 * scale, 128).to(dtype)
        packed = packing.pack(weight, "2:4")
        yield "scalar", EXT.kept_gather, [weight, packed.indices, packed.values, 1]
        yield "scalar", EXT.kept_scatter, [packed.values, packed.indices, weight, 1]
    dense = next(row for row in native_dense_rows() if row.dtype == "int4").prepare(torch.randn(32, 128)).tensor
    yield "scalar", EXT.dense_int4_pack, [dense, torch.zeros(32, 64, dtype=torch.uint8), torch.ones(32, 2), None]


def models(scale: int) -> Iterator[Call]:
    """Calls of attention, norm and a fused block."""
    for row in native.rows("attention"):
        held, few = (
            (torch.bfloat16, 5) if row.dtype == "int8" else (getattr(torch, row.dtype), 3)
        )  # 3 are left to floats
        q, k, v, out, more = (torch.randn(2 * scale, 2, n, 8, dtype=held) for n in (few, 4, 4, few, 2))
        mask = torch.randn(2 * scale, 2, few, 6)
        behind = more, more.clone(), 1.0, False, 0.0
        yield row.isa, EXT.attention, [row.index, q, k, v, out, mask, *behind, 0.0, 0, 1]
        yield row.isa, EXT.attention, [row.index, q, k, v, out.to(torch.uint8), mask, *behind, 0.1, 128, 1]
        q, k, v, out = (torch.randn(2 * scale, n, 16, dtype=q.dtype) for n in (few, 4, 4, few))
        columns = (0, 0, 0), (16, 16, 16), 8
        columns = mask[..., :4], *columns, 1.0, False, 0.0
        yield row.isa, EXT.attention_of_columns, [row.index, q, k, v, out, *columns, 0.0, 0, 1]
        yield row.isa, EXT.attention_of_columns, [row.index, q, k, v, out.to(torch.uint8), *columns, 0.1, 128, 1]
        q, k, v, out = (torch.randn(1, 6 * scale, 16, dtype=q.dtype) for _ in range(4))
        ends = torch.tensor([0, 1, 1, 6 * scale])
        columns = ends, (0, 0, 0), (16, 16, 16), 8, 1.0, False
        yield row.isa, EXT.attention_of_sequences, [row.index, q, k, v, out, *columns, 0.0, 0, 1]
        yield row.isa, EXT.attention_of_sequences, [row.index, q, k, v, out.to(torch.uint8), *columns, 0.1, 128, 1]
        if row.dtype == "int8":
            q, k, v = (torch.randint(0, 256, (2 * scale, n, 16), dtype=torch.uint8) for n in (few, 4, 4))
            out, steps = torch.randn(2 * scale, few, 16, dtype=held), torch.rand(2 + 2 * 16)
            columns, rest = ((0, 0, 0), (16, 16, 16), 8), (False, 0.0, 0.0, 0, 1)
            yield (
                row.isa,
                EXT.attention_of_bytes,
                [row.index, q, k, v, out, steps, mask[..., :4], None, *columns, *rest],
            )
            q, k, v = (torch.randint(0, 256, (1, 6 * scale, 16), dtype=torch.uint8) for _ in range(3))
            out = torch.randn(1, 6 * scale, 16, dtype=held)
            yield row.isa, EXT.attention_of_bytes, [row.index, q, k, v, out, steps, None, ends, *columns, *rest]
        q, k, v, out = (torch.randn(scale, 6, 16, dtype=held) for _ in range(4))
        order = torch.tensor([[0, 5], [2, 1], [4, 3]])
        yield (
            row.isa,
            EXT.attention_of_windows,
            [row.index, q, k, v, out, mask[:1, :, :2, :2].repeat(3, 1, 1, 1), order, 8, 1.0, 0.0, 1],
        )
    for row in native.rows("attention_gradient"):
        q, k, v, upstream = (torch.randn(2 * scale, 2, n, 8, dtype=getattr(torch, row.dtype)) for n in (3, 4, 4, 3))
        answers = q.clone(), k.clone(), v.clone()
        mask = torch.randn(2 * scale, 2, 3, 4)
        dropout = 1.0, False, 9000, 7, 1
        yield row.isa, EXT.attention_gradient, [row.index, q, k, v, upstream, *answers, mask, *dropout]
    for row in (row for row in native.rows("attention") if row.dtype != "int8"):
        q, k, v = (torch.randn(2 * scale, 2, n, 8, dtype=getattr(torch, row.dtype)) for n in (5, 4, 4))
        yield row.isa, EXT.attention_dropped, [row.index, q, k, v, q.clone(), torch.randn(2 * scale, 2, 5, 4), *dropout]
    for row in native.rows("activation"):
        x = torch.randn(4 * scale, 9)
        yield row.isa, EXT.activation, [row.index, 2, x, x.clone(), x.clone(), 1]
        yield row.isa, EXT.gated_activation, [row.index, 2, x[:, :8], torch.empty(4 * scale, 4), True, 1]
    for row in native.rows("rotation"):
        x, factors = torch.randn(2 * scale, 3, 24), torch.randn(2, 1, 3, 8).expand(2, 2 * scale, 3, 8)
        yield row.isa, EXT.rotation, [row.index, x, factors[0], factors[1], x.clone(), 8, 1]
    mask = torch.arange(6) < torch.randint(1, 7, (4 * scale, 1))
    for given in (mask, mask.long(), mask.float()):
        real, places = int(mask.sum()), torch.empty(mask.shape, dtype=torch.int64)
        rows, offsets = torch.empty(real, dtype=torch.int64), torch.empty(len(mask) + 2, dtype=torch.int64)
        yield "scalar", EXT.real_tokens, [given]
        yield "scalar", EXT.lay_out, [given, rows, offsets, places]
    x, places = torch.randn(4 * scale, 6, 8), torch.randint(-1, 24 * scale, (2 * scale, 5))
    yield "scalar", EXT.take_rows, [x, places, torch.empty(2 * scale, 5, 8), 1]
    for row in native.rows("norm"):
        x = torch.randn(4 * scale, 32, dtype=getattr(torch, row.dtype))
        given = row.index, x, torch.randn(32), torch.randn(32)
        yield row.isa, EXT.norm, [*given, x.clone(), 1e-5, True, 1]
        yield row.isa, EXT.norm_to_bytes, [*given, x.clone(), x.to(torch.uint8), 1e-5, True, 0.1, 128, 1]
    expression = Expression()
    value = expression.apply("mul", expression.load(), expression.load())
    expression.store(value)
    expression.store(expression.apply("sum", value))
    block = program(expression)

    def fused_block(index: int, a: Tensor, b: Tensor, places: Tensor, rows: Tensor, threads: int) -> None:
        block.run(index, [a, b], [places, rows], threads)

    for row in native.rows("fused_block"):
        x = torch.randn(4 * scale, 6, 32)
        yield row.isa, fused_block, [row.index, x, x.roll(1), x.clone(), torch.empty(4 * scale, 6, 1), 1]


def training(scale: int) -> Iterator[Call]:
    """Calls that prune gradients and pack."""
    rows = 8 * scale
    gradient = torch.randn(2 * scale, 4, 64)
    for row in native.rows("nm_gradient"):
        panels = header("float32", "panels", rows, 64, EXT.layout_bytes("panels", rows, 64, 0, False))
        yield row.isa, EXT.nm_gradient, [row.index, gradient, 0, 0.0, 0, torch.empty(2 * scale, 4, 64), False, 1]
        yield row.isa, EXT.nm_gradient, [row.index, gradient, 0, 0.0, 0, panels, True, 1]
        through = [row.index, 2, gradient, gradient + 1, torch.empty(2 * scale, 4, 64), 1, 0.0, 0]
        yield row.isa, EXT.nm_gradient_through, [*through, torch.empty(2 * scale, 4, 64), False, 1]
        yield row.isa, EXT.nm_gradient_through, [*through, panels.clone(), True, 1]
    for row in native.rows("nm_conv_gradient"):
        panels = header("float32", "panels", rows, 64, EXT.layout_bytes("panels", rows, 64, 0, False))
        weight, dx = torch.randn(64, 8, 3, 1), torch.empty(2 * scale, 2, 2, 8).movedim(-1, 1)
        yield row.isa, EXT.nm_conv_gradient, [row.index, panels, weight, dx, (3, 1, 1, 1), (1, 1, 0, 1), (2, 2), 1]
    yield "scalar", EXT.fill_pruned, [gradient, gradient > 0, 1]
    for row in native.rows("column_sums"):
        yield row.isa, EXT.column_sums, [row.index, torch.randn(5, 8 * scale), torch.empty(8 * scale), 1]
    for row in native.rows("nm_unbiased"):
        panels = header("float32", "panels", 64, rows, EXT.layout_bytes("panels", 64, rows, 0, False))
        yield row.isa, EXT.nm_unbiased, [row.index, gradient.view(rows, 64), 0, panels, 1]
    for row in native.rows("nm_sddmm"):
        left, right = (torch.randn(9, size, dtype=getattr(torch, row.dtype)) for size in (rows, 64))
        codes = torch.zeros(rows, 8, dtype=torch.uint8)
        yield row.isa, EXT.nm_sddmm, [row.index, left, right, codes, torch.empty(rows, 32), 1]
    for row in native.rows("nm_compress"):
        kept, codes = torch.empty(rows, 32), torch.empty(rows, 8, dtype=torch.uint8)
        yield row.isa, EXT.nm_compress, [row.index, sparse(rows, 64), kept, codes, 1]


def patterns(scale: int) -> Iterator[Call]:
    """Calls that make and check masks, and search orders."""
    scores, keep = torch.randn(8 * scale, 64), torch.zeros(8 * scale, 64, dtype=torch.bool)
    for row in native.rows("nm_mask"):
        yield row.isa, EXT.nm_mask, [row.index, scores, keep, 2, 4, True, 1]
    for row in native.rows("nm_tiles"):
        yield row.isa, EXT.nm_tiles, [row.index, scores, keep, True, 1]
    widths = {"8 bits": torch.int8, "16 bits": torch.float16, "32 bits": torch.float32, "64 bits": torch.float64}
    bits = torch.zeros(64 * scale + 8, dtype=torch.uint8)
    for row in native.rows("nm_nonzero"):
        yield row.isa, EXT.nm_nonzero, [row.index, scores.to(widths[row.dtype]), bits, 0, -1, -1, 1]
    for row in native.rows("nm_ties"):
        yield row.isa, EXT.nm_ties, [row.index, scores.to(widths[row.dtype]), 1, 8 * scale, 64, 1, 2, 4]
    yield "scalar", EXT.nm_groups, [bits, 8 * scale, 64, 1, 2, 4, False, False]
    memory = torch.zeros(16 * 16 + 16)
    held = memory[-memory.data_ptr() // 4 % 16 :][:256].view(16, 16)
    for row in native.rows("nm_stripes"):
        yield (
            row.isa,
            EXT.nm_stripes_refine,
            [row.index, held, torch.arange(16), 2, 4, 0, 1, 8, 0, lambda done, of: None],
        )
        yield row.isa, EXT.nm_stripes_assign, [row.index, held, torch.arange(16), 2, 4, 0, 1, 2, 1, 1]
    yield "scalar", EXT.assign_rows, [torch.rand(8, 8), torch.empty(8, dtype=torch.int64)]


def calls(scale: int = 1) -> Iterator[tuple[Callable[..., Any], list[Any]]]:
    """Calls of every row that this processor has, of operands so many times as long."""
    for make in (products, recurrent, layouts, models, training, patterns):
        for isa, function, arguments in make(scale):
            if native.supports(isa):
                yield function, arguments


EACH = 32
"""Calls of one child."""


def refusals(function: Callable[..., Any], arguments: list[Any], kinds: dict[str, Callable[[Tensor], Any]]) -> int:
    """Return how many bad operands the call refused; ends the process where one was taken."""
    assert function(*arguments) is not False or function.__name__ == "nm_mask", "the call itself is refused"
    count = 0
    for place, given in enumerate(arguments):
        if not isinstance(given, Tensor):
            continue
        for kind, make in kinds.items():
            print(f"{named(function, arguments)}, argument {place}, {kind}", file=sys.stderr, flush=True)
            bad = make(given)
            try:
                taken = function(*arguments[:place], bad, *arguments[place + 1 :]) is not False
            except KernelError as error:
                assert error.got and error.wanted, str(error)
                taken = False
            except ValueError:  # numbers that the operand does not agree with
                taken = False
            allowed = kind in ODD or (kind in SIZES and (function.__name__, place) in ANY_SIZE)
            allowed |= kind == "a scalar" and (function.__name__, place) in BROADCAST
            assert not taken or allowed, "a bad operand was taken"
            count += not taken
    return count


def named(function: Callable[..., Any], arguments: list[Any]) -> str:
    """Return what a call is called: the function and its row."""
    return f"{function.__name__} {arguments[0] if isinstance(arguments[0], int) else ''}"


def main() -> None:
    """Fork for every few calls; without "all" the first of each function and of its operands alone has every kind."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for make in BAD.values():
        make(torch.zeros(2, 2))  # what their first use imports is imported once
    called = total = 0
    every, seen, few_kinds = calls(), set[Any](), {kind: BAD[kind] for kind in OF_ROWS} | ODD
    while few := list(itertools.islice(every, EACH)):
        kinds = []
        for function, arguments in few:
            known = function.__name__, *(getattr(one, "dtype", None) for one in arguments)
            kinds.append(few_kinds if known in seen and "all" not in sys.argv else BAD | ODD)
            seen.add(known)
        called += len(few)
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.write(writing, str(sum(refusals(*one, of) for one, of in zip(few, kinds, strict=True))).encode())
            os._exit(0)
        os.close(writing)
        status = os.waitpid(child, 0)[1]
        found = os.read(reading, 100)
        os.close(reading)
        if status != 0 or not found:
            sys.exit(f"a child of {named(*few[0])} to {named(*few[-1])} ended with {status}")
        total += int(found)
    print(called, total)


if __name__ == "__main__":
    main()
