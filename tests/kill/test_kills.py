"""A few kills of each kind of run; `make kill` makes two hundred of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kill.targets import TARGETS


@pytest.mark.long
def test_killed_runs_lose_nothing_and_end_as_if_nothing_had_happened(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra [text] is not installed")
    command = [sys.executable, "-m", "tests.kill.run", "--kills", "2", "--runs", "1", "--signals", "SIGKILL"]
    command += ["--records", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert set(found) == {"prune", "replace", "save", "shards", "finetune", "experiments"}
    for record in found.values():
        counts = record["SIGKILL"]
        assert counts["found_old"] + counts["found_new"] == counts["kills"] == 2


RECORDS = sorted((Path(__file__).parent / "records").glob("*.json"))


def test_every_kind_of_run_has_a_record() -> None:
    assert [path.stem for path in RECORDS] == sorted(TARGETS)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_holds_a_hundred_kills_by_either_signal_and_no_failure(path: Path) -> None:
    record = json.loads(path.read_text())
    for kind in ("SIGKILL", "SIGTERM"):
        counts = record[kind]
        assert counts["found_old"] + counts["found_new"] == counts["kills"] >= 100
        assert counts["failures"] == []
