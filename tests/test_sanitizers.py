"""The records of the sanitizers in git: nothing failed, nothing was found, and every test of native code ran."""

import json
import re
from pathlib import Path

import pytest

from tests.native.sanitize import RECORDS, files
from tests.test_architecture import ROOT

NATIVE_TESTS = re.findall(r"^NATIVE_TESTS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()


@pytest.mark.parametrize("path", sorted(RECORDS.glob("*.json")), ids=lambda path: path.stem)
def test_nothing_failed_and_nothing_was_found(path: Path) -> None:
    for part, found in json.loads(path.read_text())["parts"].items():
        assert (found["exit_code"], found["failed"], found["error"], found["findings"]) == (0, 0, 0, {}), part


def test_every_native_test_ran_under_the_address_sanitizer() -> None:
    parts = json.loads((RECORDS / "sanitize-address-undefined.json").read_text())["parts"]
    wanted = {str(Path(name).relative_to(ROOT)) for name in files([str(ROOT / name) for name in NATIVE_TESTS])}
    assert not wanted - set(parts)
