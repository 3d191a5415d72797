"""Attention in int8 for the numbers of keys that it was judged with, and bytes of which products know the steps."""

import pytest
import torch

from tests.kernels.attention_cases import in_int8, of_columns, operands
from tests.turns import in_turn
from twofour.kernels.attention import (
    attention_of_columns,
    attention_of_sequences,
    bytes_reference,
    cpu,
    reference,
    whole_reference,
)
from twofour.kernels.quantization import Quantization, quantize_input


def sink(keys: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of which one key's weight is e^6.6 times that of each of the others."""
    torch.manual_seed(0)
    q, k, v = torch.zeros(1, 1, 16, 32), torch.zeros(1, 1, keys, 32), torch.randn(1, 1, keys, 32) + 4
    q[..., 0], k[:, :, 0, 0], v[:, :, 0] = 32**0.5, 6.6, -4
    return tuple(t.bfloat16() for t in (q, k, v))


def limited(q, k, v, mask=None, causal=False, int8=(8, 128)):
    """Attention of one head, in int8 where that was judged: (batch, rows, width)."""
    return of_columns(q, k, v, mask, causal=causal, int8=int8)[:, 0]


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


def in_bytes(q, k, v, steps, mask=None, causal=False, ranged=(0.0, 0)):
    """Attention of bytes (batch, heads, rows, width), whose steps products know."""
    return of_columns(q, k, v, mask, causal=causal, ranged=ranged, steps=torch.cat([t.flatten() for t in steps]))


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
