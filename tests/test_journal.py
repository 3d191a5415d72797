"""The time left of a run whose steps differ."""

from __future__ import annotations

import pytest

from twofour import journal
from twofour.journal import Pace


def test_the_time_left_follows_what_steps_take_here(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(journal.time, "monotonic", lambda: now)
    run = Pace(["prune", "compile", "judge", "compile", "judge"], {"prune": 10, "compile": 20, "judge": 1})
    assert run.left() == 52
    run.begin()
    now = 4.0
    assert run.left() == 48
    now = 30.0
    run.end()
    assert run.left() == pytest.approx(42 * 43 / 23), "three times as long, in a fifth of the run"
    run.begin()
    now = 40.0
    run.end()
    assert run.left() == pytest.approx(10 + 2 * 53 / 43), "compiling is known by now, judging by its proportion"
    run.end()  # done by an earlier run
    run.begin()
    now = 100.0
    assert run.left() == pytest.approx(0.5 + 53 / 43), "what takes longer than expected is nearly done"
    run.end()
    run.end()
    run.end()
    assert run.left() == 0
