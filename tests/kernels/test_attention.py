"""Fused attention: every row of the table against float64, on odd shapes, with every kind of mask."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tests.conftest import threads
from tests.kernels.attention_rounding import UNIT, deviations
from tests.turns import in_turn
from twofour import native
from twofour.errors import KernelError
from twofour.kernels.attention import (
    attention,
    attention_dropped,
    attention_gradient,
    attention_of_columns,
    attention_of_sequences,
    attention_of_windows,
    bytes_reference,
    cpu,
    reference,
    whole_reference,
)
from twofour.kernels.attention.cpu import MOST_KEYS, MOST_WIDTH
from twofour.kernels.attention.reference import drop_below, kept_by_dropout
from twofour.kernels.quantization import Quantization, quantize_input

SETTINGS = hypothesis.settings(
    max_examples=25, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)


def operands(batch: int, heads: int, group: int, queries: int, keys: int, width: int, value_width: int):
    torch.manual_seed(queries * 1000 + keys)
    q = torch.randn(batch, queries, heads * group, width).transpose(1, 2)
    k = torch.randn(batch, keys, heads, width).transpose(1, 2)
    return q, k, torch.randn(batch, keys, heads, value_width).transpose(1, 2)


def check(q, k, v, mask=None, **options) -> None:
    exact = mask.double() if mask is not None and mask.dtype is not torch.bool else mask
    want = reference(q.double(), k.double(), v.double(), exact, **options)
    got = attention(q, k, v, mask, **options)
    assert got.transpose(1, 2).is_contiguous(), "joining the heads must copy nothing"
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=3e-6)


def check_low(q, k, v, mask=None, **options) -> None:
    """The bfloat16 row: its answer is rounded once (2^-8), and so are the weights of the values, whose sum is not."""
    q, k, v = (t.bfloat16() for t in (q, k, v))
    exact = mask.double() if mask is not None and mask.dtype is not torch.bool else mask
    want = reference(q.double(), k.double(), v.double(), exact, **options)
    size = reference(q.double(), k.double(), v.double().abs(), exact, **options)
    got = attention(q, k, v, mask, **options)
    assert got.dtype is torch.bfloat16 and got.transpose(1, 2).is_contiguous()
    # 8e-5: the polynomial of 2^x, in weights and in their sum; 1e-5: float32 scores.
    bound = 2**-8 * (want.abs() + size) * (1 + 2**-8) + 2e-4 * size + 1e-5
    assert ((got.double() - want).abs() <= bound).all()


@SETTINGS
@hypothesis.given(
    sizes=st.tuples(*(st.integers(1, most) for most in (2, 3, 2, 40, 70, 70, 70))),
    kind=st.sampled_from(["none", "added", "added per head", "kept", "causal"]),
)
def test_rows_against_float64(isa: str, sizes: tuple[int, ...], kind: str) -> None:
    q, k, v = operands(*sizes)
    shape = (q.shape[0], 1, q.shape[2], k.shape[2])
    for comparing in (check, check_low):
        if kind == "added":
            comparing(q, k, v, torch.randn(shape))
        elif kind == "added per head":
            comparing(q, k, v, torch.randn(q.shape[1], *shape[2:]), scale=0.3)
        elif kind == "kept":
            comparing(q, k, v, torch.rand(shape) > 0.5)
        else:
            comparing(q, k, v, causal=kind == "causal")


@in_turn("width", [32, 64, 80, 128])
@in_turn("queries", [1, 128])
def test_widths_of_real_models(isa: str, width: int, queries: int) -> None:
    check(*operands(1, 2, 1, queries, 128, width, width))
    check_low(*operands(1, 2, 1, queries, 127, width, width))


@in_turn("width", [32, 64])
def test_keys_that_fill_a_part_of_their_last_panel(isa: str, width: int) -> None:
    """Keys of an image's patches and its class, and those that end in any of a panel's vectors."""
    for keys in (197, 17, 33, 49, 65, 81, 97, 113):
        check(*operands(1, 1, 1, 8, keys, width, width))
        check_low(*operands(1, 1, 1, 8, keys, width, width))


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


@in_turn("dtype", [torch.float32, torch.bfloat16])
@in_turn("apart", [False, True])
def test_columns_of_products(isa: str, dtype: torch.dtype, apart: bool) -> None:
    heads, key_heads, width = 4, 2, 24
    sizes = (heads * width, key_heads * width, key_heads * width)
    x = torch.randn(2, 11, sum(sizes), dtype=dtype)
    parts = x.split(sizes, -1)
    begins = (0, 0, 0) if apart else (0, sizes[0], sizes[0] + sizes[1])
    a, b, c = parts if apart else (x, x, x)
    q, k, v = (part.unflatten(-1, (-1, width)).transpose(1, 2) for part in parts)
    mask = torch.rand(2, 1, 1, 11) > 0.3
    want = attention(q, k, v, mask, 0.2, True).transpose(1, 2).flatten(2)
    got = attention_of_columns(a, b, c, begins, sizes, width, mask, 0.2, True)
    assert torch.equal(got, want) and got.is_contiguous()
    d, e, f = (torch.stack([source, source], -1)[..., 0] for source in (a, b, c))  # every second number
    assert torch.equal(attention_of_columns(d, e, f, begins, sizes, width, mask, 0.2, True), want)
    with pytest.raises(KernelError, match="the operands of attention do not fit"):
        attention_of_columns(a.double(), b.double(), c.double(), begins, sizes, width)


@in_turn("queries", [1, 3, 29])
@in_turn("width", [5, 32, 64, 70])
def test_bytes_are_those_that_a_product_would_make(isa: str, queries: int, width: int) -> None:
    q, k, v = operands(2, 2, 2, queries, 31, width, width)
    found = Quantization.of_range(-0.4, 0.7)
    assert found.x_scale is not None
    want = quantize_input(attention(q, k, v), found)[0]
    got = attention(q, k, v, bytes_scale=found.x_scale, bytes_zero=found.x_zero)
    assert torch.equal(got, want) and got.transpose(1, 2).is_contiguous()
    low = [t.bfloat16() for t in (q, k, v)]
    got = attention(*low, bytes_scale=found.x_scale, bytes_zero=found.x_zero)
    off = got.int() - quantize_input(attention(*low), found)[0].int()  # it is not rounded to bfloat16 before
    assert got.dtype is torch.uint8 and off.abs().max() <= 1
    columns = [t.transpose(1, 2).flatten(2) for t in (q, k, v)]
    sizes = tuple(t.shape[-1] for t in columns)
    given = (0, 0, 0), sizes, width, None, None, False, 0.0, found.x_scale, found.x_zero
    assert torch.equal(attention_of_columns(*columns, *given), want.transpose(1, 2).flatten(2))
    hidden = torch.zeros(1, 1, queries, 31, dtype=torch.bool)
    got = attention(q, k, v, hidden, unseen=torch.nan, bytes_scale=found.x_scale, bytes_zero=found.x_zero)
    assert not got.any(), "a NaN is 0"
    with pytest.raises(KernelError, match="a zero point from 0 to 255"):
        attention(q, k, v, bytes_scale=1.0, bytes_zero=-1)


@in_turn("dtype", [torch.float32, torch.bfloat16])
@in_turn(("windows", "rows"), [(1, 1), (4, 2), (3, 5), (4, 49), (7, 16)])
@in_turn("masked", ["", "added", "hidden", "one for all"])
def test_windows_of_an_image(isa: str, dtype: torch.dtype, windows: int, rows: int, masked: str) -> None:
    heads, key_heads, width, images = 4, 2, 24, 3
    sizes = (heads * width, key_heads * width, key_heads * width)
    x = torch.randn(images, windows * rows, sum(sizes), dtype=dtype)
    order = torch.randperm(windows * rows).view(windows, rows)
    masks = {
        "added": torch.randn(windows, heads, rows, rows).masked_fill(
            torch.rand(windows, 1, rows, rows) > 0.7, -torch.inf
        ),
        "hidden": torch.rand(windows, 1, rows, rows) > 0.3,
        "one for all": torch.randn(1, heads, rows, rows),
    }
    mask = masks.get(masked)
    parts = x.split(sizes, -1)
    cut = (part[:, order].flatten(0, 1).unflatten(-1, (-1, width)).transpose(1, 2) for part in parts)
    each = None if mask is None else mask.expand(windows, -1, -1, -1).repeat(images, 1, 1, 1)
    answer = attention(*cut, each, 0.2, unseen=torch.nan).transpose(1, 2).flatten(2)
    want = torch.empty(images, windows * rows, heads * width, dtype=dtype)
    want[:, order.flatten()] = answer.view(images, -1, heads * width)
    for team in (1, 3):
        with threads(team):
            found = attention_of_windows(*parts, order, width, mask, 0.2, torch.nan)
        torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
    apart = (torch.stack([part, part], -1)[..., 0] for part in parts)
    assert torch.equal(
        attention_of_windows(*apart, order, width, None, 0.2), attention_of_windows(*parts, order, width, None, 0.2)
    )


@pytest.mark.parametrize(
    "order", [[[0, 1, 2, 3, 4]], [[0, 1, 2, 3, 4, 4]], [[1, 2, 3, 4, 5, 6]], [[0, -1, -2, -3, -4, -5]], [[0.0] * 6]]
)
def test_windows_that_are_not_those_of_the_image_are_refused(order: list[list[float]]) -> None:
    x = torch.randn(2, 6, 16)
    with pytest.raises(KernelError, match="order"):
        attention_of_windows(x, x, x, torch.tensor(order), 8)


@pytest.mark.parametrize(
    ("shape", "windows", "width"), [((2, 6, 16), (6,), 8), ((2, 6, 16), (2, 3), 0), ((6, 16), (2, 3), 8)]
)
def test_windows_of_what_is_no_image_are_refused(shape: tuple[int, ...], windows: tuple[int, ...], width: int) -> None:
    with pytest.raises(KernelError, match="order"):
        attention_of_windows(*[torch.zeros(shape)] * 3, torch.arange(6).view(windows), width)


def test_negated_views_are_read_negated() -> None:
    x = torch.randn(2, 6, 16, dtype=torch.complex64).conj().imag  # a view that torch negates on reading
    assert x.is_neg()
    order, plain = torch.arange(6).view(2, 3), x.clone()
    assert torch.equal(attention_of_windows(x, x, x, order, 8), attention_of_windows(plain, plain, plain, order, 8))
    columns = (0, 0, 0), (16, 16, 16), 8
    assert torch.equal(attention_of_columns(x, x, x, *columns), attention_of_columns(plain, plain, plain, *columns))


@SETTINGS
@hypothesis.given(
    sizes=st.tuples(*(st.integers(1, most) for most in (2, 2, 2, 9, 40, 40, 40))), more=st.integers(0, 20)
)
def test_keys_behind_a_cache_are_those_of_both_joined(isa: str, sizes: tuple[int, ...], more: int) -> None:
    q, k, v = operands(*sizes)
    added = [torch.randn(*t.shape[:2], more, t.shape[3]) for t in (k, v)]
    mask = torch.rand(q.shape[0], 1, q.shape[2], k.shape[2] + more) > 0.3
    for dtype in (torch.float32, torch.bfloat16):
        a, b, c, d, e = (t.to(dtype) for t in (q, k, v, *added))
        for options in ({"mask": mask}, {"causal": True}):
            want = attention(a, torch.cat([b, d], 2), torch.cat([c, e], 2), **options)
            got = attention(a, b, c, **options, k_added=d, v_added=e)
            spread = [torch.stack([t, t], -1)[..., 0] for t in (d, e)]  # every second number
            assert torch.equal(attention(a, b, c, **options, k_added=spread[0], v_added=spread[1]), got)
            if "mask" in options and q.shape[2] == 1 and not mask.all():
                # Keys hidden at an end of the cache are left out, of one piece others: sums have another order.
                torch.testing.assert_close(got, want, atol=1e-6, rtol=2 * torch.finfo(dtype).eps)
            else:
                assert torch.equal(got, want)


def test_keys_that_cannot_stand_behind_the_others() -> None:
    q, k, v = operands(1, 2, 1, 1, 5, 8, 8)
    for added in ((k, None), (None, v), (k.double(), v.double()), (k[:, :1], v), (k, v[:, :, :2]), (k[..., :4], v)):
        with pytest.raises(KernelError, match="the added keys and values of attention do not fit"):
            attention(q, k, v, k_added=added[0], v_added=added[1])


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


def test_large_scores_do_not_overflow(isa: str) -> None:
    q, k, v = operands(1, 1, 1, 6, 9, 16, 16)
    check(q * 100, k, v)
    assert attention(q.fill_(torch.nan), k, v).isnan().all()
    assert attention(q.bfloat16(), k.bfloat16(), v.bfloat16()).isnan().all()


def test_reads_slices_of_one_tensor(isa: str) -> None:
    joined = torch.randn(2, 9, 3 * 4 * 8)
    q, k, v = (part.view(2, 9, 4, 8).transpose(1, 2) for part in joined.split(32, -1))
    check(q, k, v, torch.randn(9, 1))


def test_two_threads_agree_with_one() -> None:
    q, k, v = operands(2, 3, 1, 20, 20, 16, 16)
    one, threads = attention(q, k, v), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(attention(q, k, v), one)
    finally:
        torch.set_num_threads(threads)


def test_registered_operator() -> None:
    q, k, v = operands(1, 2, 1, 5, 5, 8, 8)
    for behind in ((), (None, None, False, k, v)):
        torch.library.opcheck(
            torch.ops.twofour.attention.default, (q, k, v, *behind), test_utils=("test_schema", "test_faketensor")
        )


def test_operands_that_do_not_fit() -> None:
    q, k, v = operands(1, 2, 1, 5, 5, 8, 8)
    with pytest.raises(KernelError, match="the operands of attention do not fit"):
        attention(q.double(), k.double(), v.double())
    with pytest.raises(KernelError, match="the operands of attention do not fit"):
        attention(q, k[:, :, :4], v)
    with pytest.raises(KernelError, match=r"wanted  float32 or bfloat16 on cpu"):
        attention(q, k.bfloat16(), v)
    with pytest.raises(KernelError, match="the mask of attention does not fit"):
        attention(q, k, v, torch.zeros(4, 5))


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


def in_int8(q, k, v, mask=None, scale=None, causal=False, unseen=0.0, ranged=(0.0, 0)):
    """Attention in int8 of (batch, heads, rows, width) alike, as columns of products."""
    columns = [t.bfloat16().transpose(1, 2).flatten(2) for t in (q, k, v)]
    sizes, width = tuple(t.shape[-1] for t in columns), q.shape[-1]
    given = (0, 0, 0), sizes, width, mask, scale, causal, unseen, *ranged
    got = attention_of_columns(*columns, *given, int8=True)
    return got.unflatten(-1, (-1, width)).transpose(1, 2)


@hypothesis.settings(SETTINGS, max_examples=6)
@hypothesis.given(
    sizes=st.tuples(
        *(st.integers(least, most) for least, most in ((1, 2), (1, 2), (1, 2), (4, 40), (1, 140), (1, 70)))
    ),
    kind=st.sampled_from(
        ["none", "added", "added for all", "kept", "kept for all", "causal", "negative scale", "dominated"]
    ),
)
@hypothesis.example(sizes=(1, 1, 2, 15, 106, 65), kind="added")  # the portable rows rounded a mask twice
def test_int8_is_its_reference_to_the_bit(every_isa: str, sizes: tuple[int, ...], kind: str) -> None:
    q, k, v = (t.bfloat16() for t in operands(*sizes, sizes[-1]))
    for_all, each = (q.shape[0], 1, 1, k.shape[2]), (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    masks = {
        "added": torch.randn(each).masked_fill(torch.rand(each) > 0.8, -torch.inf),
        "added for all": torch.randn(for_all).masked_fill(torch.rand(for_all) > 0.7, -3e38),
        "kept": torch.rand(each) > 0.5,
        "kept for all": torch.rand(for_all) > 0.5,
    }
    options = {"causal": kind == "causal", "scale": -0.7 if kind == "negative scale" else None}
    if kind == "dominated":  # the other keys' weights are about what a byte holds
        k, q[..., 0] = k * 0.3, 6.3 * q.shape[-1] ** 0.5
        k[..., 0], k[:, :, 0] = 0, 0
        k[:, :, 0, 0] = 1
    k[..., 0] += 9  # a column that stands apart from the others
    want = whole_reference(q, k, v, masks.get(kind), **options)
    assert torch.equal(in_int8(q, k, v, masks.get(kind), **options), want.bfloat16())
    found = Quantization.of_range(-0.4, 0.7)
    assert found.x_scale is not None
    whole = in_int8(q, k, v, masks.get(kind), **options, ranged=(found.x_scale, found.x_zero))
    assert whole.dtype is torch.uint8 and torch.equal(whole, quantize_input(want, found)[0])


@in_turn("width", [32, 80])
@in_turn("keys", [5, 301])
@in_turn("size", [1.0, 4.0])
def test_int8_is_as_near_as_its_bytes_allow(every_isa: str, width: int, keys: int, size: float) -> None:
    """The bound of README.md, for each number."""
    q, k, v = (t.bfloat16() for t in operands(1, 2, 1, 9, keys, width, width))
    q, k = q * size, k + 3 * torch.randn(width).bfloat16()
    exact = [t.double() for t in (q, k, v)]
    want = reference(*exact)
    spans = [(t.amax(2, keepdim=True) - t.amin(2, keepdim=True)) / 2 for t in exact[1:]]
    apart = exact[1] - (exact[1].amax(2, keepdim=True) + exact[1].amin(2, keepdim=True)) / 2
    steps = exact[0].abs().amax(-1, keepdim=True) / 127, spans[0].amax(-1, keepdim=True) / 127
    off = (
        steps[0] * apart.abs().sum(-1)[:, :, None] + steps[1] * (exact[0].abs() + steps[0]).sum(-1, keepdim=True)
    ) / 2
    off = off.amax(-1, keepdim=True) * width**-0.5  # of a score
    scores = exact[0] @ exact[1].mT * width**-0.5
    most = (scores - scores.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)
    moved = (2 * off).exp() * (1.01 + keys / (255 * most)) - 1
    bound = spans[1] * (moved + 1 / 254) * (1 + 2**-8) + 2**-8 * want.abs() + 1e-5
    got = in_int8(q, k, v).double()
    assert ((got - want).abs() <= bound).all()
    if size == 1.0:  # and much nearer on the whole
        assert (got - want).norm() <= 0.03 * (want - want.mean()).norm() + 2e-3 * want.norm()


def test_int8_keeps_keys_that_nobody_sees_out_of_its_ranges(every_isa: str) -> None:
    q, k, v = (t.bfloat16() for t in operands(2, 3, 1, 17, 40, 32, 32))
    seen = torch.arange(40) < 29
    for hidden in (1e30, torch.inf, torch.nan):
        for t in (k, v):
            t[:, :, 29:] = hidden
        want = in_int8(q, k[:, :, :29], v[:, :, :29])
        assert torch.equal(in_int8(q, k, v, seen[None, None, None]), want) and want.isfinite().all()
        added = torch.zeros(40).masked_fill(~seen, -torch.inf)
        torch.testing.assert_close(in_int8(q, k, v, added), in_int8(q, k[:, :, :29], v[:, :, :29], added[:29]))


def test_int8_of_a_batch_with_padding_is_that_of_its_sentences(every_isa: str) -> None:
    """Keys behind a sentence are left out, in a batch whose other sentences see all, one, or keys with a hole."""
    q, k, v = (t.bfloat16() for t in operands(5, 3, 1, 17, 140, 32, 32))
    seen = torch.arange(140) < torch.tensor([140, 29, 1, 65, 130])[:, None]
    seen[4, 7:80] = False
    q[3, :, 3] *= 1e6  # whose steps are coarse: computed in floats
    got = in_int8(q, k, v, seen[:, None, None])
    for at, keys in enumerate(seen):
        one = (q[at : at + 1], k[at : at + 1][:, :, keys], v[at : at + 1][:, :, keys])
        assert torch.equal(got[at : at + 1], in_int8(*one)) or at == 3
        torch.testing.assert_close(got[at : at + 1], in_int8(*one), atol=1e-3, rtol=2**-7)


def test_int8_of_numbers_that_are_not_finite(every_isa: str) -> None:
    q, k, v = (t.bfloat16() for t in operands(2, 2, 1, 14, 20, 32, 32))
    want = in_int8(q, k, v)
    for odd in (torch.nan, torch.inf, -torch.inf):
        for index, place in ((0, (1, 0, 13, 5)), (1, (0, 1, 19, 31)), (2, (1, 1, 3, 7))):
            given = [q.clone(), k.clone(), v.clone()]
            given[index][place] = odd
            got, broken = in_int8(*given), torch.zeros_like(want, dtype=torch.bool)
            reached = {0: (1, 0, 13), 1: (0, 1), 2: (1, 1, slice(None), 7)}[index]
            broken[reached] = True
            assert got[broken].isnan().all() and torch.equal(got[~broken], want[~broken])
            assert torch.equal(got.nan_to_num(), whole_reference(*given).bfloat16().nan_to_num())
    for mask in (torch.full((1, 1, 14, 20), torch.inf), torch.full((14, 20), torch.nan)):
        assert in_int8(q, k, v, mask).isnan().all(), "as a softmax in floats"
    large = in_int8(q * 1e37, k * 1e37, v)
    assert large.isnan().all(), "scores that float32 does not hold"
    same = in_int8(torch.zeros_like(q), k, v)
    torch.testing.assert_close(same, v.float().mean(2, keepdim=True).expand_as(same).bfloat16(), atol=0.03, rtol=0.03)


@in_turn("unseen", [0.0, torch.nan])
def test_int8_of_a_query_that_sees_no_key(every_isa: str, unseen: float) -> None:
    q, k, v = (t.bfloat16() for t in operands(1, 2, 1, 6, 21, 16, 16))
    for mask in (torch.ones(6, 21, dtype=torch.bool), torch.zeros(6, 21)):
        mask[2] = False if mask.dtype is torch.bool else -torch.inf
        got = in_int8(q, k, v, mask, unseen=unseen)
        assert torch.equal(got.nan_to_num(7), whole_reference(q, k, v, mask, unseen=unseen).bfloat16().nan_to_num(7))
        assert got[:, :, 2].isnan().all() if unseen else not got[:, :, 2].any()
    nothing = in_int8(q, k[:, :, :0], v[:, :, :0], unseen=unseen)
    assert nothing.shape == q.shape and not nothing.any()  # a sum of nothing is 0
    nobody = in_int8(q, k, v, torch.zeros(1, 1, 1, 21, dtype=torch.bool), unseen=unseen)
    assert nobody.isnan().all() if unseen else not nobody.any()


@in_turn("causal", [False, True])
@in_turn("count", [1, 2])
def test_int8_inside_each_sequence(every_isa: str, causal: bool, count: int) -> None:
    torch.manual_seed(0)
    lengths, width, sizes = (1, 40, 3, 0, 17), 16, (64, 32, 32)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    x = torch.randn(1, sum(lengths), sum(sizes)).bfloat16()
    parts = (0, 64, 96), sizes, width
    with threads(count):
        got = attention_of_sequences(x, x, x, *parts, ends, 0.3, causal, int8=True)
    for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        one = x[:, begin:end]
        if end > begin:
            assert torch.equal(
                got[:, begin:end], attention_of_columns(one, one, one, *parts, None, 0.3, causal, int8=True)
            )
    with pytest.raises(KernelError, match="attention in int8 reads bfloat16"):
        attention_of_sequences(x.float(), x.float(), x.float(), *parts, ends, int8=True)


def test_what_int8_leaves_to_floats() -> None:
    q, k, v = (t.bfloat16() for t in operands(1, 2, 1, 3, 21, 16, 16))
    assert torch.equal(in_int8(q, k, v), attention(q, k, v)), "up to three queries"
    x = torch.randn(1, MOST_KEYS + 1, 4).bfloat16()
    given = x[:, :5], x, x, (0, 0, 0), (4, 4, 4), 4
    assert torch.equal(attention_of_columns(*given, int8=True), attention_of_columns(*given))
    fewer = x[:, :5], x[:, 1:], x[:, 1:], (0, 0, 0), (4, 4, 4), 4
    got, want = (attention_of_columns(*fewer, int8=int8) for int8 in (True, False))
    torch.testing.assert_close(got, want, atol=0.02, rtol=0.02)
    with pytest.raises(KernelError, match="attention in int8 reads bfloat16"):
        attention_of_columns(*[t.float() if isinstance(t, torch.Tensor) else t for t in given], int8=True)


def check_gradients(q, k, v, mask=None, *, dtype=torch.float32, **options) -> None:
    q, k, v = (t.to(dtype) for t in (q, k, v))
    exact, group = (
        mask.double() if mask is not None and mask.dtype is not torch.bool else mask,
        q.shape[1] // k.shape[1],
    )
    leaves = [t.double().repeat_interleave(times, 1).requires_grad_() for t, times in ((q, 1), (k, group), (v, group))]
    y = reference(*leaves, exact, **options)
    upstream = torch.randn(y.shape, dtype=dtype)
    wants = torch.autograd.grad(y, leaves, upstream.double())
    found = attention_gradient(q, k, v, upstream, mask, **options)
    scale = options.get("scale", q.shape[-1] ** -0.5)
    own = [leaf.detach() for leaf in leaves]
    moved = deviations(*own, upstream.double(), exact, **{"scale": scale} | options)
    # The terms of a sum of dS are of this size; what they are rounded by stays where the sum cancels. P and dS may be
    # rounded to bfloat16 too. Dropout divides what it keeps by the share that is kept.
    least = 1e-3 + scale * v.shape[-1] ** 0.5 / (1 - options.get("dropout", 0.0)) / 8
    for got, want, off, of in zip(found, wants, moved, (q, k, v), strict=True):
        assert got.shape == of.shape and got.dtype is dtype
        # Of query heads that share a key head: each is rounded, then added.
        parts, off = (one.unflatten(1, (of.shape[1], -1)) for one in (want, off))
        error = (got.double() - parts.sum(2)).abs()
        if dtype is torch.float32:
            assert (error <= rounded_at_most(off.square().sum(2), parts)).all()
        else:
            assert error.max() <= 2**-7 * (parts.abs().sum(2).max() + least)


def rounded_at_most(variance: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """Six deviations, in which each rounding counts for 1.7 of its own: of 2,500 shapes on AVX-512, 3.1 were the most.

    torch's own float32 formula needs as many. 1e-12 is what float64 leaves where a gradient is zero.
    """
    shared = UNIT * parts.shape[2] * parts.square().sum(2) if parts.shape[2] > 1 else 0
    return 6 * (variance + shared).sqrt() + 1e-12


@pytest.mark.parametrize("keys", [5, 27, 70])
def test_the_bound_on_roundings_tells_a_term_that_is_missing(keys: int) -> None:
    """Half of the terms of dQ and dK, those of each sum that are no smaller than its median one."""
    operand = [t.double() for t in operands(1, 1, 1, 9, keys, 66, 21)]
    q, k, v = (t.requires_grad_() for t in operand)
    upstream, added = torch.randn(1, 1, 9, 21).double(), torch.randn(1, 1, 9, keys).double()
    q_moved, k_moved, _ = deviations(*(t.detach() for t in operand), upstream, added, scale=0.3)
    scores = (q @ k.mT * 0.3 + added).detach().requires_grad_()
    (d_s,) = torch.autograd.grad(scores.softmax(-1) @ v.detach(), scores, upstream)
    for of_term, moved, axis in (
        (0.3 * d_s[..., None] * k.detach()[:, :, None], q_moved[:, :, :, None], 3),
        (0.3 * d_s[..., None] * q.detach()[:, :, :, None], k_moved[:, :, None], 2),
    ):
        wrong = (of_term.abs() > 6 * moved + 1e-12).any(-1)
        sizes = of_term.norm(dim=-1)
        assert wrong[sizes >= sizes.median(axis, keepdim=True).values].all()


@SETTINGS
@hypothesis.given(
    sizes=st.tuples(*(st.integers(1, most) for most in (2, 3, 110, 70, 70, 70))),
    kind=st.sampled_from(["none", "added", "kept", "causal"]),
)
def test_gradients_against_float64(isa: str, sizes: tuple[int, ...], kind: str) -> None:
    batch, heads, queries, keys, width, value_width = sizes
    q, k, v = operands(batch, heads, 1, queries, keys, width, value_width)
    masks = {"added": torch.randn(batch, 1, queries, keys), "kept": torch.rand(1, 1, queries, keys) > 0.4}
    for dtype in (torch.float32, torch.bfloat16):
        check_gradients(q, k, v, masks.get(kind), dtype=dtype, scale=0.3, causal=kind == "causal")


@SETTINGS
@hypothesis.given(
    sizes=st.tuples(*(st.integers(1, most) for most in (2, 3, 110, 70, 70, 70))),
    group=st.integers(1, 3),
    kind=st.sampled_from(["none", "added", "kept", "causal"]),
    dropout=st.sampled_from([0.1, 0.5, 0.99]),
    seed=st.integers(0, 2**32 - 1),
)
def test_dropout_and_shared_heads_against_float64(
    isa: str, sizes: tuple[int, ...], group: int, kind: str, dropout: float, seed: int
) -> None:
    batch, heads, queries, keys, width, value_width = sizes
    operand = operands(batch, heads, group, queries, keys, width, value_width)
    masks = {"added": torch.randn(batch, 1, queries, keys), "kept": torch.rand(1, 1, queries, keys) > 0.4}
    mask, options = masks.get(kind), {"scale": 0.3, "causal": kind == "causal", "dropout": dropout, "seed": seed}
    exact = mask.double() if kind == "added" and mask is not None else mask
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7)):
        q, k, v = (t.to(dtype) for t in operand)
        want = reference(q.double(), k.double(), v.double(), exact, **options)
        size = reference(q.double(), k.double(), v.double().abs(), exact, **options)
        got = attention_dropped(q, k, v, mask, *options.values())
        assert got.dtype is dtype and ((got.double() - want).abs() <= limit * (size + 1e-3)).all()
        check_gradients(*operand, mask, dtype=dtype, **options)


def test_dropout_drops_its_share_and_neighbours_apart() -> None:
    kept = kept_by_dropout((2, 4, 64, 256), drop_below(0.1), 5).double()
    assert abs(kept.mean() - 0.9) < 2e-3
    flat = kept.flatten(0, 2) - kept.mean()
    for other in (flat.roll(1, 1), flat.roll(2, 1), flat.roll(1, 0), flat.roll(64, 0)):
        assert abs((flat * other).mean() / flat.square().mean()) < 0.01
    again = kept_by_dropout((2, 4, 64, 256), drop_below(0.1), 6).double()
    assert abs((flat * (again.flatten(0, 2) - 0.9)).mean() / flat.square().mean()) < 0.01
    assert drop_below(0.0) == 0 and drop_below(0.5) == 1 << 15 and drop_below(0.999999) == 65535


@in_turn("width", [32, 64, 128])
def test_gradients_at_widths_of_real_models(isa: str, width: int) -> None:
    check_gradients(*operands(1, 2, 1, 128, 128, width, width))
    check_gradients(*operands(1, 2, 1, 67, 129, width, width), causal=True)


def test_gradients_of_strided_and_repeated_operands(isa: str) -> None:
    whole = torch.randn(2, 9, 3, 4, 16)
    q, k, v = whole.movedim(2, 0).transpose(2, 3)
    upstream = torch.randn(1, 1, 9, 16).expand(2, 4, 9, 16)
    want = attention_gradient(*(t.contiguous() for t in (q, k, v, upstream)))
    for a, b in zip(attention_gradient(q, k, v, upstream), want, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(attention_gradient(q, k, v, torch.ones(()).expand(q.shape)), want, strict=True):
        assert a.shape == b.shape and a.isfinite().all()
    empty = attention_gradient(q[:, :, :0], k, v, upstream[:, :, :0])
    assert empty[0].numel() == 0 and not empty[1].any() and not empty[2].any()


def test_gradients_do_not_depend_on_threads() -> None:
    q, k, v = operands(2, 3, 1, 50, 60, 32, 32)
    upstream = torch.randn(2, 3, 50, 32)
    alone = attention_gradient(q, k, v, upstream)
    with threads(4):
        shared = attention_gradient(q, k, v, upstream)
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))


def test_gradients_refuse_what_does_not_fit() -> None:
    q, k, v = operands(1, 2, 1, 4, 5, 8, 8)
    for wrong in ((q, k[:, :, :4], v, q), (q, k, v, q[:, :, :3]), (q[:, :1], k, v, q), (q, k.bfloat16(), v, q)):
        with pytest.raises(KernelError):
            attention_gradient(*wrong)
    for seed in (-1, 1 << 32):
        with pytest.raises(KernelError, match="dropout"):
            attention_gradient(q, k, v, q, dropout=0.1, seed=seed)
        with pytest.raises(KernelError, match="dropout"):
            attention_dropped(q, k, v, None, None, False, 0.1, seed)


def sink(keys: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of which one key's weight is e^6.6 times that of each of the others."""
    torch.manual_seed(0)
    q, k, v = torch.zeros(1, 1, 16, 32), torch.zeros(1, 1, keys, 32), torch.randn(1, 1, keys, 32) + 4
    q[..., 0], k[:, :, 0, 0], v[:, :, 0] = 32**0.5, 6.6, -4
    return tuple(t.bfloat16() for t in (q, k, v))


