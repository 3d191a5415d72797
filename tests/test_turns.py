"""Cases that run in turn: each is run, those that failed are named, and the items of pytest stay few."""

from __future__ import annotations

import inspect
import io
from collections import Counter

import pytest

from tests import turns
from tests.conftest import pytest_terminal_summary
from tests.turns import in_turn

MOST = 9_000
"""Items of `make test` and `make test-long` together. Each takes five milliseconds beside its work; the eighteen
thousand there once were took a minute and a half."""


@pytest.mark.skipif(turns.SPREAD, reason="every case is an item")
def test_items_stay_few(request: pytest.FixtureRequest) -> None:
    items = request.session.items
    most = Counter(item.nodeid.partition("[")[0] for item in items).most_common(10)
    assert len(items) <= MOST, f"{len(items)} items: run cases in turn (tests/turns.py), those of {most} for example"


@pytest.fixture
def in_one_item(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SPREAD", False)


def test_every_case_is_run_and_those_that_failed_are_named(in_one_item: None) -> None:
    ran: list[tuple[int, str]] = []

    @in_turn("number", [1, 2, 3])
    @in_turn(("letter", "word"), [("x", "ab"), ("y", "cd")])
    def test(number: int, letter: str, word: str, fixture: str) -> None:
        ran.append((number, letter))
        assert fixture == "given"
        if number > 1:
            with pytest.raises(ValueError, match=word):  # nothing raises: pytest's failure is no Exception
                pass

    assert list(inspect.signature(test).parameters) == ["fixture"]
    with pytest.raises(BaseExceptionGroup, match="2 of 3 cases failed") as failed:
        test(fixture="given")
    assert ran == [(number, letter) for number in (1, 2, 3) for letter in "xy"]
    for number, group in zip((2, 3), failed.value.exceptions, strict=True):
        assert isinstance(group, BaseExceptionGroup) and group.__notes__ == [f"the case number={number}"]
        notes = [error.__notes__ for error in group.exceptions]
        assert notes == [["the case letter=x, word=ab"], ["the case letter=y, word=cd"]]


@pytest.mark.parametrize("end", [KeyboardInterrupt(), pytest.exit.Exception("enough")], ids=["interrupt", "exit"])
def test_who_ends_the_run_ends_it_at_once(in_one_item: None, end: BaseException) -> None:
    ran: list[int] = []

    @in_turn("number", [1, 2])
    def test(number: int) -> None:
        ran.append(number)
        raise end

    with pytest.raises(type(end)):
        test()
    assert ran == [1]


def test_one_failure_is_raised_as_it_is(in_one_item: None) -> None:
    @in_turn("kind", [int, float])
    def test(kind: type) -> None:
        assert kind is int

    with pytest.raises(AssertionError) as failed:
        test()
    assert failed.value.__notes__ == ["the case kind=float"]


def up_to(most: int) -> None:
    """Run cases of which those above the most are skipped."""

    def test(value: int) -> None:
        if value > most:
            pytest.skip("large")

    turns.each(test, {}, [{"value": 1}, {"value": 2}])


def test_it_is_skipped_where_every_case_was() -> None:
    with pytest.raises(pytest.skip.Exception, match="large"):
        up_to(most=0)
    assert not turns.take_left_out()


def test_a_case_that_is_skipped_beside_others_is_in_the_summary(request: pytest.FixtureRequest) -> None:
    """The report takes the way from a process of xdist to the one that prints."""
    hooks, config = request.node.ihook, request.config
    call = pytest.CallInfo.from_call(lambda: up_to(most=1), "call")
    made = hooks.pytest_runtest_makereport(item=request.node, call=call)
    report = hooks.pytest_report_from_serializable(
        config=config, data=hooks.pytest_report_to_serializable(config=config, report=made)
    )
    out = io.StringIO()
    printer = pytest.TerminalReporter(config, out)
    printer.stats = {"passed": [report]}
    pytest_terminal_summary(printer)
    assert f"SKIPPED [1] {request.node.nodeid}: value=2: large\n" in out.getvalue()
    assert not turns.take_left_out()


def test_names_marks_and_lists_that_no_item_could_have_are_refused(in_one_item: None) -> None:
    with pytest.raises(AssertionError, match="does not take"):
        in_turn("other", [1])(lambda value: None)
    with pytest.raises(AssertionError, match="use parametrize"):
        in_turn("value", [pytest.param(1, marks=pytest.mark.long)])
    with pytest.raises(AssertionError, match="no case"):
        in_turn("value", [])


def test_spread_makes_an_item_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SPREAD", True)
    mark = in_turn("value", [1, 2], ids=str)
    assert mark.args == ("value", [1, 2]) and mark.kwargs == {"ids": str}
