"""The timer: order, spread, clocks, cold copies, records and their errors. No test asserts a speed."""

from __future__ import annotations

import gc
import itertools
import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.turns import in_turn
from twofour import measure
from twofour.errors import MeasureError
from twofour.measure.timing import balanced_orders

QUICK = {"repeats": 4, "seconds": 0.05}


def work(size: int = 2000):
    return lambda: sum(range(size))


def record(**options) -> measure.Record:
    return measure.compare({"dense": work(), "ours": work(100)}, **(QUICK | {"baseline": "dense"} | options))


@in_turn("count", [1, 2, 3, 4, 5, 6, 7])
def test_each_candidate_follows_each_other_one_equally_often(count):
    orders = balanced_orders(count)
    assert all(sorted(order) == list(range(count)) for order in orders)
    follows = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(follows) == count * (count - 1)
    assert len(set(follows.values())) <= 1


def test_candidates_are_interleaved_and_the_order_changes():
    calls: list[str] = []
    slow = {name: (lambda name=name: (calls.append(name), time.sleep(0.0012))) for name in "abcd"}
    measure.compare(slow, repeats=4, seconds=1, weights="cold")
    rounds = ["".join(calls[i : i + 4]) for i in range(len(calls) - 16, len(calls), 4)]
    assert all(sorted(r) == list("abcd") for r in rounds)
    assert len(set(rounds)) == 4


def test_median_spread_ratio_are_those_of_the_samples(monkeypatch):
    from twofour.measure import timing

    ticks = iter([0.0, 1.0, 0.0, 3.0, 0.0, 2.0, 0.0, 4.0, 0.0, 6.0])
    runner = timing._Runner("x", [lambda: None], lambda: next(ticks))
    for _ in range(5):
        runner.sample(hot=False)
    found = runner.timing()
    assert (found.median, found.lower, found.upper, found.minimum, found.samples) == (3.0, 2.0, 4.0, 1.0, 5)
    assert found.spread == pytest.approx(2 / 3)


def test_a_short_call_is_repeated_until_a_sample_lasts():
    from twofour.measure import timing

    seconds = 0.0

    def call() -> None:
        nonlocal seconds
        seconds += 2e-6

    runner = timing._Runner("x", [call], lambda: seconds, calls=1)
    runner.calibrate(warmup=1)
    assert 500 <= runner.calls <= 1000
    assert runner.seconds * runner.calls >= timing.SAMPLE_SECONDS


def test_samples_become_shorter_when_calls_become_slower():
    from twofour.measure import timing

    seconds = 0.0

    def call() -> None:
        nonlocal seconds
        seconds += 0.001

    runner = timing._Runner("x", [call], lambda: seconds, calls=400)
    counts = []
    for _ in range(3):
        runner.sample(hot=False)
        counts.append(runner.calls)
    assert counts[0] in (9, 10) and counts[1:] == counts[:1] * 2  # from 0.4 s a sample to 10 ms, and no further
    assert runner.samples == pytest.approx([0.001] * 3)


def test_ratio_takes_the_best_baseline():
    timings = {n: measure.Timing(t, t, t, t, 3, 1) for n, t in {"plain": 4.0, "prepacked": 2.0, "ours": 1.0}.items()}
    found = measure.Record(timings=timings, baseline=("plain", "prepacked"))
    assert found.ratio("ours") == 2.0
    assert found.ratio("ours", against="plain") == 4.0
    assert found.fastest() == "ours"
    assert found.fastest(found.baseline) == "prepacked"
    with pytest.raises(
        MeasureError, match=r'no such candidate(.|\n)*\'theirs\'(.|\n)*"plain" or "prepacked" or "ours"'
    ):
        found.ratio("theirs")
    with pytest.raises(MeasureError, match=r"no baseline(.|\n)*baseline="):
        measure.Record(timings=timings).ratio("ours")


def test_copies_rotate_and_no_copy_is_used_twice_in_a_sample():
    used: list[int] = []
    copies = [lambda i=i: used.append(i) for i in range(7)]
    found = measure.compare({"cold": copies}, weights="cold", **QUICK)
    assert used == [i % 7 for i in range(len(used))]
    assert found.timing("cold").calls <= 7
    assert found.weights == "cold" and found.cold == {"copies": 7}


def test_cold_copies_exceed_the_cache_where_memory_allows():
    small = measure.copies_for_cold(1 << 20, llc_bytes=32 << 20)
    assert small.bytes_total >= 200 * 10**6 and small.exceeds_llc
    large = measure.copies_for_cold(1 << 20, llc_bytes=128 << 20)
    assert large.bytes_total >= 256 << 20
    capped = measure.copies_for_cold(1 << 20, llc_bytes=480 << 20, cap_bytes=300 << 20)
    assert capped.bytes_total == 300 << 20 and capped.exceeds_llc is False
    assert measure.copies_for_cold(1 << 30).copies >= 2
    kept = record(weights=small).cold
    assert kept is not None and kept["exceeds_llc"] is True and kept["copies"] == small.copies


def test_noise_times_the_baseline_twice():
    found = record(noise=True)
    assert found.noise is not None and found.noise >= 0
    assert list(found.timings) == ["dense", "ours"]
    assert record().noise is None


def test_conditions_are_restored():
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    seen: list[object] = []
    look = lambda: seen.append((torch.get_num_threads(), gc.isenabled(), len(os.sched_getaffinity(0))))  # noqa: E731
    found = measure.compare({"look": look}, threads=1, pin=True, clock="thread", **QUICK)
    assert set(seen) == {(1, False, 1)}
    assert (found.threads, found.clock) == (1, "thread")
    assert (torch.get_num_threads(), os.sched_getaffinity(0), gc.isenabled()) == (threads, cores, True)
    with pytest.raises(MeasureError):
        measure.compare({"bad": lambda: 1 / 0}, threads=1, pin=True)
    assert (torch.get_num_threads(), os.sched_getaffinity(0), gc.isenabled()) == (threads, cores, True)


