"""Choices under a noisy clock of the tests' own: what a busy machine does to the times and what stays of the order."""

import itertools
import random
from collections.abc import Callable, Iterator

import pytest
import torch

from twofour.measure import compare, timing
from twofour.measure.cache import SETTLED
from twofour.measure.chooser import race
from twofour.measure.effort import QUICK, measuring

SECONDS = {"fastest": 1.0e-3, "close": 1.2e-3, "slow": 2.0e-3}


class Machine:
    """A clock that kernels advance, with neighbours that slow the core and processes that take it away."""

    def __init__(self, seed: int, slow: Callable[[float], float], stolen: float = 0.0) -> None:
        self.now, self.slow, self.stolen, self.random = 0.0, slow, stolen, random.Random(seed)

    def kernel(self, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.now += seconds * self.slow(self.now) * self.random.uniform(1.0, 1.02)
            if self.random.random() < self.stolen:
                self.now += self.random.uniform(0.003, 0.02)

        return run

    def race(self, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, float], float]:
        for clock in timing.CLOCKS:
            monkeypatch.setitem(timing.CLOCKS, clock, lambda: self.now)
        return race({name: self.kernel(seconds) for name, seconds in SECONDS.items()})


@pytest.fixture(autouse=True)
def short_races() -> None:
    """Races are as long here as they are for users: the clock is the tests' own."""


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_the_order_survives_a_neighbour_who_slows_evenly(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(20):
        found, doubt = Machine(seed, lambda now: 3.0).race(monkeypatch)
        assert doubt <= SETTLED and sorted(found, key=found.__getitem__) == list(SECONDS)


def test_the_order_survives_a_neighbour_who_comes_and_goes(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = [
        min(found, key=found.__getitem__) == "fastest"
        for seed in range(50)
        for found in [Machine(seed, lambda now: 1.6 if int(now / 0.017) % 2 else 1.0).race(monkeypatch)[0]]
    ]
    assert sum(right) >= 48


def test_wall_time_is_read_where_it_was_not_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twofour.native.threads", lambda: 2)
    found = [Machine(seed, lambda now: 1.0, stolen=0.4).race(monkeypatch)[0] for seed in range(50)]
    assert sum(min(times, key=times.__getitem__) == "fastest" for times in found) >= 47


def test_an_order_that_half_of_the_rounds_denies_is_not_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, rounds = Machine(0, lambda now: 1.0), itertools.count()

    def turncoat() -> None:
        machine.now += 2.0e-3 if next(rounds) % 2 else 6.0e-3  # the fastest in every other round

    monkeypatch.setitem(timing.CLOCKS, "wall", lambda: machine.now)
    calls = {"steady": machine.kernel(4.0e-3), "turncoat": turncoat}
    found = compare(calls, repeats=8, seconds=9.0, weights="cold", sure=0.05)
    assert found.doubt is not None and found.doubt > 0.05
    assert found.timing("steady").samples == 3 * 8, "it went on for as long as it may"


def test_more_rounds_are_made_until_the_order_is_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(0, lambda now: 1.0)
    monkeypatch.setitem(timing.CLOCKS, "wall", lambda: machine.now)
    kernels = {name: machine.kernel(seconds) for name, seconds in SECONDS.items()}
    found = compare(kernels, repeats=5, seconds=9.0, sure=0.05)
    assert found.timing("slow").samples == 5 and found.doubt == 0.0


def test_the_time_box_is_of_the_clock_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(0, lambda now: 1.0)
    monkeypatch.setitem(timing.CLOCKS, "thread", lambda: machine.now)
    found = compare({"a": machine.kernel(1e-2)}, repeats=100, seconds=0.1, threads=1, clock="thread", weights="cold")
    assert 5 <= found.timing("a").samples <= 12


def test_little_effort_times_a_slow_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(0, lambda now: 1.0)
    for clock in timing.CLOCKS:
        monkeypatch.setitem(timing.CLOCKS, clock, lambda: machine.now)
    found = compare({name: machine.kernel(s) for name, s in SECONDS.items()}, repeats=3, seconds=9.0, behind=1.5)
    assert [found.timing(name).samples for name in SECONDS] == [3, 3, 1] and found.doubt == 0.0
    calls = dict.fromkeys(SECONDS, 0)

    def counted(name: str) -> Callable[[], None]:
        kernel = machine.kernel(SECONDS[name])

        def run() -> None:
            calls[name] += 1
            kernel()

        return run

    with measuring(QUICK):
        times, _ = race({name: counted(name) for name in SECONDS})
    assert sorted(times, key=times.__getitem__) == list(SECONDS)
    assert calls["slow"] < calls["fastest"] < 20