def limited(q, k, v, mask=None, causal=False, int8=(8, 128)):
    """Attention of one head, in int8 where that was judged."""
    columns = [t.transpose(1, 2).flatten(2) for t in (q, k, v)]
    return attention_of_columns(*columns, (0, 0, 0), (32, 32, 32), 32, mask, causal=causal, int8=int8)


def test_int8_keeps_the_tail_of_a_softmax(every_isa: str) -> None:
    """Weights that a byte holds none of have two: of 511 keys that have half of a query's weight."""
    for keys in (128, 512, 2048):
        q, k, v = sink(keys)
        want = limited(q, k, v, int8=False).float()
        for mask in (None, torch.ones(1, 1, 16, keys, dtype=torch.bool), torch.zeros(1, 1, 16, keys)):
            assert (limited(q, k, v, mask, int8=True).float() - want).abs().max() < 0.06
        q[:, :, 3:9] = 0.1  # others of their blocks do without
        assert torch.equal(in_int8(q, k, v), whole_reference(q, k, v).bfloat16())
    late = torch.cat([k[:, :, 1:], k[:, :, :1]], 2), torch.cat([v[:, :, 1:], v[:, :, :1]], 2)
    got, want = (in_int8(q[:, :, :1].expand(1, 1, 2048, 32), *late, causal=True), reference(q, *late)[:, :, -1])
    assert (got[:, :, -1].float() - want.float()).abs().max() < 0.06


