"""`make sanitize` and `make sanitize-threads`: tests under a sanitizer, and the record of what ran and what was found.

    python tests/native/sanitize.py tests/native tests/kernels

Each file of tests is a part, a process of pytest, which a sanitizer may end. What the sanitizers say is read from files
of their own, so that what children of the tests do is heard too. A part that runs again takes the place of its last run
in the record, and one whose file is gone leaves it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).with_name("records")
KINDS = {"libasan": "address,undefined", "libtsan": "thread"}
TOLD = re.compile(r"SUMMARY: .*|\S+ runtime error: .*")


def main(parts: list[str]) -> None:
    """Run the parts and keep the record after each; the exit code is 1 where one failed or something was found."""
    from twofour import measure

    kinds = [kind for library, kind in KINDS.items() if library in os.environ.get("LD_PRELOAD", "")]
    if len(kinds) != 1:
        sys.exit("no sanitizer is preloaded: `make sanitize` or `make sanitize-threads`")
    file = RECORDS / f"sanitize-{kinds[0].replace(',', '-')}.json"
    kept = json.loads(file.read_text())["parts"] if file.exists() else {}
    kept = {part: found for part, found in kept.items() if Path(part).is_file()}
    failed = False
    for part in files(parts):
        found = ran(part)
        failed |= bool(found["exit_code"] or found["findings"])
        print(part, json.dumps(found), flush=True)
        machine = measure.machine()
        kept[part] = {**found, "commit": commit()}
        content = {"kind": "sanitize", "sanitizers": kinds[0], "parts": dict(sorted(kept.items())), "machine": machine}
        measure.write_json(file, content)
    sys.exit(failed)


def files(parts: list[str]) -> list[str]:
    """Return the test files of the parts, those in folders too."""
    listed = [sorted(Path(part).rglob("test_*.py")) if Path(part).is_dir() else [Path(part)] for part in parts]
    return [str(file) for group in listed for file in group]


def commit() -> str:
    """Return the commit of the checkout that the sanitized package was copied from, "+" where files differ from it."""
    git = ["git", "-C", str(RECORDS), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def ran(part: str) -> dict[str, Any]:
    """Run the tests of a part; return how many passed, were skipped and failed, and each finding with its count."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        for name in ("ASAN_OPTIONS", "UBSAN_OPTIONS", "TSAN_OPTIONS"):
            given = [environment[name]] if name in environment else []
            environment[name] = ":".join([*given, f"log_path={folder}/{name}"])
        command = [sys.executable, "-m", "pytest", "-q", "-rf", "--capture=sys", "-p", "no:cacheprovider", part]
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
        told = [entry.read_text(errors="replace") for entry in Path(folder).iterdir()]
    told += (
        [ended.stderr] if "runtime error:" in ended.stderr else []
    )  # GCC's undefined-behaviour runtime writes nowhere else
    if ended.returncode or told:
        print(*told, ended.stdout[-6000:], ended.stderr[-2000:], sep="\n")
    last = ended.stdout.strip().splitlines()[-1:]
    counts = {what: int(count) for count, what in re.findall(r"(\d+) ([a-z]+?)s?\b", "".join(last).split(" in ")[0])}
    return {
        **{what: counts.get(what, 0) for what in ("passed", "skipped", "failed", "error")},
        "seconds": round(time.perf_counter() - begin, 1),
        "exit_code": ended.returncode,
        "findings": dict(Counter(line[:200] for report in told for line in TOLD.findall(report))),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
