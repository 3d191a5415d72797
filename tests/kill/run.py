"""`make kill`: runs that write files are killed at random moments, and the folder is looked at after each.

    python -m tests.kill.run --kills 100 --records tests/kill/records

A warm process, which has imported everything, forks one child a run. The child is killed at a moment drawn evenly from
the time that such a run takes; one that ended before is run again. Then: the user's files are as they were; a reader
finds the old result or the new one, whole; the same work ends with the result of a run that nothing interrupted; and
nothing but that result and the user's files is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.kill.targets import TARGETS, Target, single_threaded


def main() -> None:
    """Kill each target by each signal and write one record a target."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--targets", default=",".join(TARGETS))
    options.add_argument("--signals", default="SIGKILL,SIGTERM")
    options.add_argument("--kills", type=int, default=100)
    options.add_argument("--runs", type=int, default=5, help="Runs without a kill, for their time and result.")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--records", type=Path, help="Folder for one JSON file a target.")
    given = options.parse_args()
    single_threaded()
    failed = 0
    for name in given.targets.split(","):
        with tempfile.TemporaryDirectory(prefix="twofour-kill-") as place:
            target = TARGETS[name]()
            (Path(place) / "shelf").mkdir()
            target.prepare(Path(place) / "shelf")
            begin = time.perf_counter()
            found = {
                kind: killed(target, Path(place), kind, given.kills, given.seed, given.runs)
                for kind in _signals(given.signals)
            }
            seconds = round(time.perf_counter() - begin, 1)
        report = {
            "target": name,
            "what": (target.__doc__ or "").strip(),
            "seed": given.seed,
            "seconds": seconds,
            **found,
        }
        print(json.dumps(report, indent=1), flush=True)
        failed += sum(len(counts["failures"]) for counts in found.values())
        if given.records:
            from twofour import measure

            measure.write_json(given.records / f"{name}.json", {"kind": "kill", **report, "machine": measure.machine()})
    sys.exit(bool(failed))


def _signals(text: str) -> list[str]:
    return text.split(",")


def killed(target: Target, place: Path, kind: str, kills: int, seed: int, runs: int) -> dict[str, object]:
    """Return what came of so many kills by one signal."""
    moments = random.Random(f"{seed} {target.name} {kind}")
    wanted, whole = _uninterrupted(target, place / f"{kind}-whole", runs)
    counts: Counter[str] = Counter()
    failures: list[str] = []
    late, at = 0, []
    while counts["old"] + counts["new"] + len(failures) < kills:
        folder = place / f"{kind}-trial"
        share = moments.random()
        try:
            found = _trial(target, folder, signal.Signals[kind], share * whole, wanted)
        except Exception:
            said = traceback.format_exc(chain=False)
            failures.append(f"{share:.4f} of {whole:.3f} s: {said[-1500:]}")
            found = "failed"
        if found == "late":
            late += 1
        else:
            counts[found] += 1
            at.append(share)
        shutil.rmtree(folder)
    return {
        "kills": kills,
        "seconds_of_a_run": round(whole, 4),
        "moments": [round(share, 3) for share in (min(at), sorted(at)[len(at) // 2], max(at))],
        "found_old": counts["old"],
        "found_new": counts["new"],
        "ended_before_the_kill": late,
        "failures": failures,
    }


def _uninterrupted(target: Target, folder: Path, runs: int) -> tuple[object, float]:
    """Return the result of a run that ended, and the median time of so many."""
    seconds = []
    for number in range(runs):
        one = folder / str(number)
        one.mkdir(parents=True)
        target.begin(one)
        planted = _planted(target, one, killed=False)
        begin = time.perf_counter()
        assert os.waitstatus_to_exitcode(os.waitpid(_started(target, one), 0)[1]) == 0, _said(one)
        seconds.append(time.perf_counter() - begin)
        wanted = target.result(one)
        _require_tidy(target, one, planted)
    return wanted, sorted(seconds)[runs // 2]


def _trial(target: Target, folder: Path, kind: signal.Signals, delay: float, wanted: object) -> str:
    """Kill one run and go on with it; return "old", "new", or "late" for a run that ended before."""
    folder.mkdir(parents=True)
    target.begin(folder)
    planted = _planted(target, folder, killed=False)
    child = _started(target, folder)
    time.sleep(delay)
    os.kill(child, kind)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != -kind:
        assert status == 0, _said(folder)
        return "late"
    found = target.require_whole(folder)
    _require_planted(planted)
    planted |= _planted(target, folder, killed=True)
    status = os.waitstatus_to_exitcode(os.waitpid(_started(target, folder), 0)[1])
    assert status == 0, _said(folder)
    assert target.result(folder) == wanted, "another result than that of a run that nothing interrupted"
    _require_tidy(target, folder, planted)
    return found


def _started(target: Target, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.chdir(folder)
        target.work(folder)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _said(folder: Path) -> str:
    """Return what a run said before it failed, and the end of its traceback."""
    said, _, trace = (folder / "log").read_text().partition("Traceback")
    return f"{said[-700:]} ... {trace[-300:]}"


def _planted(target: Target, folder: Path, killed: bool) -> dict[Path, bytes]:
    found = target.plant(folder, killed)
    for path, content in found.items():
        path.write_bytes(content)
    return found


def _require_planted(planted: dict[Path, bytes]) -> None:
    for path, content in planted.items():
        assert path.read_bytes() == content, f"{path} is not as the user left it"


def _require_tidy(target: Target, folder: Path, planted: dict[Path, bytes]) -> None:
    """The result, the user's files wherever their folder went, and nothing else."""
    moved = {path: Path(str(path).replace("out.unfinished", "out")) for path in planted}
    _require_planted({moved[path]: content for path, content in planted.items()})
    mine = {path.relative_to(folder).as_posix() for path in moved.values()} | {"log"}
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    assert found - mine == target.belongs(folder) - mine, f"left over: {sorted(found - mine - target.belongs(folder))}"
    assert not list(folder.glob("*.unfinished")) and not list(folder.glob(".*")), "a folder was left over"


if __name__ == "__main__":
    main()
