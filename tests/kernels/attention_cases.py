"""Operands of fused attention, and how near to float64 each row has to come."""

import hypothesis
import torch

from twofour.kernels.attention import (
    attention,
    attention_of_columns,
    reference,
)

SETTINGS = hypothesis.settings(
    max_examples=25, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)


def operands(batch: int, heads: int, group: int, queries: int, keys: int, width: int, value_width: int):
    torch.manual_seed(queries * 1000 + keys)
    q = torch.randn(batch, queries, heads * group, width).transpose(1, 2)
    k = torch.randn(batch, keys, heads, width).transpose(1, 2)
    return q, k, torch.randn(batch, keys, heads, value_width).transpose(1, 2)


def in_float64(mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask as the reference takes it: numbers that are added are widened."""
    return mask if mask is None or mask.dtype is torch.bool else mask.double()


def check(q, k, v, mask=None, **options) -> None:
    want = reference(q.double(), k.double(), v.double(), in_float64(mask), **options)
    got = attention(q, k, v, mask, **options)
    assert got.transpose(1, 2).is_contiguous(), "joining the heads must copy nothing"
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=3e-6)


def low_bound(want: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """How far the bfloat16 row may lie from `want`, where `size` is the answer of the values' sizes.

    Its answer is rounded once (2^-8), and so are the weights of the values, whose sum is not.
    """
    # 8e-5: the polynomial of 2^x, in weights and in their sum; 1e-5: float32 scores.
    return 2**-8 * (want.abs() + size) * (1 + 2**-8) + 2e-4 * size + 1e-5


def check_low(q, k, v, mask=None, **options) -> None:
    q, k, v = (t.bfloat16() for t in (q, k, v))
    want = reference(q.double(), k.double(), v.double(), in_float64(mask), **options)
    size = reference(q.double(), k.double(), v.double().abs(), in_float64(mask), **options)
    got = attention(q, k, v, mask, **options)
    assert got.dtype is torch.bfloat16 and got.transpose(1, 2).is_contiguous()
    assert ((got.double() - want).abs() <= low_bound(want, size)).all()


def of_columns(q, k, v, mask=None, scale=None, causal=False, unseen=0.0, ranged=(0.0, 0), **options):
    """Attention of (batch, heads, rows, width) alike, given and answered as columns of products."""
    columns, width = [t.transpose(1, 2).flatten(2) for t in (q, k, v)], q.shape[-1]
    given = (0, 0, 0), tuple(t.shape[-1] for t in columns), width, mask, scale, causal, unseen, *ranged
    return attention_of_columns(*columns, *given, **options).unflatten(-1, (-1, width)).transpose(1, 2)


def in_int8(q, k, v, *given, **options):
    """Attention in int8, wherever its sums allow it."""
    return of_columns(q.bfloat16(), k.bfloat16(), v.bfloat16(), *given, **options, int8=True)
