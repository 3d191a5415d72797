"""Fused attention: every row of the table against float64, on odd shapes, with every kind of mask; in int8 too."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tests.conftest import threads
from tests.kernels.attention_cases import SETTINGS, check, check_low, in_int8, operands
from tests.turns import in_turn
from twofour import native
from twofour.errors import KernelError
from twofour.kernels.attention import (
    attention,
    attention_of_columns,
    attention_of_sequences,
    reference,
    whole_reference,
)
from twofour.kernels.attention.cpu import MOST_KEYS, MOST_WIDTH
from twofour.kernels.quantization import Quantization, quantize_input


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


def test_int8_leaves_queries_of_coarse_steps_to_floats(every_isa: str) -> None:
    q, k, v = (t.bfloat16() for t in operands(1, 2, 1, 30, 40, 32, 32))
    k[0, 0, 5] *= 400
    want = reference(*(t[:, :1].float() for t in (q, k, v)))  # of the other head bytes are enough
    torch.testing.assert_close(in_int8(q, k, v)[:, :1].float(), want, atol=1e-3, rtol=2**-7)
    torch.testing.assert_close(whole_reference(q, k, v)[:, :1], want)


def test_int8_of_heads_that_are_too_wide_for_its_sums() -> None:
    x = torch.randn(1, 4, MOST_WIDTH + 8).bfloat16()
    given = x, x, x, (0, 0, 0), (x.shape[-1],) * 3, x.shape[-1]
    assert torch.equal(attention_of_columns(*given, int8=True), attention_of_columns(*given))
    row = next(row for row in native.rows("attention") if row.dtype == "int8")
    out, parts = torch.empty_like(x), (*given[3:], 1.0, False, 0.0, 0.0, 0, 1)
    with pytest.raises(KernelError, match="65536 of them at most, and as many columns"):
        native.extension().attention_of_columns(row.index, x, x, x, out, None, *parts)
