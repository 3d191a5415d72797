"""Objects of one instruction set must not define anything the rest of the program could link to by accident."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
KERNELS = (
    "twofour::nm_",
    "twofour::bits_",
    "twofour::block_",
    "twofour::hybrid_",
    "twofour::depthwise_",
    "twofour::recurrent_",
    "twofour::squeeze_excite_",
    "twofour::dense_",
    "twofour::attention_",
    "twofour::activation_",
    "twofour::column_sums_",
    "twofour::norm_",
    "twofour::rotation_",
    "twofour::fused_block_",
    "twofour::window_conv_",
)


def objects() -> list[Path]:
    """Objects of the builds, one folder per instruction set, but those that an earlier build left behind."""
    folders = [folder for folder in (ROOT / "build").glob("*/CMakeFiles/kernels_*.dir") if "scalar" not in folder.name]
    plans = {folder.parent.parent: folder.parent.parent / "build.ninja" for folder in folders}
    built = {build: plan.read_text() if plan.exists() else None for build, plan in plans.items()}

    def is_built(path: Path, build: Path) -> bool:
        return built[build] is None or str(path.relative_to(build)) in built[build]

    return [path for folder in folders for path in folder.rglob("*.o") if is_built(path, folder.parent.parent)]


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


def test_rows_for_vnni_alone_hold_no_instruction_of_what_extends_it() -> None:
    """A CPU with AVX-512 and VNNI but no VBMI, VPOPCNTDQ or BF16 stops at the first of those."""
    found = [path for path in objects() if "kernels_avx512_vnni.dir" in path.parts]
    if not found or shutil.which("objdump") is None:
        pytest.skip("no build folder with objects of AVX-512 VNNI beside the sources, or no `objdump`")
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", *found], capture_output=True, text=True, check=True
    )
    instructions = set(re.findall(r"^ +[0-9a-f]+:\t(?:\{\w+\} )?(\w+)", listing.stdout, re.M))
    assert "vpdpbusd" in instructions
    more = re.compile(
        r"vpermb|vperm[it]2b|vpmultishiftqb|vpopcnt[bwdq]|vpsh[lr]dv?[wdq]|vp(compress|expand)[bw]|v.*bf16.*|vgf2p8.*"
    )
    assert not {name for name in instructions if more.fullmatch(name)}
