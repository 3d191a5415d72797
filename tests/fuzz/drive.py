"""One process that feeds inputs to a target: led by coverage, or blind where sanitizers have taken its counters.

What came of the inputs goes to `outcomes.json` of a folder each second, the input at hand to `input.bin`, so that the
process may die of one.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from types import FunctionType
from typing import Any

LONGEST = 64
"""Bytes of choices in an input."""

SLOW = 2.0
"""Processor seconds from which an input is a finding."""

HANGS = 20
"""Processor seconds after which an input ends the process: another program's work is no fault of an input's."""

WAITS = 600
"""Seconds after which one does that only waits."""


class Tally:
    """Counts what came of the inputs, keeps one of each finding, and ends the process when enough is done."""

    def __init__(self, module: Any, folder: Path, seconds: float, inputs: int) -> None:
        import torch

        from tests.fuzz.targets import judge

        torch.set_num_threads(1)
        self.module, self.folder, self.judge = module, folder, judge
        self.outcomes: Counter[str] = Counter()
        self.findings: dict[str, dict[str, Any]] = {}
        self.inputs, self.most = 0, inputs
        self.start, self.until = time.perf_counter(), time.perf_counter() + seconds
        self.used, self.slowest = time.process_time(), 0.0
        self.written = self.start
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        self.shared = _shared(folder / "input.bin", LONGEST + 1)

    def one(self, data: bytes) -> str | None:
        """Judge an input; return its outcome, None for a finding."""
        data = data[:LONGEST]
        self.shared[: len(data) + 1] = bytes([len(data)]) + data
        signal.setitimer(signal.ITIMER_PROF, HANGS)
        before = time.process_time()
        try:
            found = self.judge(self.module, data)
            self.outcomes[found] += 1
        except Exception as error:  # whatever it is, it is kept and the next input follows
            found = None
            self._keep(_place(error), data, str(error)[:200])
        seconds = time.process_time() - before
        if found is not None and seconds > max(SLOW, self.slowest):
            seconds = min(seconds, self._again(data))  # once may be the collector's work, or a cache's
        if seconds > max(SLOW, self.slowest):
            self._keep("slow", data, f"{seconds:.1f} s of the processor's time")
        self.slowest = max(self.slowest, seconds)
        self.inputs += 1
        self._report(self.inputs >= self.most)
        return found

    def _again(self, data: bytes) -> float:
        """Return the seconds that an input takes when it is judged once more."""
        before = time.process_time()
        self.judge(self.module, data)
        return time.process_time() - before

    def _keep(self, what: str, data: bytes, message: str = "") -> None:
        first = self.findings.setdefault(what, {"count": 0, "message": message, "input": data.hex()})
        first["count"] += 1

    def _report(self, last: bool) -> None:
        if not last and self.inputs % 64:
            return
        now = time.perf_counter()
        last = last or now > self.until
        if not last and now < self.written + 1:
            return
        self.written = now
        found = {
            "inputs": self.inputs,
            "seconds": now - self.start,
            "processor_seconds": time.process_time() - self.used,
            "slowest": self.slowest,
            "outcomes": self.outcomes,
            "findings": self.findings,
        }
        temporary = self.folder / "outcomes.tmp"
        temporary.write_text(json.dumps(found))
        temporary.replace(self.folder / "outcomes.json")
        if last:
            sys.stderr.flush()
            os._exit(0)


def last_input(folder: Path) -> bytes:
    """Return the input that a process of this folder was at when it died."""
    whole = (folder / "input.bin").read_bytes()
    return whole[1 : 1 + whole[0]]


def guided(name: str, folder: Path, corpus: Path, seconds: float, inputs: int, seed: int) -> None:
    """Let atheris choose inputs by the branches they take; what takes new ones stays in the folder `corpus`."""
    import atheris

    from tests.fuzz.targets import target

    module = target(name)
    _warm(module)
    # Not by atheris' hook on imports, which the loader of an editable installation evades.
    ours = [one for one in gc.get_objects() if type(one) is FunctionType]
    for function in ours:
        if (function.__module__ or "").startswith(module.TRACED):
            atheris.instrument_func(function)
    tally = Tally(module, folder, seconds, inputs)
    flags = [f"-seed={seed}", f"-max_len={LONGEST}", "-len_control=0", "-reload=0", "-rss_limit_mb=4000"]
    flags += [f"-timeout={WAITS}", "-print_final_stats=0", "-verbosity=0", f"-artifact_prefix={folder}/"]

    def one(data: bytes) -> None:
        tally.one(data)

    atheris.Setup([sys.argv[0], *flags, str(corpus)], one)
    atheris.Fuzz()


def blind(name: str, folder: Path, corpus: Path, seconds: float, inputs: int, seed: int) -> None:
    """Change inputs of the folder `corpus` at random; one with an outcome that none had yet joins them."""
    from tests.fuzz.targets import target

    module = target(name)
    _warm(module)
    tally = Tally(module, folder, seconds, inputs)
    draw = random.Random(seed)
    known = [entry.read_bytes()[:LONGEST] for entry in sorted(corpus.iterdir())]
    for data in known:
        tally.one(data)
    known, seen = known or [b""], set(tally.outcomes)
    while True:
        data = mutated(draw, known)
        signal.setitimer(signal.ITIMER_REAL, WAITS)
        found = tally.one(data)
        if found is not None and found not in seen:
            seen.add(found)
            known.append(data)


def _warm(module: Any) -> None:
    """Import what is imported when it is needed, so that no input pays for it."""
    for seed in module.SEEDS:
        module.run(module.build(seed))


def mutated(draw: random.Random, known: list[bytes]) -> bytes:
    """Return one of the known inputs with a few bytes changed, put in, taken out, or taken from another."""
    data = bytearray(draw.choice(known))
    for _ in range(1 + draw.getrandbits(2)):
        action, place = draw.getrandbits(2), draw.randrange(len(data) + 1)
        if action == 0:
            data[place : place + 1] = bytes([draw.getrandbits(8)])
        elif action == 1:
            data[place:place] = draw.randbytes(1 + draw.getrandbits(2))
        elif action == 2:
            del data[place : place + 1 + draw.getrandbits(2)]
        else:
            data[place:] = draw.choice(known)[place:]
    return bytes(data[:LONGEST])


def _place(error: Exception) -> str:
    """Name a finding by its kind and the last place in our own code, so that each is kept once."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "site-packages" not in frame.filename and "/lib/" not in frame.filename]
    where = (ours or frames)[-1]
    return f"{type(error).__name__} at {'/'.join(Path(where.filename).parts[-2:])}:{where.lineno} in {where.name}"


def _shared(path: Path, size: int) -> mmap.mmap:
    """Map a file whose content outlives the process."""
    path.write_bytes(bytes(size))
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), size)
