"""Which model is kept, and what is said of the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.report.runs import timing
from twofour.errors import OptimizeError
from twofour.measure import Record
from twofour.optimizing.outcome import Tried, choose, verdict_of
from twofour.report import Score


def tried(name: str, seconds: float, value: float, sparse: bool = True) -> Tried:
    return Tried(name, sparse, Score(name, value), seconds, 1000)


FLOAT, INT8, DENSE = tried("float", 2e-3, 99.8), tried("int8", 1e-3, 97.0), tried("dense", 3e-3, 100.0, sparse=False)
REFUSED = Tried("bfloat16", False, refused="no kernel")


def test_the_fastest_whose_quality_holds_is_kept() -> None:
    choice = choose([FLOAT, INT8, DENSE, REFUSED], 99.5)
    assert (choice.kept, choice.held) == ("float", True)
    assert choice.reasons["float"] == "kept: the fastest whose quality holds; 2.00 ms, quality 99.80"
    assert choice.reasons["int8"].startswith("its quality does not hold: 97.00, at least 99.50 was wanted")
    assert choice.reasons["dense"].startswith("slower than the one that is kept, by 50%")
    assert choice.reasons["bfloat16"] == "not compiled: no kernel"
    assert choose([FLOAT, INT8, DENSE], None).kept == "int8"


def test_where_none_was_timed_it_is_said_of_each() -> None:
    with pytest.raises(OptimizeError, match="no model was timed") as failure:
        choose([REFUSED, Tried("untimed", True)], None)
    assert "bfloat16: no kernel" in str(failure.value) and "untimed: not judged" in str(failure.value)


def test_dense_is_kept_where_nothing_sparse_holds() -> None:
    assert choose([FLOAT, INT8, DENSE], 99.9).kept == "dense"


def test_of_equal_times_the_better_quality_is_kept() -> None:
    near = tried("near", 1.01e-3, 99.0)
    choice = choose([near, tried("fast", 1e-3, 98.0)], None)
    assert choice.kept == "near"
    assert choice.reasons["fast"].startswith("as fast as the one that is kept, of no better quality")


def test_without_a_limit_quality_is_given_for_time_that_was_won_alone() -> None:
    dense, sparse = tried("dense", 1.04e-3, 100.0, sparse=False), tried("2:4", 1e-3, 60.0)
    assert choose([sparse, dense], None).kept == "dense", "4 % are the machine's"
    dense = replace(dense, seconds=1.2e-3)
    choice = choose([sparse, dense], None)
    assert choice.kept == "2:4" and choice.reasons["2:4"].startswith("kept: the fastest;")
    slow, int8 = replace(dense, seconds=5e-3), tried("int8", 1e-3, 99.99)
    assert choose([slow, int8], None).kept == "int8", "five times as fast for 0.01 points, whatever a runtime takes"


def test_the_best_quality_is_said_of_the_best_alone() -> None:
    """It was said of a model beside a better one, which was slower."""
    dense, sparse = tried("dense", 1.04e-3, 100.0, sparse=False), tried("2:4", 1e-3, 60.0)
    choice = choose([sparse, dense], None)
    assert choice.reasons["dense"].startswith("kept: the best quality, and no model of less wins time worth it")
    assert choice.reasons["2:4"].startswith("faster by 4%, which its quality is not worth")
    choice = choose([replace(dense, seconds=1.1e-3), tried("int8", 1.04e-3, 99.9), sparse], None)
    assert choice.reasons["int8"].startswith("kept: the best quality among those within 5% of the fastest, and no")


def test_where_none_holds_the_best_is_kept_and_it_is_said() -> None:
    choice = choose([FLOAT, INT8], 99.9)
    assert (choice.kept, choice.held) == ("float", False)
    assert choice.reasons["float"].startswith("kept: no model's quality holds")


@pytest.mark.parametrize(
    ("seconds", "sparse", "held", "words"),
    [
        (1e-3, True, True, "2.00 times as fast as OpenVINO"),
        (4e-3, True, True, "OpenVINO is faster on this machine: nothing was won in time"),
        (1e-3, False, True, "Nothing sparse was faster"),
        (1e-3, True, False, "No model stays within 0.5 points"),
    ],
)
def test_the_verdict_is_honest(seconds: float, sparse: bool, held: bool, words: str) -> None:
    times = {"torch eager": timing(5e-3), "OpenVINO": timing(2e-3), "ours": timing(seconds)}
    kept = tried("ours", seconds, 99.0, sparse)
    record = Record(times, ("torch eager", "OpenVINO"))
    verdict, figures = verdict_of(record, kept, Score("dense", 100.0), held, 0.5, "ours")
    assert words in verdict and "1.00 points below the dense model's" in verdict
    assert figures[0][:2] == ("times as fast", f"{2e-3 / seconds:.2f}x") and len(figures) == 4


def test_the_verdict_says_that_the_machine_was_busy() -> None:
    kept, machine = tried("ours", 1e-3, 99.0), {"cores_allowed": 2}
    record = Record({"torch eager": timing(5e-3), "ours": timing(1e-3)}, ("torch eager",), machine=machine)

    def said(**changed: Any) -> str:
        return verdict_of(replace(record, **changed), kept, Score("dense", 100.0), True, 0.5, "ours")[0]

    assert all("busy" not in said(load_average=load) for load in (None, 0.5, 3.9))
    assert "busy" not in said(load_average=8.5, machine={"cores_allowed": None})
    assert "8.5 processes wanted to run on 2 processors" in said(load_average=8.5)
    assert "--threads" not in said(load_average=8.5)
    assert "--threads 1: 2 threads wait for each other" in said(load_average=8.5, threads=2)
