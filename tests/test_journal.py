"""The time left of a run whose steps differ."""

from __future__ import annotations

import pytest

from twofour import journal
from twofour.journal import Pace


def test_the_time_left_follows_what_steps_take_here(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(journal.time, "monotonic", lambda: now)
    monkeypatch.setattr(journal.time, "process_time", lambda: now)
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
    assert run.left() == pytest.approx(60 / 4 + 53 / 43), "what takes longer than expected may take longer still"
    run.end()
    run.end()
    run.end()
    assert run.left() == 0


def test_a_run_that_waits_for_a_processor_is_known_to_before_its_first_step_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, share = 0.0, 0.25
    monkeypatch.setattr(journal.time, "monotonic", lambda: now)
    monkeypatch.setattr(journal.time, "process_time", lambda: share * now)
    run = Pace(["prune", "judge", "judge"], {"prune": 40, "judge": 10})
    assert run.left() == 60
    run.begin()
    now = 40.0  # of the 160 that pruning takes here
    assert run.waiting() == pytest.approx(42 / 12)
    assert run.left() == pytest.approx(3.5 * 60 - 40)
    now = 160.0
    run.end()
    assert run.left() == pytest.approx(20 * (160 + 15 * 162 / 42) / (40 + 15)), "80 at the same pace"
    share = 4.0  # several threads at once, which a step's own time shows when it ends
    run.begin()
    now = 200.0
    assert run.waiting() == 1
