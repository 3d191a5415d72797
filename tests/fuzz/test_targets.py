"""Every target of the fuzzer: its seeds are good, and what faults left in its corpus stays mended."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.forked import status_of
from tests.fuzz import drive
from tests.fuzz.targets import TARGETS, judge, target
from twofour.errors import KernelError

CORPUS = Path(__file__).parent / "corpus"

pytestmark = pytest.mark.filterwarnings("default")  # torch's, of what files name


@pytest.fixture(params=TARGETS)
def module(request: pytest.FixtureRequest) -> Any:
    if request.param == "onnx":
        pytest.importorskip("onnx", reason="the extra [onnx] is not installed")
    return target(request.param)


def test_seeds_are_good(module: Any) -> None:
    for seed in module.SEEDS:
        assert isinstance(module.run(module.build(seed)), str)


def test_the_corpus_is_refused_with_reasons_or_read_rightly(module: Any) -> None:
    name = module.__name__.rpartition(".")[2]
    found = {judge(module, entry.read_bytes()) for entry in sorted((CORPUS / name).iterdir())}
    outcomes = len(list((CORPUS / name).glob("outcome-*")))
    assert len(found) >= outcomes / 2, f"{outcomes} outcomes were kept, {sorted(found)} are left"


@pytest.mark.parametrize("inputs", [100, pytest.param(400, marks=pytest.mark.long)])
def test_inputs_at_random_are_refused_with_reasons_or_read_rightly(module: Any, inputs: int) -> None:
    draw, known = random.Random(module.__name__), list(module.SEEDS)
    for _ in range(inputs):
        data = drive.mutated(draw, known)
        judge(module, data)
        known.append(data)  # damage on damage


def test_what_is_no_error_of_ours_or_says_too_little_is_a_finding() -> None:
    class Broken:
        build = staticmethod(bytes)

        @staticmethod
        def run(built: bytes) -> str:
            raise KeyError("raw") if built else KernelError("what alone")

    with pytest.raises(KeyError, match="raw"):
        judge(Broken, b"x")
    with pytest.raises(AssertionError, match="what alone"):
        judge(Broken, b"")


def test_an_input_that_does_not_end_ends_its_process_and_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Endless:
        build = staticmethod(bytes)

        @staticmethod
        def run(built: bytes) -> str:
            while built:
                pass
            return "good"

    monkeypatch.setattr(drive, "HANGS", 0.2)

    def fed() -> None:
        tally = drive.Tally(Endless, tmp_path, seconds=60, inputs=9)
        tally.one(b"")
        tally.one(b"for ever")

    assert status_of(fed) == -signal.SIGPROF
    assert drive.last_input(tmp_path) == b"for ever"
