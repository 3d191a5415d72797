"""`make fuzz`: atheris drives the loader; keeps a small corpus and a record.

    python -m tests.fuzz.run --seconds 600 --record tests/fuzz/records/loader.json

Coverage is of the Python that reads files and packed weights. Under the sanitizers' build of the native part (the
second run of `make fuzz`) reads and writes out of bounds end the run; their runtime defines the counters that coverage
is told by, so the fuzzer is blind there. An input that fails is left in the folder of --artifacts.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
LARGEST_CORPUS = 80
"""Inputs that are kept in git."""


def main() -> None:
    """Fuzz in a child, which a finding ends, and write what came of it."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=int, default=600)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--record", type=Path)
    options.add_argument("--artifacts", type=Path, default=Path("build/fuzz"))
    options.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.child:
        _fuzz(given.child, given.seconds, given.seed, given.artifacts)
        return
    given.artifacts.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.fuzz.run", "--child", folder, "--seconds", str(given.seconds)]
        command += ["--seed", str(given.seed), "--artifacts", str(given.artifacts)]
        start = time.perf_counter()
        ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        seconds = time.perf_counter() - start
        sys.stderr.write(ended.stderr[-8000:])
        counts = json.loads((Path(folder) / "outcomes.json").read_text())
        kept = _keep(Path(folder) / "corpus")
    found = {
        "seconds": round(seconds, 1),
        "inputs": sum(counts.values()),
        "crashes": int(ended.returncode != 0 and "AddressSanitizer" not in ended.stderr),
        "out_of_bounds": ended.stderr.count("ERROR: AddressSanitizer"),
        "undefined": ended.stderr.count("runtime error:"),
        "sanitized": "libasan" in os.environ.get("LD_PRELOAD", ""),
        "outcomes": dict(sorted(counts.items())),
        "corpus": kept,
        "seed": given.seed,
    }
    print(json.dumps(found, indent=1))
    if given.record:
        _record(given.record, found)
    sys.exit(ended.returncode)


def _record(path: Path, found: dict[str, object]) -> None:
    from twofour import measure

    versions = {"atheris": importlib.metadata.version("atheris")}
    measure.write_json(path, {"kind": "fuzz", **found, **versions, "machine": measure.machine()})


def _fuzz(folder: Path, seconds: int, seed: int, artifacts: Path) -> None:
    import atheris

    with atheris.instrument_imports(include=["twofour.export", "twofour.packing", "twofour.checkpoints"]):
        from tests.fuzz.loader import outcome
    import torch

    from tests.fuzz.damage import damaged

    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    path = folder / "fuzz.safetensors"
    written = [time.perf_counter()]

    def one(data: bytes) -> None:
        path.unlink(missing_ok=True)  # the last one may still be mapped
        path.write_bytes(damaged(data))
        counts[outcome(path)] += 1
        if time.perf_counter() - written[0] > 1:  # libFuzzer ends the process without a word
            (folder / "outcomes.json").write_text(json.dumps(counts))
            written[0] = time.perf_counter()

    corpus = folder / "corpus"
    corpus.mkdir()
    flags = [f"-max_total_time={seconds}", f"-seed={seed}", "-max_len=48", "-rss_limit_mb=3000", "-print_final_stats=1"]
    flags += ["-reload=0", f"-artifact_prefix={artifacts.resolve()}/", "-timeout=30", "-len_control=0"]
    atheris.Setup([sys.argv[0], *flags, str(corpus), str(CORPUS.resolve())], one)
    atheris.Fuzz()


def _keep(corpus: Path) -> int:
    """Add inputs of new outcomes to the corpus in git: the shortest of each, and a second one."""
    from tests.fuzz.damage import damaged
    from tests.fuzz.loader import outcome

    inputs = sorted((*CORPUS.iterdir(), *corpus.iterdir()), key=lambda entry: (entry.stat().st_size, entry.name))
    found: Counter[str] = Counter()
    kept: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzz.safetensors"
        for entry in inputs:
            data = entry.read_bytes()
            path.unlink(missing_ok=True)
            path.write_bytes(damaged(data))
            reached = outcome(path)
            found[reached] += 1
            if found[reached] <= 2 and len(kept) < LARGEST_CORPUS:
                kept[f"{reached}-{found[reached]}"] = data
    for entry in CORPUS.iterdir():
        entry.unlink()
    for name, data in kept.items():
        (CORPUS / name).write_bytes(data)
    return len(kept)


if __name__ == "__main__":
    main()
