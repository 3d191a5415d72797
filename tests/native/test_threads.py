"""Native calls from several threads at once, and by teams of threads, answer as a call alone does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from twofour import native

ROOT = Path(__file__).parent.parent.parent


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=600, check=False, env=environment, cwd=ROOT
    )


# Our own pool does not read OMP_THREAD_LIMIT.
@pytest.mark.parametrize(
    ("source", "granted", "rounds"),
    [
        ("openmp", "2", "once"),
        ("own", "", "once"),
        *(
            pytest.param(*case, "", marks=pytest.mark.long)
            for case in (("own", ""), ("openmp", ""), ("torch", ""), ("torch", "2"))
        ),
    ],
)
def test_every_row_answers_the_same_from_many_threads_at_once(source: str, granted: str, rounds: str) -> None:
    """Also where fewer threads are granted than asked for; "once": teams of several threads in one order alone."""
    done = run(
        ["-m", "tests.native.thread_cases", source, rounds], **({"OMP_THREAD_LIMIT": granted} if granted else {})
    )
    if source != "own" and "has no threads of" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    found = re.search(r"(\d+) calls by 4 threads, (\d+) by a team", done.stdout)
    assert found and int(found[1]) >= 80 and int(found[2]) >= 60, done.stdout


def test_a_forked_child_has_threads_of_its_own() -> None:
    """Where kernels take them from our pool; those of OpenMP hang, as docs/environment.md says."""
    code = """
import os, signal, torch
from twofour import kernels, native, packing, patterns
assert native.extension().use_threads("own", torch._C.__file__)
torch.set_num_threads(3)
weight = torch.randn(64, 64)
weight *= patterns.parse("2:4").project(weight)
x, packed = torch.randn(1, 64), packing.pack(weight, "2:4")
answer = kernels.matmul(x, packed)
child = os.fork()
same = torch.equal(kernels.matmul(x, packed), answer)
if not child:
    os._exit(0 if same else 1)
signal.alarm(60)
assert same and os.waitpid(child, 0)[1] == 0
"""
    done = run(["-c", code], TSAN_OPTIONS=f"{os.environ.get('TSAN_OPTIONS', '')}:die_after_fork=0")
    assert done.returncode == 0, done.stderr


def test_torch_without_openmp_leaves_kernels_a_pool_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.__config__, "parallel_info", lambda: "ATen parallel backend: native thread pool")
    assert native.thread_sources() == ("own",)
    monkeypatch.setattr(torch.__config__, "parallel_info", lambda: "ATen parallel backend: OpenMP\n")
    assert native.thread_sources()[0] == "openmp"


def test_threads_are_as_many_as_torch_uses() -> None:
    before, source = torch.get_num_threads(), native.threads_backend()
    try:
        torch.set_num_threads(3)
        assert native.threads() == 3
        assert not native.extension().use_threads("nothing", torch._C.__file__)
        assert native.threads_backend() == source
    finally:
        torch.set_num_threads(before)
