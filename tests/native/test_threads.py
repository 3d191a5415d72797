"""Native calls from several threads at once, and by teams of threads, answer as a call alone does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("thread_cases.py")


def test_every_row_answers_the_same_from_many_threads_at_once() -> None:
    run = subprocess.run([sys.executable, str(CASES)], capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    found = re.search(r"(\d+) calls by 4 threads, (\d+) by a team", run.stdout)
    assert found and int(found[1]) >= 80 and int(found[2]) >= 60, run.stdout
