"""Calls of what stands between the products of a model: attention, norms, activations, fused blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.native.calls.operands import EXT, Call
from twofour import native
from twofour.kernels.fused_block import Expression, program


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