def test_int8_leaves_queries_of_coarse_steps_to_floats(every_isa: str) -> None:
    q, k, v = (t.bfloat16() for t in operands(1, 2, 1, 30, 40, 32, 32))
    k[0, 0, 5] *= 400
    want = reference(*(t[:, :1].float() for t in (q, k, v)))  # of the other head bytes are enough
    torch.testing.assert_close(in_int8(q, k, v)[:, :1].float(), want, atol=1e-3, rtol=2**-7)
    torch.testing.assert_close(whole_reference(q, k, v)[:, :1], want)


def in_bytes(q, k, v, steps, mask=None, causal=False, unseen=0.0, ranged=(0.0, 0)):
    """Attention of bytes (batch, heads, rows, width), as columns of products."""
    columns, sizes = (
        [t.transpose(1, 2).flatten(2) for t in (q, k, v)],
        tuple(t.shape[1] * t.shape[3] for t in (q, k, v)),
    )
    given = (0, 0, 0), sizes, q.shape[-1], mask, None, causal, unseen, *ranged
    got = attention_of_columns(*columns, *given, steps=torch.cat([t.flatten() for t in steps]))
    return got.unflatten(-1, (-1, q.shape[-1])).transpose(1, 2)


@in_turn("sizes", [(2, 2, 2, 27, 70, 32), (1, 1, 3, 2, 5, 20), (1, 2, 1, 14, 133, 7), (1, 2, 1, 24, 96, 64)])
@in_turn("unit", [3e-4, 3e-3])
def test_bytes_are_their_reference_to_the_bit(every_isa: str, sizes: tuple[int, ...], unit: float) -> None:
    torch.manual_seed(0)
    batch, groups, each, queries, keys, width = sizes
    shapes = (batch, groups * each, queries, width), *[(batch, groups, keys, width)] * 2
    q, k, v = (torch.randint(0, 256, shape, dtype=torch.uint8) for shape in shapes)
    steps = torch.full((groups * each,), unit), torch.rand(groups, width) + 0.1, torch.randn(groups, width)
    for mask, causal in (
        (None, False),
        (None, True),
        (torch.rand(batch, 1, 1, keys) > 0.3, False),
        ((torch.arange(keys) < keys - 1 - 3 * torch.arange(batch)[:, None])[:, None, None], False),
        (torch.randn(queries, keys), False),
    ):
        want = bytes_reference(q, k, v, *steps, mask, causal=causal)
        assert torch.equal(in_bytes(q, k, v, steps, mask, causal), want.bfloat16())
    found = Quantization.of_range(-0.4, 0.7)
    assert found.x_scale is not None
    whole = in_bytes(q, k, v, steps, ranged=(found.x_scale, found.x_zero))
    assert torch.equal(whole, quantize_input(bytes_reference(q, k, v, *steps), found)[0])
    rows = (
        q[:1, :, :1].expand(-1, -1, keys, -1).transpose(1, 2).flatten(2),
        *(t[:1].transpose(1, 2).flatten(2) for t in (k, v)),
    )
    parts = (0, 0, 0), tuple(t.shape[-1] for t in rows), width, torch.tensor([0, 3, 3, keys])
    flat = torch.cat([t.flatten() for t in steps])
    got = attention_of_sequences(*rows, *parts, steps=flat)
    for begin, end in ((0, 3), (3, keys)):
        one = attention_of_columns(*(t[:, begin:end] for t in rows), *parts[:3], steps=flat)
        assert torch.equal(got[:, begin:end], one)


