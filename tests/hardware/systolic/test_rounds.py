"""Fetches are counted without following each: against loops that do."""

import numpy as np

from tests.turns import in_turn
from twofour.hardware.systolic.memory import LATENCY, Ahead, _Window
from twofour.hardware.systolic.waiting import _late


def followed(read: Ahead, cycle: int, before: int, fetches: int) -> int:
    late = LATENCY
    for fetch in range(before + 1, before + fetches + 1):
        wait = read.done(fetch) - cycle - late
        late += wait + max(wait, 0)
    return late - LATENCY


def test_waits_of_many_fetches_are_those_of_one_after_the_other() -> None:
    draw = np.random.default_rng(0)
    for _ in range(3000):
        read = Ahead((0, int(draw.integers(0, 40))), 1, ())
        cycle, before, fetches = int(draw.integers(-500, 2000)), int(draw.integers(0, 60)), int(draw.integers(1, 40))
        assert _late(read, cycle, before, fetches) == followed(read, cycle, before, fetches)


@in_turn("seed", range(20))
def test_a_window_turns_as_often_as_it_would_step_by_step(seed: int) -> None:
    draw = np.random.default_rng(seed)
    space, total = 300, int(draw.integers(100, 700))
    order = draw.integers(0, space, int(draw.integers(50, 4000)))
    window = _Window(order, total, -(-total // 2), space)
    if not window.ahead:
        return
    count, start = len(window.parts), 0
    for address in draw.choice(order, 60):
        if window.held[address]:
            continue
        turns = 0
        while True:
            start, turns = (start + window.ahead) % count, turns + 1
            if any(address in window.parts[(start + at) % count] for at in range(window.active)):
                break
        assert window.turn(int(address)) == turns and window.start == start
        held = np.zeros(space, np.int64)
        for at in range(window.active):
            held[window.parts[(start + at) % count]] += 1
        assert np.array_equal(held, window.held)