def test_the_thread_clock_does_not_see_sleep():
    found = measure.compare({"sleep": lambda: time.sleep(0.002)}, threads=1, clock="thread", repeats=3, weights="cold")
    assert found.median("sleep") < 0.001


def test_calls_that_the_clock_does_not_see_are_no_endless_calibration():
    """As a sleep is to a clock of processor time that counts in ticks of 10 ms."""
    from twofour.measure import timing

    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.002)

    timing._Runner("x", [call], lambda: 0.0).calibrate(warmup=1)
    assert 2 <= calls <= 110


def test_a_raising_candidate_is_named():
    with pytest.raises(
        MeasureError, match=r"candidate `broken` raised ZeroDivisionError(.|\n)*division by zero"
    ) as caught:
        measure.compare({"fine": work(), "broken": lambda: 1 / 0}, **QUICK)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@in_turn(
    ("options", "message"),
    [
        ({"threads": 2, "clock": "thread"}, r"see one thread only(.|\n)*threads=2(.|\n)*threads=1"),
        ({"threads": 2, "pin": True}, "see one thread only"),
        ({"clock": "sun"}, r"unknown clock(.|\n)*'sun'"),
        ({"weights": "warm"}, r"unknown state of the weights(.|\n)*'warm'"),
        ({"baseline": "theirs"}, r'not among the candidates(.|\n)*\'theirs\'(.|\n)*"dense" or "ours"'),
        ({"repeats": 1}, r"cannot be timed(.|\n)*repeats=1"),
        ({"threads": 0}, r"cannot be timed(.|\n)*threads=0"),
        ({"baseline": None, "noise": True}, r"baseline twice(.|\n)*baseline="),
    ],
)
def test_impossible_requests_are_refused(options, message):
    with pytest.raises(MeasureError, match=message):
        record(**options)


def test_candidates_must_be_callable():
    with pytest.raises(MeasureError, match="nothing to time"):
        measure.compare({})
    with pytest.raises(MeasureError, match="`ours` cannot be called"):
        measure.compare({"ours": []})
    with pytest.raises(MeasureError, match=r"need a size(.|\n)*bytes_each=0"):
        measure.copies_for_cold(0)


def test_records_survive_a_file(tmp_path: Path):
    one, two = record(note="first", meta={"shape": [8, 16], "tokens": 1}), record(noise=True)
    path = tmp_path / "new" / "records.json"
    measure.save([one, two], path)
    assert measure.load(path) == [one, two]
    assert list(path.parent.iterdir()) == [path]
    assert measure.Record.load(one.save(tmp_path / "one.json")) == one
    with pytest.raises(MeasureError, match=r"does not hold one record(.|\n)*2 records"):
        measure.Record.load(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path):
    path = record().save(tmp_path / "r.json")
    before = path.read_text()
    with pytest.raises(MeasureError, match="cannot be written as JSON"):
        record(meta={"bad": object()}).save(path)
    assert path.read_text() == before and list(tmp_path.iterdir()) == [path]


def damage(content: dict, how: str) -> object:
    first = content["records"][0]
    match how:
        case "format":
            content["format"] = "other"
        case "version":
            content["version"] = 99
        case "empty":
            content["records"] = []
        case "unknown":
            first["surprise"] = 1
        case "missing":
            del first["timings"]
        case "negative":
            first["timings"]["dense"]["median"] = -1.0
        case "text":
            first["timings"]["dense"]["median"] = "fast"
        case "unordered":
            first["timings"]["dense"]["lower"] = 1e9
        case "lacks":
            del first["timings"]["dense"]["calls"]
        case "baseline":
            first["baseline"] = ["nobody"]
        case "type":
            first["threads"] = "two"
        case "list":
            return [content]
    return content


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("format", "not a file of records"),
        ("version", "not a file of records"),
        ("list", "not a file of records"),
        ("empty", "not a filled list"),
        ("unknown", "unknown fields"),
        ("missing", "lacks fields"),
        ("negative", "not a positive number"),
        ("text", "not a positive number"),
        ("unordered", "not ordered"),
        ("lacks", "lacks fields"),
        ("baseline", "has no timing"),
        ("type", "wrong type"),
    ],
)
def test_malformed_records_are_refused(tmp_path: Path, how, message):
    path = record().save(tmp_path / "r.json")
    path.write_text(json.dumps(damage(json.loads(path.read_text()), how)))
    with pytest.raises(MeasureError, match=message):
        measure.load(path)


def test_a_truncated_or_missing_file_is_refused(tmp_path: Path):
    path = record().save(tmp_path / "r.json")
    path.write_text(path.read_text()[:-40])
    with pytest.raises(MeasureError, match="cannot be read as records"):
        measure.load(path)
    with pytest.raises(MeasureError, match=r"cannot be read as records(.|\n)*FileNotFoundError"):
        measure.load(tmp_path / "none.json")


def test_the_machine_is_described():
    found = measure.machine()
    assert found["cpu"] and found["memory"] and found["cores"]
    assert found["software"]["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert max(found["caches"].values()) == measure.last_level_cache_bytes()
    json.dumps(found)


def test_the_load_of_the_machine_is_kept():
    assert record().load_average is not None


def test_geometric_mean():
    assert measure.geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    with pytest.raises(MeasureError, match="positive ratios"):
        measure.geometric_mean([])
