"""Triton kernels become machine code for sm_80 and sm_90 here, GPU or not: Triton brings its own assembler."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
def test_triton_kernels_assemble_for_ampere_and_hopper(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.assembled"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 7 and all(" bytes" in line for line in lines), done.stdout
    assert lines[0].startswith("few_tokens sm_80") and lines[0].endswith("mma.sync")
    assert lines[1].startswith("few_tokens sm_90") and lines[1].endswith("wgmma.mma_async")
    assert lines[2].startswith("one_to_four_tokens sm_90") and lines[2].endswith("units: "), "no tensor cores"
    assert lines[-2].startswith("_row_of_blocks sm_90") and not lines[-2].endswith("units: "), "blocks on tensor cores"
    assert lines[-1].startswith("product_of_planes sm_90") and lines[-1].endswith("popc.b32"), "one instruction a word"
