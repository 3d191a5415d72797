"""Calls that write, read and search weights: layouts, pruned gradients, masks."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.native.calls.operands import EXT, Call, header, sparse
from twofour import native, packing
from twofour.kernels.dense_matmul import native_dense_rows
from twofour.kernels.nm_matmul import native_rows


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
