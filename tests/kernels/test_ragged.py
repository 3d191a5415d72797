"""Ragged batches: the layout against its reference, rows there and back, attention inside each sequence."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from tests.conftest import threads
from tests.turns import in_turn
from twofour.errors import KernelError
from twofour.kernels.attention import attention_of_columns, attention_of_sequences
from twofour.kernels.quantization import Quantization
from twofour.kernels.ragged import lay_out, pad_tokens, real_tokens, reference, take_tokens

SETTINGS = hypothesis.settings(
    max_examples=25, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)


def padding(sequences: int, length: int, seed: int) -> Tensor:
    """A mask with holes at any place but the first."""
    mask = torch.rand(sequences, length, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[:, 0] = True
    return mask


@SETTINGS
@hypothesis.given(
    sequences=st.integers(1, 5), length=st.integers(1, 20), seed=st.integers(0, 99), more=st.sampled_from([0, 1, 7])
)
def test_the_layout_is_that_of_the_reference(sequences: int, length: int, seed: int, more: int) -> None:
    mask = padding(sequences, length, seed)
    tokens = int(mask.sum())
    want = reference(mask, tokens + more)
    for given in (mask, mask.long(), mask.float(), mask.long().t().contiguous().t()):
        assert real_tokens(given) == tokens
        for got, wanted in zip(lay_out(given, tokens + more), want, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("mask", [[[1, 2]], [[1, 0], [0, 1]], [[0, 0]], [[-1, 1]]])
def test_no_tokens_are_counted_where_it_is_not_clear_which_are_real(mask: list[list[int]]) -> None:
    assert real_tokens(torch.tensor(mask)) == real_tokens(torch.tensor(mask).float()) == -1
    with pytest.raises(KernelError, match="lay_out"):
        lay_out(torch.tensor(mask), 2)
    with pytest.raises(KernelError, match="mask"):
        real_tokens(torch.tensor(mask).int())


def test_more_tokens_than_there_is_room_for_are_refused() -> None:
    with pytest.raises(KernelError, match="room for the real tokens"):
        lay_out(torch.ones(2, 3, dtype=torch.bool), 5)


@in_turn("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@in_turn("count", [1, 2])
@in_turn("heads", [(), (3,)])
def test_rows_there_and_back(dtype: torch.dtype, count: int, heads: tuple[int, ...]) -> None:
    mask = padding(4, 19, 1)
    tokens = int(mask.sum())
    layout = lay_out(mask, tokens + 5)
    x = torch.randint(1, 200, (4, 19, *heads, 5)).to(dtype)
    with threads(count):
        packed = take_tokens(x, layout.rows)
        again = pad_tokens(packed, layout.places)
    assert packed.shape == (1, tokens + 5, *heads, 5) and torch.equal(packed[0, :tokens], x[mask])
    assert torch.equal(packed[0, tokens:], x[0, :1].expand(5, *x.shape[2:]))
    zeros = torch.zeros((), dtype=dtype)
    assert torch.equal(again, torch.where(mask.view(4, 19, *[1] * len(heads), 1), x, zeros))
    part = x[:, 3:9]  # rows that are no one run of memory
    assert torch.equal(take_tokens(part.contiguous(), torch.tensor([0, 11]))[0], part.flatten(0, 1)[[0, 11]])


def test_a_row_that_is_not_there_is_refused() -> None:
    x = torch.randn(2, 3, 4)
    for place in (6, -2):
        with pytest.raises(KernelError, match="rows of the input, or -1"):
            take_tokens(x, torch.tensor([0, place]))


@in_turn("dtype", [torch.float32, torch.bfloat16])
@in_turn("causal", [False, True])
@in_turn("count", [1, 2])
def test_attention_stays_inside_each_sequence(isa: str, dtype: torch.dtype, causal: bool, count: int) -> None:
    torch.manual_seed(0)
    lengths, width, sizes = (1, 40, 3, 0, 17), 16, (64, 32, 32)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    x = torch.randn(1, sum(lengths), sum(sizes)).to(dtype)
    parts = (0, 64, 96), sizes, width
    with threads(count):
        got = attention_of_sequences(x, x, x, *parts, ends, 0.3, causal)
    for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        one = x[:, begin:end]
        want = attention_of_columns(one, one, one, *parts, None, 0.3, causal) if end > begin else one[..., :64]
        assert torch.equal(got[:, begin:end], want)
    found = Quantization.of_range(-0.4, 0.7)
    assert found.x_scale is not None
    whole = attention_of_sequences(x, x, x, *parts, ends, 0.3, causal, found.x_scale, found.x_zero)
    one = x[:, 1:41]
    given = *parts, None, 0.3, causal, 0.0, found.x_scale, found.x_zero
    assert torch.equal(whole[:, 1:41], attention_of_columns(one, one, one, *given)) and whole.dtype is torch.uint8


@pytest.mark.parametrize("ends", [[0, 5], [0, 4, 2, 6], [1, 6], [6], [0, 7], [0, -1, 6]])
def test_offsets_that_are_none_are_refused(ends: list[int]) -> None:
    x = torch.randn(1, 6, 24)
    with pytest.raises(KernelError, match="that rise from 0 to the rows"):
        attention_of_sequences(x, x, x, (0, 8, 16), (8, 8, 8), 8, torch.tensor(ends))
    with pytest.raises(KernelError, match="do not fit"):
        attention_of_sequences(x.double(), x, x, (0, 8, 16), (8, 8, 8), 8, torch.tensor([0, 6]))