def test_bytes_of_more_keys_than_their_weights_allow_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randint(0, 256, (1, 2, 40, 32), dtype=torch.uint8) for _ in range(3))
    steps = torch.full((2,), 3e-4), torch.rand(2, 32) + 0.1, torch.randn(2, 32)
    want = in_bytes(q, k, v, steps)
    monkeypatch.setattr(cpu, "MOST_BYTE_KEYS", 39)
    got = in_bytes(q, k, v, steps)
    assert not torch.equal(got, want)
    assert (got.float() - want.float()).norm() < 0.02 * want.float().norm()


def test_int8_beyond_what_was_judged_is_bfloat16(every_isa: str) -> None:
    q, k, v = sink(512)
    want = limited(q, k, v, int8=False)
    assert torch.equal(limited(q, k, v), want), "more keys than were judged"
    assert torch.equal(limited(q, k[:, :, :7], v[:, :, :7]), limited(q, k[:, :, :7], v[:, :, :7], int8=False)), "fewer"
    q, k, v = (t.bfloat16() for t in operands(1, 1, 1, 16, 128, 32, 32))
    floats, whole = (limited(q, k, v, int8=int8) for int8 in (False, True))
    assert torch.equal(limited(q, k, v), whole) and not torch.equal(whole, floats)
    one = k[:, 0], v[:, 0]  # as packed rows
    given = (0, 0, 0), (32, 32, 32), 32, torch.tensor([0, 128]), 0.3
    packed = [
        attention_of_sequences(one[0], *one, *given, int8=int8, places=torch.empty(1, length, dtype=torch.int64))
        for int8, length in ((True, 128), ((8, 128), 128), ((8, 128), 129), (False, 129))
    ]
    assert torch.equal(packed[0], packed[1]) and torch.equal(packed[2], packed[3])
    assert not torch.equal(packed[1], packed[2])


