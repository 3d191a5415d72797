"""Keys that a query of attention does not see: hidden to the bit, not read where nobody sees them, and none at all."""

import torch

from tests.kernels.attention_cases import check, check_low, operands
from tests.turns import in_turn
from twofour.kernels.attention import (
    attention,
    reference,
)


@in_turn("hidden", [(0, 0, 0, 0), (1, 1, 4, 6), None])
def test_one_hidden_key_is_hidden(isa: str, hidden: tuple[int, ...] | None) -> None:
    q, k, v = operands(2, 2, 1, 5, 7, 16, 16)
    for mask in (torch.ones(2, 2, 5, 7, dtype=torch.bool), torch.ones(2, 1, 1, 7, dtype=torch.bool)):
        if hidden is not None:
            mask[tuple(min(at, size - 1) for at, size in zip(hidden, mask.shape, strict=True))] = False
        check(q, k, v, mask)
        check_low(q, k, v, mask)


def bands(queries: int, keys: int) -> dict[str, torch.Tensor]:
    """Return masks of bytes whose hidden keys stand side by side, as those of models do."""
    row, key = torch.arange(queries)[:, None], torch.arange(keys)
    shown = {
        "window": (row * keys // queries - key).abs() <= 9,
        "later half": (row < queries // 2) & (key < keys // 3) | (row >= queries // 2) & (key > keys // 2),
        "padding behind": (key < keys - keys // 4).expand(1, keys),
        "padding before": (key >= keys // 2).expand(1, keys),
        "rows that see nothing": ((row // 13 % 2 == 0) & (key % 97 == 5)).expand(queries, keys),
    }
    return {name: mask[None, None] for name, mask in shown.items()}


@in_turn("name", bands(1, 1))
@in_turn("width", [32, 64])
@in_turn("causal", [False, True])
def test_keys_that_a_block_does_not_see_are_left_out(isa: str, name: str, width: int, causal: bool) -> None:
    q, k, v = operands(1, 2, 1, 75, 301, width, width)
    mask = bands(75, 301)[name]
    check(q, k, v, mask, causal=causal)
    check_low(q, k, v, mask, causal=causal)


@in_turn("name", ["window", "padding behind"])
def test_what_nobody_sees_is_not_read(isa: str, name: str) -> None:
    q, k, v = operands(1, 1, 1, 30, 600, 32, 32)
    mask = bands(30, 600)[name]
    seen = attention(q, k, v, mask)
    k[:, :, 560:], v[:, :, 560:] = torch.nan, torch.nan  # behind the last panel that a query of the first block sees
    assert torch.equal(attention(q, k, v, mask)[:, :, :12], seen[:, :, :12])


@in_turn("dtype", [torch.float32, torch.bfloat16])
@in_turn("cached", [69, 20, 70])
def test_one_query_reads_no_hidden_end_of_its_cache(isa: str, dtype: torch.dtype, cached: int) -> None:
    """Memory before and behind the keys of a sequence is not read; a hole between them is hidden as elsewhere."""
    q, k, v = (t.to(dtype) for t in operands(4, 2, 2, 1, 70, 64, 48))
    mask = torch.ones(4, 1, 1, 70, dtype=torch.bool)
    mask[0, ..., 15:cached] = mask[1, ..., :7] = mask[1, ..., 12:cached] = mask[2, ..., 5] = False
    mask[3, ..., :cached] = False
    want = reference(q.double(), k.double(), v.double(), mask, unseen=0.0)
    k, v = k.clone(), v.clone()
    for tensor in (k, v):
        tensor[0, :, 15:cached] = tensor[1, :, :7] = tensor[1, :, 12:cached] = torch.nan
    added = (k[:, :, cached:], v[:, :, cached:]) if cached < 70 else (None, None)
    got = attention(q, k[:, :, :cached], v[:, :, :cached], mask, k_added=added[0], v_added=added[1])
    bound = 3e-6 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(got.double(), want, atol=bound, rtol=bound)


def test_a_query_that_sees_no_key_answers_zeros(isa: str) -> None:
    q, k, v = operands(1, 1, 1, 5, 7, 16, 16)
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    got = attention(q, k, v, mask)
    assert not got[0, 0, 2].any() and got.isfinite().all()
    check(q, k, v, mask)


@in_turn("queries", [1, 7])
def test_a_query_that_sees_no_key_answers_nan_where_it_is_asked_to(isa: str, queries: int) -> None:
    q, k, v = operands(1, 2, 1, queries, 9, 16, 16)
    mask = torch.randn(2, queries, 9)
    mask[1, -1] = -torch.inf
    written_out = (q @ k.mT * 0.25 + mask).softmax(-1) @ v
    assert written_out[0, 1, -1].isnan().all() and written_out.isnan().sum() == 16
    torch.testing.assert_close(attention(q, k, v, mask, unseen=torch.nan), written_out, equal_nan=True)
    nothing = attention(q, k[:, :, :0], v[:, :, :0], unseen=torch.nan)
    assert nothing.shape == written_out.shape and not nothing.any()  # a sum of nothing is 0


@in_turn("queries", [1, 5])
@in_turn("lowest", [torch.finfo(torch.float32).min, -3e38])
def test_finite_masks_of_any_size(isa: str, queries: int, lowest: float) -> None:
    q, k, v = operands(1, 2, 1, queries, 21, 16, 16)
    mask = torch.zeros(queries, 21)
    mask[0] = lowest
    check(q, k, v, mask)
    torch.testing.assert_close(attention(q, k, v, mask)[:, :, 0], v.mean(2), atol=3e-6, rtol=3e-6)
    mask[0, :7] = -torch.inf
    check(q, k, v, mask)
    mask[0, 9] = 0.5
    check(q, k, v, mask)
