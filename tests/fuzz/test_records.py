"""The records of long runs in git: every target, plain and under the sanitizers, without a finding."""

import json
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

RECORDS = Path(__file__).with_name("records")
LEAST = {"": 1_000_000, "-sanitized": 100_000}


def test_no_record_is_of_a_target_that_is_gone():
    names = {f"{target}{kind}" for target in TARGETS for kind in LEAST}
    assert {path.stem for path in RECORDS.glob("*.json")} == names


@pytest.mark.parametrize("kind", LEAST, ids=["plain", "sanitized"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_target_ran_for_long_and_found_nothing(target, kind):
    record = json.loads((RECORDS / f"{target}{kind}.json").read_text())
    assert record["target"] == target and record["sanitized"] is bool(kind)
    assert record["inputs"] >= LEAST[kind] and not record["findings"]