def test_int8_that_was_judged_sees_no_hidden_key(every_isa: str) -> None:
    """Queries that see other keys than others do keep to bfloat16; a range would come of keys unseen."""
    q, k, v = (t.bfloat16() for t in operands(1, 1, 1, 40, 40, 32, 32))
    later = k.clone(), v.clone()
    for t in later:
        t[:, :, 20:] *= 50
    assert torch.equal(limited(q, k, v, causal=True)[:, :20], limited(q, *later, causal=True)[:, :20])
    blocks = torch.block_diag(torch.ones(20, 20), torch.ones(20, 20)).bool()[None, None]
    for mask in (blocks, torch.zeros(1, 1, 40, 40).masked_fill(~blocks, -torch.inf)):
        assert torch.equal(limited(q, k, v, mask)[:, :20], limited(q, *later, mask)[:, :20])
    padding = (torch.arange(40) < 20)[None, None, None]
    alone = limited(q, k[:, :, :20], v[:, :, :20])
    for mask in (padding, *(torch.zeros(1, 1, 1, 40).masked_fill(~padding, least) for least in (-1e4, -65504.0))):
        same = limited(q, *later, mask), limited(q, k, v, mask), limited(q, k, v, mask.expand(1, 1, 40, 40))
        assert all(torch.equal(one, same[0]) for one in same)
        torch.testing.assert_close(same[0], alone, atol=0.02, rtol=0.02)
        assert not torch.equal(same[0], limited(q, k, v, mask, int8=False))


def test_int8_of_heads_that_are_too_wide_for_its_sums() -> None:
    x = torch.randn(1, 4, MOST_WIDTH + 8).bfloat16()
    given = x, x, x, (0, 0, 0), (x.shape[-1],) * 3, x.shape[-1]
    assert torch.equal(attention_of_columns(*given, int8=True), attention_of_columns(*given))
    row = next(row for row in native.rows("attention") if row.dtype == "int8")
    out, parts = torch.empty_like(x), (*given[3:], 1.0, False, 0.0, 0.0, 0, 1)
    with pytest.raises(KernelError, match="65536 of them at most, and as many columns"):
        native.extension().attention_of_columns(row.index, x, x, x, out, None, *parts)
