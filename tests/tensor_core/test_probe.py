"""The probe: its kernels assemble where an assembler is, and on a GPU the hardware agrees with the emulator."""

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from twofour.errors import KernelError
from twofour.tensor_core import INSTRUCTIONS, Instruction, check, instruction, probe
from twofour.tensor_core.bits import MMA_B1, BitInstruction
from twofour.tensor_core.discover import Machine, code_slots, expected_slots

ROWS = [pytest.param(row, id=name) for name, row in INSTRUCTIONS.items()]


def assembler() -> str:
    """ptxas on the path, of a wheel of CUDA 13, or the one that Triton brings."""
    if found := shutil.which("ptxas"):
        return found
    for package, place in (("nvidia", "cu13/bin/ptxas"), ("triton", "backends/nvidia/bin/ptxas")):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            if (Path(folder) / place).exists():
                return str(Path(folder) / place)
    pytest.skip("there is no ptxas: pip install --no-deps nvidia-cuda-nvcc==13.0.*")


def assemble(row: Instruction | BitInstruction, modules: list[str], folder: Path) -> str:
    """Assemble kernels of one architecture together; the assembler's complaints, empty if it has none."""
    header = modules[0].partition(".visible")[0]
    bodies = [
        f".visible{text.partition('.visible')[2]}".replace("probe(", f"probe{i}(") for i, text in enumerate(modules)
    ]
    (folder / "probe.ptx").write_text(header + "".join(bodies))
    command = [assembler(), "-arch", row.arch, str(folder / "probe.ptx"), "-o", str(folder / "probe.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stderr or str(done.returncode) if done.returncode else ""


@pytest.mark.parametrize("row", ROWS)
def test_every_variant_assembles(row: Instruction, tmp_path: Path) -> None:
    assert not assemble(row, [probe.source(row, **variant) for variant in check.variants(row)], tmp_path)


@pytest.mark.parametrize("row", ROWS[::2])
def test_the_assembler_refuses_what_the_table_refuses(row: Instruction, tmp_path: Path) -> None:
    plain = (row, row.accumulators[0], row.a.name)
    # ptxas takes selectors 2 and 3 of this one, whose behaviour the ISA leaves undefined.
    selector = 4 if row.name == "mma.sp.m16n8k32.f16" else row.selectors
    assert "expected to be" in assemble(row, [probe.source(*plain, selector=selector)], tmp_path)
    if row.family == "wgmma.sp":
        assert assemble(row, [probe.source(*plain, n=264)], tmp_path)
        assert bool(assemble(row, [probe.source(*plain, n=40)], tmp_path)) == (40 not in row.widths)


@pytest.mark.parametrize("row", ROWS)
def test_the_gpu_agrees_with_the_emulator_and_with_the_table(row: Instruction) -> None:
    if reason := check.missing(row):
        pytest.skip(reason)
    found = check.check(row)
    assert found["agrees"], found


@pytest.mark.parametrize("row", MMA_B1, ids=lambda row: row.name)
def test_products_of_bits_assemble_and_agree_where_there_is_a_gpu(row: BitInstruction, tmp_path: Path) -> None:
    assert not assemble(row, [probe.bit_source(row)], tmp_path)
    if reason := check.missing(row):
        pytest.skip(reason)
    assert check.check_bits(row)["agrees"]


@pytest.mark.parametrize("row", ROWS)
def test_the_search_finds_the_table_in_the_emulator(row: Instruction) -> None:
    for selector in range(row.selectors):
        emulator = check.emulated(row, check.plain(row, selector))
        assert torch.equal(code_slots(row, emulator), expected_slots(row, selector))


@pytest.mark.parametrize("row", ROWS[::5])
def test_the_operands_of_the_check_run_through_the_emulator(row: Instruction) -> None:
    for variant in check.variants(row):
        given = check.operands(row, variant)
        assert check.emulated(row, variant)(*given).shape == given[2].shape


def test_a_gpu_that_reads_elsewhere_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator stands in for the GPU; one that exchanges two lanes' metadata must not pass."""
    row = instruction("mma.sp.m16n8k16.f16")
    monkeypatch.setattr(check, "on_gpu", check.emulated)
    assert check.check(row)["agrees"]
    swapped = torch.arange(32)
    swapped[[0, 4]] = swapped[[4, 0]]

    def machine(row: Instruction, variant: check.Variant) -> Machine:
        emulator = check.emulated(row, variant)
        return lambda a, b, c, metadata: emulator(a, b, c, metadata[:, swapped])

    monkeypatch.setattr(check, "on_gpu", machine)
    found = check.check(row)
    assert not found["agrees"] and found["moved"]


def test_without_a_gpu_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: the tests above ran")
    assert check.main([str(tmp_path / "found" / "check.json")]) == 0
    assert capsys.readouterr().out.count("not run: needs an NVIDIA GPU") == len(INSTRUCTIONS) + len(MMA_B1)
    written = json.loads((tmp_path / "found" / "check.json").read_text())
    assert written["gpu"] is None and set(written["instructions"]) == {*INSTRUCTIONS, *(row.name for row in MMA_B1)}


def test_tiles_are_core_matrices_of_eight_rows_by_sixteen_bytes() -> None:
    rows = torch.arange(16 * 32).view(16, 32)  # 16 rows of 32 bytes
    bytes_of_tile = probe.tile_words(8, rows & 0xFF).contiguous().view(torch.uint8)
    assert bytes_of_tile[:16].tolist() == list(range(16))  # row 0, its first 16 bytes
    assert bytes_of_tile[16:32].tolist() == list(range(32, 48))  # row 1
    assert bytes_of_tile[16 * 16 : 16 * 16 + 16].tolist() == list(range(16, 32))  # row 0 again, the next 16 bytes


def test_no_driver_is_said() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA driver")
    with pytest.raises(KernelError, match="no CUDA driver"):
        probe._driver()
