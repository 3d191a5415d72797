"""`make fuzz`: feeds each target inputs for a stated time, keeps a small corpus of outcomes, and writes records.

    python -m tests.fuzz.run --seconds 60 --target load --target read --record

Each target runs in a process of its own (`drive.py`), which an input may kill: it is kept, and another goes on. atheris
chooses inputs by the branches they take. Under the sanitizers' build of the native part, whose runtime takes its
counters away, inputs are those that a plain run found, changed at random. Findings stay in build/fuzz/TARGET/found.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CORPUS, RECORDS = HERE / "corpus", HERE / "records"
WORK = Path("build/fuzz")
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
DEATHS = 50
"""Inputs that may kill a target's process before it is given up."""


def main() -> None:
    """Run what is asked for; the exit code is 1 when there are findings."""
    from tests.fuzz.targets import TARGETS, YOUNG

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--target", action="append", choices=(*TARGETS, *YOUNG), help="default: all")
    options.add_argument("--seconds", type=float, default=60, help="for each target")
    options.add_argument("--inputs", type=int, default=1 << 62, help="for each target at most")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--jobs", type=int, default=1, help="targets that run at a time")
    options.add_argument("--blind", action="store_true", default=SANITIZED, help="without atheris")
    options.add_argument("--record", action="store_true", help="keep a record and the corpus in git")
    options.add_argument("--child", help=argparse.SUPPRESS)
    given = options.parse_args()
    logging.getLogger("twofour.streaming").setLevel(logging.ERROR)  # a warning for each damaged journal of thousands
    if given.child:
        _child(given)
        return
    with ThreadPoolExecutor(given.jobs) as pool:
        found = list(pool.map(lambda name: _fuzz(name, given), given.target or (*TARGETS, *YOUNG)))
    sys.exit(any(record["findings"] for record in found))


def _child(given: argparse.Namespace) -> None:
    from tests.fuzz import drive

    (name,) = given.target
    corpus = WORK / name / "corpus"
    drive_one = drive.blind if given.blind else drive.guided
    drive_one(name, Path(given.child), corpus, given.seconds, given.inputs, given.seed)


