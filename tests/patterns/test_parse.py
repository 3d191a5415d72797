import pytest

from tests.turns import in_turn
from twofour.errors import PatternError
from twofour.patterns import NM, PairedNM, parse


@in_turn(("n", "m"), [(2, 4), (1, 2), (4, 8), (1, 4), (8, 16), (3, 7), (63, 64)])
def test_names_round_trip(n: int, m: int) -> None:
    pattern = parse(f"{n}:{m}")
    assert pattern == NM(n, m)
    assert parse(pattern.name) is parse(f" {pattern.name} ")
    assert (pattern.group, pattern.density) == (m, n / m)
    assert parse(pattern) is pattern


def test_pairs_round_trip() -> None:
    assert parse("4:8-pairs") == PairedNM(4, 8)
    assert parse("4:8-pairs").name == "4:8-pairs"


@in_turn("text", ["", "2", "2:4:", "a:b", "2/4", "-2:4", "2.0:4", "2:4 pairs", "②:4", "٢:٤", "2:4\n1:2"])
def test_what_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(PatternError, match="not a sparsity pattern") as caught:
        parse(text)
    assert "wanted" in str(caught.value)


def test_dense_groups_may_stand_behind_spaces_and_the_nearest_is_named() -> None:
    assert parse("2:4\t+\n25%") is parse("2:4 + 25%") is parse("2:4+25%") is parse(" 2:4+ 25% ")
    for text, near in (("2:4+25", "2:4+25%"), ("2: 4+25 %", "2:4+25%"), ("2:4+12.5", "2:4+12.5%")):
        with pytest.raises(
            PatternError, match=rf'not a sparsity pattern[\s\S]*did you mean "{near}"\?'.replace("+", "[+]")
        ):
            parse(text)
    with pytest.raises(PatternError, match='"2:4" is what Sparse'):
        parse("2:4 +")


@in_turn("text", ["0:4", "4:4", "5:4", "2:65", "3:8-pairs", "4:4-pairs"])
def test_impossible_patterns_are_refused(text: str) -> None:
    with pytest.raises(PatternError, match="impossible"):
        parse(text)


@in_turn(("n", "m"), [(4, 512), (0, 4), (4, 4), (-1, 4), (2, 65), (2.0, 4)])
def test_impossible_patterns_cannot_be_built_either(n: int, m: int) -> None:
    with pytest.raises(PatternError, match=rf"the pattern '{n}:{m}' is impossible(.|\n)*1 <= N < M <= 64"):
        NM(n, m)


@pytest.mark.parametrize(("n", "m"), [(3, 8), (2, 7), (0, 8), (8, 8), (64, 66)])
def test_impossible_pairs_cannot_be_built_either(n: int, m: int) -> None:
    with pytest.raises(PatternError, match=rf"'{n}:{m}-pairs' is impossible(.|\n)*even N and M with 2 <= N"):
        PairedNM(n, m)


def test_channels_are_no_pattern_and_the_error_says_what_will_cut_them() -> None:
    with pytest.raises(PatternError, match=r"not a sparsity pattern(?s:.*)twofour\.structure will cut them"):
        parse("channel:0.5")


def test_other_types_are_refused() -> None:
    with pytest.raises(PatternError, match="tuple"):
        parse((2, 4))  # type: ignore[arg-type]
