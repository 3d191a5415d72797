"""Cases of a test that are run in turn by one item of pytest, which costs five milliseconds beside its cases.

A failure names each case that failed; the others are run all the same. Cases that were skipped beside others that ran
are listed with their reasons in pytest's summary, by tests/conftest.py. `TWOFOUR_SPREAD=1` makes an item of each case
again: to run one alone with -k, or to find the one that ends the process.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

SPREAD = bool(os.environ.get("TWOFOUR_SPREAD"))

Test = Callable[..., None]

LEFT_OUT: list[str] = []
"""Cases that were skipped beside others that ran, each with its reason, since an item of pytest took them last."""


def in_turn(arguments: str | tuple[str, ...], values: Iterable[Any], **named: Any) -> Callable[[Test], Any]:
    """Run the test for every value, as pytest.mark.parametrize does with the same arguments, but in one item."""
    values = list(values)
    assert values, "there is no case: the test would pass without a run"
    assert not any(isinstance(value, type(pytest.param())) for value in values), "a mark is of an item: use parametrize"
    if SPREAD:
        return pytest.mark.parametrize(arguments, values, **named)
    names = tuple(one.strip() for one in arguments.split(",")) if isinstance(arguments, str) else arguments
    cases = [dict(zip(names, value if len(names) > 1 else (value,), strict=True)) for value in values]

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def turns(**given: Any) -> None:
            each(test, given, cases)

        known = inspect.signature(test)
        left = [one for name, one in known.parameters.items() if name not in names]
        assert len(left) == len(known.parameters) - len(names), f"{test.__name__} does not take {names}"
        vars(turns)["__signature__"] = known.replace(parameters=left)
        return turns

    return decorate


def of_group(argument: str) -> Callable[[Test], Test]:
    """Let a test that takes one value take a list of them, and run it for each."""

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def turns(**given: Any) -> None:
            group = given.pop(argument)
            each(test, given, [{argument: value} for value in group])

        return turns

    return decorate


def each(test: Test, given: Mapping[str, Any], cases: Iterable[Mapping[str, Any]]) -> None:
    """Run a test with each case beside what is given; raise what failed with the names of its cases.

    It is skipped where every case was; where some were, they go to `LEFT_OUT`.
    """
    failed: list[BaseException] = []
    skipped: list[tuple[str, str]] = []
    cases = list(cases)
    for case in cases:
        try:
            test(**given, **case)
        except pytest.skip.Exception as skip:
            skipped.append((described(case), str(skip)))
        except pytest.exit.Exception:
            raise
        except (Exception, BaseExceptionGroup, pytest.fail.Exception) as error:  # a group: of cases inside this one
            error.add_note(f"the case {described(case)}")
            failed.append(error)
    every = bool(cases) and len(skipped) == len(cases)
    if not every:
        LEFT_OUT.extend(f"{case}: {reason}" for case, reason in skipped)
    if len(failed) == 1:
        raise failed[0]
    if failed:
        raise BaseExceptionGroup(f"{len(failed)} of {len(cases)} cases failed", failed)
    if every:
        pytest.skip(skipped[0][1])


def described(case: Mapping[str, Any]) -> str:
    """Return the arguments of a case with their values' names."""
    return ", ".join(f"{name}={name_of(value)}" for name, value in case.items())


def name_of(value: Any) -> str:
    """Return what a case is called: a name of its own, or what it prints."""
    name = getattr(value, "name", None) or getattr(value, "__name__", None)
    return name if isinstance(name, str) else str(value)


def take_left_out() -> list[str]:
    """Return the cases of the item that has just ended which were skipped beside others, and forget them."""
    taken = list(LEFT_OUT)
    LEFT_OUT.clear()
    return taken
