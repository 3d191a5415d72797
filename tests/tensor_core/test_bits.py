"""Products of single bits as Tensor Cores make them, and those of 1 to 8 bits made of them, against whole numbers."""

import itertools

import pytest
import torch

from twofour.errors import PackingError
from twofour.tensor_core import bits as of_bits
from twofour.tensor_core.bits import MMA_B1, SYSTEMS, bit_product, execute_b1, planes_of, popcount, to_registers

VALUES = {
    "unsigned": lambda u, p: u,
    "twos": lambda u, p: u - (1 << (p - 1)),
    "bipolar": lambda u, p: 2 * u - ((1 << p) - 1),
}
"""What codes stand for, written again."""


def codes_of(bits: int, rows: int, k: int) -> torch.Tensor:
    return torch.randint(0, 1 << bits, (rows, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits + k))


@pytest.mark.parametrize("row", MMA_B1, ids=lambda row: row.name)
def test_lanes_hold_what_the_ptx_isa_says(row) -> None:
    """Element i of a lane by the text: conditions on i, threads 4 to a group."""
    words = row.k // 32
    a, b = (torch.arange(size * words, dtype=torch.int32).view(size, words) for size in (16, 8))
    for lane, (of_a, of_b) in enumerate(zip(*to_registers(row, a, b), strict=True)):
        group, thread = lane >> 2, lane % 4
        for i in range(0, row.k // 2, 32):
            upper = not (i < 32 or 64 <= i < 96)
            assert of_a[i // 32] == a[group + 8 * upper, thread + 4 * (i >= 64)]
        for i in range(0, row.k // 4, 32):
            assert of_b[i // 32] == b[group, thread + 4 * (i >= 32)]


@pytest.mark.parametrize("row", MMA_B1, ids=lambda row: row.name)
def test_an_instruction_counts_the_ones_in_both(row) -> None:
    bits_a, bits_b = codes_of(1, 16, row.k), codes_of(1, 8, row.k)
    a, b = planes_of(bits_a, 1, row.k)[0], planes_of(bits_b, 1, row.k)[0]
    start = torch.arange(128, dtype=torch.int32).view(32, 4)
    d = execute_b1(row, *to_registers(row, a, b), start)
    want = bits_a.long() @ bits_b.long().T
    for lane, register in itertools.product(range(32), range(4)):
        place = (lane >> 2) + 8 * (register >= 2), lane % 4 * 2 + (register & 1)
        assert d[lane, register] == want[place] + start[lane, register]
    with pytest.raises(PackingError, match="other registers of B"):
        execute_b1(row, *to_registers(row, a, b)[:1], start[:, :3], start)
    for some, of in (((a[:, 1:], b), "A"), ((a, b[:4]), "B"), ((a, b.long()), "B")):
        with pytest.raises(PackingError, match=f"other words of {of}"):
            to_registers(row, *some)
    words = torch.tensor([0, -1, 1 << 30, -(1 << 31), 0x0F0F0F0F], dtype=torch.int32)
    assert popcount(words).tolist() == [0, 32, 1, 1, 16]


def test_every_pair_of_widths_and_systems_is_exact() -> None:
    k = 131  # more than one instruction of 128, and no multiple of a word
    for p, q in itertools.product(range(1, 9), repeat=2):
        x, w = codes_of(p, 3, k), codes_of(q, 5, k)
        for (i, of_x), (j, of_w) in itertools.product(enumerate(SYSTEMS), repeat=2):
            if p * q > 6 and (i + 2 * j + p + q) % 3:
                continue  # pairs of systems take turns where planes are many
            want = VALUES[of_x](x.long(), p) @ VALUES[of_w](w.long(), q).T
            assert torch.equal(bit_product(x, w, (p, of_x), (q, of_w), MMA_B1[(p + q) % 2]), want), (p, of_x, q, of_w)


def test_several_tiles_and_codes_that_do_not_fit() -> None:
    x, w = codes_of(2, 17, 300), codes_of(1, 9, 300)
    want = x.long() @ (2 * w.long() - 1).T
    assert torch.equal(bit_product(x, w, (2, "unsigned"), (1, "bipolar")), want)
    for of_x, k in (
        ((1, "unsigned"), 300),
        ((2.0, "unsigned"), 300),
        ((9, "unsigned"), 300),
        ((2, "ternary"), 300),
        ((2, "twos"), 299),
    ):
        with pytest.raises(PackingError, match="do not fit their bits"):
            bit_product(x, w[:, :k], of_x, (1, "bipolar"))
    for some in ((x[:0], w), (x, w[:0]), (x[:, :0], w[:, :0]), (x.float(), w), (x, w[0])):
        with pytest.raises(PackingError, match="not rows of bytes"):
            bit_product(*some, (2, "unsigned"), (1, "bipolar"))
    assert of_bits.MMA_B1[1].name == "mma.m16n8k256.b1.and.popc"
