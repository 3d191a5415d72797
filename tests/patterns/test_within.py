"""Which pattern follows from which: read off the two texts, and true of every weight."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.turns import in_turn
from twofour.patterns import parse

TEXTS = (
    *("1:2", "1:4", "2:4", "3:4", "2:8", "4:8", "1:8", "8:16", "4:8-pairs", "2:8-pairs", "2:4-transposable", "4:2:8"),
    *("2:4+12.5%", "2:4+25%", "1:4+25%", "4:8+25%"),
)


@given(st.sampled_from(TEXTS), st.sampled_from(TEXTS), st.integers(0, 5))
def test_what_is_within_a_pattern_obeys_it(narrow: str, wide: str, seed: int) -> None:
    scores = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
    weight = scores * parse(narrow).project(scores, absolute=True)
    if parse(narrow).within(parse(wide)):
        assert parse(wide).check(weight).ok


IMPLIED = {
    "1:4": ("2:4", "1:4"),
    "1:2": ("2:4",),
    "2:4": ("4:8",),
    "2:8": ("2:4",),
    "4:8-pairs": ("4:8",),
    "2:4-transposable": ("2:4", "2:4-transposable"),
    "64:2:8": ("2:8", "2:4"),
}


@in_turn(("narrow", "wide"), [(one, other) for one, wider in IMPLIED.items() for other in wider])
def test_a_narrower_pattern_implies_a_wider_one(narrow: str, wide: str) -> None:
    assert parse(narrow).within(parse(wide))
    assert narrow == wide or not parse(wide).within(parse(narrow))


def test_neither_of_two_patterns_need_follow_from_the_other() -> None:
    for one, other in (("4:8", "2:4"), ("4:8-pairs", "2:4"), ("3:6", "2:4"), ("2:4", "2:4-transposable")):
        assert not parse(one).within(parse(other))
