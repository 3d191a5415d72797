"""The Hopper layout against CuTe's own layouts, printed on a CPU by cute_layouts.cc."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tensor_core.cute import FOLDER, layouts
from tests.tensor_core.weights import FEW, SEEDS, sparse
from tests.turns import in_turn
from twofour.errors import PackingError
from twofour.tensor_core import ELEMENTS, Operand, from_sm90, sm90, to_sm90, widest

NAMES = sorted(name for name in ELEMENTS if ELEMENTS[name].bits > 4)
ATOMS = {name: layout for name, layout in layouts().items() if name.startswith("atom.")}


@in_turn("atom", ATOMS)
def test_each_code_stands_where_cute_puts_it(atom: str) -> None:
    """CuTe counts in dense elements; a byte holds two codes of `chunk` elements each."""
    _, name, tile = atom.split(".")
    kind = ELEMENTS[name]
    offsets = ATOMS[atom].offsets()[..., 0]
    rows, columns = offsets.shape
    assert (rows, columns) == (192, 2 * int(tile))
    operand = Operand.from_dense(sparse(kind, rows, columns, 1), name)
    values, meta = to_sm90(operand, int(tile))
    assert values is operand.values
    nibbles = torch.stack((meta & 0xF, meta >> 4), -1).flatten()
    assert torch.equal(nibbles[offsets[:, :: kind.chunk] // kind.chunk], operand.codes)


@FEW
@given(
    name=st.sampled_from(NAMES), down=st.integers(1, 3), blocks=st.integers(1, 2), right=st.integers(1, 3), seed=SEEDS
)
def test_every_type_comes_back(name: str, down: int, blocks: int, right: int, seed: int) -> None:
    kind = ELEMENTS[name]
    tile = blocks * widest(kind, "wgmma.sp").k
    operand = Operand.from_dense(sparse(kind, 64 * down, tile * right, seed), name)
    back = from_sm90(*to_sm90(operand, tile), name, tile)
    assert torch.equal(back.codes, operand.codes)
    assert torch.equal(kind.raw(back.values), kind.raw(operand.values))


def test_what_does_not_fit_is_refused() -> None:
    operand = Operand.from_dense(sparse(ELEMENTS["f16"], 64, 128, 0), "f16")
    values, meta = to_sm90(operand)
    with pytest.raises(PackingError, match="no such atom"):
        to_sm90(operand, 16)
    with pytest.raises(PackingError, match=r"operand.padded\(64, 128\)"):
        to_sm90(Operand.from_dense(sparse(ELEMENTS["f16"], 32, 128, 0), "f16"))
    with pytest.raises(PackingError, match=r"wgmma\.sp has no instruction for s4"):
        to_sm90(Operand.from_dense(sparse(ELEMENTS["s4"], 64, 128, 0), "s4"))
    with pytest.raises(PackingError, match="no f16 operand in the Hopper layout"):
        from_sm90(values, meta[:-1], "f16")
    with pytest.raises(PackingError, match="no f16 operand in the Hopper layout"):
        from_sm90(values[0, 0], meta, "f16")
    with pytest.raises(PackingError, match="behaviour is undefined"):
        from_sm90(values, torch.zeros_like(meta), "f16")
    assert sm90.evidence("e4m3") == "equal to CuTe's layout on a CPU, not run on a GPU"


def folder(package: str) -> Path | None:
    """Where an installed package lies, without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return None
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def test_cute_still_prints_these_layouts(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    cutlass, cuda = folder("cutlass_library"), folder("nvidia.cu13")
    if not compiler or not cutlass or not cuda:
        pytest.skip(
            "CuTe's headers are not here: pip install --no-deps nvidia-cutlass nvidia-cuda-runtime nvidia-cuda-cccl"
        )
    source, headers = cutlass / "source" / "include", cuda / "include"
    includes = [f"-I{path}" for path in (source, headers, headers / "cccl")]
    program = tmp_path / "layouts"
    command = [compiler, "-std=c++17", "-O0", "-w", *includes, str(FOLDER / "cute_layouts.cc"), "-o", str(program)]
    subprocess.run(command, check=True, timeout=300)
    printed = subprocess.run([program], check=True, capture_output=True, text=True, timeout=60).stdout
    assert printed == (FOLDER / "cute_layouts.txt").read_text()
