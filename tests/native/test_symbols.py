"""Objects of one instruction set must not define anything the rest of the program could link to by accident."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
KERNELS = (
    "twofour::nm_",
    "twofour::bits_",
    "twofour::block_",
    "twofour::depthwise_",
    "twofour::recurrent_",
    "twofour::squeeze_excite_",
    "twofour::dense_",
    "twofour::attention_",
    "twofour::norm_",
    "twofour::fused_block_",
)


def objects() -> list[Path]:
    """Objects of the newest build: one folder per instruction set."""
    folders = [folder for folder in (ROOT / "build").glob("*/CMakeFiles/kernels_*.dir") if "scalar" not in folder.name]
    return [path for folder in folders for path in folder.rglob("*.o")]


def test_instruction_set_objects_export_only_their_kernels() -> None:
    found = objects()
    if not found or shutil.which("nm") is None:
        pytest.skip("no build folder with objects beside the sources, or no `nm`: run `make build` from a checkout")
    for path in found:
        listing = subprocess.run(["nm", "-C", "--defined-only", path], capture_output=True, text=True, check=True)
        symbols = [line.split(maxsplit=2)[1:] for line in listing.stdout.splitlines()]
        weak = [name for kind, name in symbols if kind in "WVuw"]
        assert not weak, f"{path.name} shares {weak} with the rest of the program"
        exported = [name for kind, name in symbols if kind in "TDBR"]
        assert exported, path
        strangers = [name for name in exported if not name.startswith(KERNELS)]
        assert not strangers, f"{path.name} exports {strangers}"