def _fuzz(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Run one target until its time or its inputs are used up; return its record."""
    _prepare(name)
    total: dict[str, Any] = {"inputs": 0, "seconds": 0.0, "processor_seconds": 0.0, "slowest": 0.0}
    outcomes: Counter[str] = Counter()
    findings: dict[str, dict[str, Any]] = {}
    until, deaths = time.perf_counter() + given.seconds, 0
    while time.perf_counter() < until and total["inputs"] < given.inputs and deaths < DEATHS:
        left = until - time.perf_counter(), given.inputs - total["inputs"], given.seed + deaths
        found, death = _run_child(name, given, *left)
        for key in ("inputs", "seconds", "processor_seconds"):
            total[key] += found[key]
        total["slowest"] = max(total["slowest"], found["slowest"])
        outcomes.update(found["outcomes"])
        for finding in (found["findings"], death):
            for what, of in finding.items():
                findings.setdefault(what, {**of, "count": 0})["count"] += of["count"]
        deaths += bool(death)
    rate = total["inputs"] / max(total["processor_seconds"], 1e-9)
    record = {
        "kind": "fuzz",
        "target": name,
        **{key: round(value, 2) for key, value in total.items()},
        "inputs_per_processor_second": round(rate),
        "sanitized": SANITIZED,
        "guided": not given.blind,
        "findings": findings,
        "outcomes": dict(sorted(outcomes.items())),
        "seed": given.seed,
    }
    print(_summary(record), flush=True)
    _store(name, findings)
    if given.record:
        _record(name, record)
    return record


def _run_child(
    name: str, given: argparse.Namespace, seconds: float, inputs: int, seed: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a process of the target; return what it counted, and the input that killed it if one did."""
    from tests.fuzz.drive import last_input

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.fuzz.run", "--child", folder, "--target", name, "--seed", str(seed)]
        command += ["--seconds", str(seconds), "--inputs", str(inputs), *(["--blind"] if given.blind else [])]
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        counted = Path(folder) / "outcomes.json"
        if ended.returncode and not (Path(folder) / "input.bin").exists():
            sys.exit(f"{name} does not start:\n{ended.stderr[-4000:]}")
        none = {"inputs": 0, "seconds": 0.0, "processor_seconds": 0.0, "slowest": 0.0, "outcomes": {}, "findings": {}}
        found = json.loads(counted.read_text()) if counted.exists() else none
        if not ended.returncode:
            return found, {}
        (WORK / name / "death.txt").write_text(ended.stderr[-20000:])
        data = last_input(Path(folder))
        return found, {_cause(ended): {"count": 1, "message": ended.stderr[-300:], "input": data.hex()}}


def _cause(ended: subprocess.CompletedProcess[str]) -> str:
    """Say what a process died of: the sanitizer's line, libFuzzer's, or its exit code."""
    lines = ended.stderr.splitlines()
    said = [line for line in lines if "SUMMARY:" in line or "runtime error:" in line]
    return f"killed: {said[0][:160]}" if said else f"killed: exit code {ended.returncode}"


def _prepare(name: str) -> None:
    """Make the folder a run works in: seeds, the corpus in git, and what earlier runs found."""
    from tests.fuzz.targets import target

    folder = WORK / name / "corpus"
    folder.mkdir(parents=True, exist_ok=True)
    (WORK / name / "found").mkdir(exist_ok=True)
    kept = [entry.read_bytes() for entry in (CORPUS / name).glob("*")]
    for data in (*target(name).SEEDS, *kept):
        (folder / hashlib.sha1(data).hexdigest()).write_bytes(data)


def _summary(record: dict[str, Any]) -> str:
    lines = [
        f"{record['target']:12} {record['inputs']:9} inputs, {record['seconds']:6.0f} s, "
        f"{record['inputs_per_processor_second']:6} a second of one core, slowest {record['slowest']:.2f} s, "
        f"{len(record['outcomes'])} outcomes, {len(record['findings'])} findings"
    ]
    lines += [f"  {of['count']} x {what}: {of['message']!r:.160}" for what, of in record["findings"].items()]
    return "\n".join(lines)


def _store(name: str, findings: dict[str, dict[str, Any]]) -> None:
    for of in findings.values():
        data = bytes.fromhex(of["input"])
        (WORK / name / "found" / hashlib.sha1(data).hexdigest()[:12]).write_bytes(data)


def _record(name: str, record: dict[str, Any]) -> None:
    import importlib.metadata

    from twofour import measure

    if not SANITIZED:
        record["corpus"] = _keep(name, record)
    versions = {} if record["guided"] is False else {"atheris": importlib.metadata.version("atheris")}
    file = RECORDS / f"{name}{'-sanitized' if SANITIZED else ''}.json"
    measure.write_json(file, {**record, **versions, "machine": measure.machine()})


def _keep(name: str, record: dict[str, Any]) -> int:
    """Keep the shortest input of each outcome in git, beside those of faults, which stay; return how many there are."""
    from tests.fuzz.targets import judge, target

    module, folder = target(name), CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    inputs = [entry.read_bytes() for entry in sorted((WORK / name / "corpus").iterdir())]
    deadly = {of["input"] for of in record["findings"].values()}
    kept: dict[str, bytes] = {}
    for data in sorted((data for data in inputs if data.hex() not in deadly), key=lambda data: (len(data), data)):
        if len(kept) < len(record["outcomes"]):
            try:
                kept.setdefault(judge(module, data), data)
            except Exception:  # a finding, which the record tells of
                continue
    for entry in folder.glob("outcome-*"):
        entry.unlink()
    for outcome, data in kept.items():
        (folder / f"outcome-{outcome}").write_bytes(data)
    return len(list(folder.iterdir()))


if __name__ == "__main__":
    main()
