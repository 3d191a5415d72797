"""The same packed weight in the form of another pattern: numbers, scales and zero points stay to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twofour.errors import PackingError
from twofour.packing import pack, packed_bytes, rewrite
from twofour.patterns import parse

FORMS = ("1:4", "1:2", "2:4", "2:8", "64:2:8", "2:4-transposable")


@given(
    text=st.sampled_from(FORMS),
    dtype=st.sampled_from(["float32", "bfloat16", "int8", "int4"]),
    rows=st.integers(1, 5),
    symmetric=st.booleans(),
    seed=st.integers(0, 9),
)
def test_a_weight_is_the_same_in_either_form(text: str, dtype: str, rows: int, symmetric: bool, seed: int) -> None:
    pattern = parse(text)
    weight = torch.randn(4 * rows, 64, generator=torch.Generator().manual_seed(seed))
    weight[0] = 0
    narrow = pack(weight * pattern.project(weight, absolute=True), pattern, dtype, symmetric=symmetric)
    wide = rewrite(narrow, parse("2:4"))
    wide.validate()
    assert wide.header.pattern == "2:4"
    assert torch.equal(wide.unpack(), narrow.unpack())
    back = rewrite(wide, pattern)
    back.validate()
    assert back.header == narrow.header and torch.equal(back.unpack(), narrow.unpack())
    zeros = narrow.zeros is not None
    assert [packed_bytes(one.header, zeros=zeros) for one in (narrow, wide)] == [narrow.nbytes, wide.nbytes]


def test_a_convolution_and_a_transposed_weight_keep_their_axis() -> None:
    pattern = parse("1:4")
    weight = torch.randn(8, 8, 3, 3)
    weight *= pattern.project(weight.movedim(1, -1), absolute=True).movedim(-1, 1)
    narrow = pack(weight, pattern, axis=1)
    assert torch.equal(rewrite(narrow, parse("2:4")).unpack(), weight)


def test_whole_numbers_without_scales_stay() -> None:
    weight = torch.randint(-9, 9, (4, 16)).to(torch.int8) * parse("1:4").project(torch.randn(4, 16))
    assert torch.equal(rewrite(pack(weight, "1:4"), parse("2:4")).unpack(), weight)


def test_what_a_weight_does_not_obey_is_refused() -> None:
    weight = torch.ones(4, 16) * parse("2:4").project(torch.ones(4, 16))
    with pytest.raises(PackingError, match="does not obey 1:4"):
        rewrite(pack(weight, "2:4"), parse("1:4"))
    with pytest.raises(PackingError, match="no float32 form"):
        rewrite(pack(weight, "2:4"), parse("4:8-pairs"))
