"""The probe: its kernels assemble where an assembler is, and on a GPU the hardware agrees with the emulator."""

import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.tensor_core.weights import numbers, sparse
from twofour.errors import PackingError
from twofour.tensor_core import INSTRUCTIONS, Instruction, Operand, execute, probe
from twofour.tensor_core.discover import Machine, code_slots, expected_slots
from twofour.tensor_core.execute import ACCUMULATORS
from twofour.tensor_core.fragments import a_registers, b_registers, c_registers, metadata_registers

ROWS = [pytest.param(row, id=name) for name, row in INSTRUCTIONS.items()]
BLOCKS = 4


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


def needs_gpu(row: Instruction) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA GPU")
    have, wanted = torch.cuda.get_device_capability(), int(row.arch.strip("sma_"))
    if (have[0] * 10 + have[1] < wanted) or (row.arch.endswith("a") and have[0] * 10 + have[1] != wanted):
        pytest.skip(f"{row.name} needs {row.arch}, this GPU is sm_{have[0]}{have[1]}")


def variants(row: Instruction) -> Iterator[dict]:
    """Every accumulator, partner, selector and source of A, one after the other rather than all together."""
    plain = {"accumulator": row.accumulators[0], "b": row.a.name, "selector": 0, "n": row.widths[0]}
    yield plain
    yield from ({**plain, "accumulator": name} for name in row.accumulators[1:])
    yield from ({**plain, "b": kind.name} for kind in row.partners if kind != row.a)
    yield from ({**plain, "selector": selector} for selector in range(1, row.selectors))
    if row.a.whole:
        yield {**plain, "saturate": True}
    if row.family == "mma.sp":
        yield {**plain, "ordered": True}
    else:
        yield {**plain, "shared_a": True, "n": 64, "selector": row.selectors - 1}
        yield {**plain, "n": 256}


def assemble(row: Instruction, modules: list[str], folder: Path) -> str:
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
    assert not assemble(row, [probe.source(row, **variant) for variant in variants(row)], tmp_path)


@pytest.mark.parametrize("row", ROWS)
def test_the_assembler_refuses_what_the_table_refuses(row: Instruction, tmp_path: Path) -> None:
    plain = (row, row.accumulators[0], row.a.name)
    # ptxas takes selectors 2 and 3 of this one, whose behaviour the ISA leaves undefined.
    selector = 4 if row.name == "mma.sp.m16n8k32.f16" else row.selectors
    assert "expected to be" in assemble(row, [probe.source(*plain, selector=selector)], tmp_path)
    if row.family == "wgmma.sp":
        assert assemble(row, [probe.source(*plain, n=264)], tmp_path)
        assert bool(assemble(row, [probe.source(*plain, n=40)], tmp_path)) == (40 not in row.widths)


def machine(row: Instruction, variant: dict) -> Machine:
    """The GPU, taking operands as `execute` does."""
    text = probe.source(row, **variant)

    def on_gpu(a: Tensor, b: Tensor, c: Tensor, metadata: Tensor) -> Tensor:
        if row.family == "wgmma.sp":
            kind = next(kind for kind in row.partners if kind.name == variant["b"])
            b = probe.tile_words(row.a.bits, kind.raw(b.contiguous()).transpose(-1, -2))
            if variant.get("shared_a"):
                a = probe.tile_words(row.a.bits, row.a.raw(a))
        return probe.run(text, row, a, b, c, metadata)

    return on_gpu


def emulator(row: Instruction, variant: dict) -> Machine:
    options = {
        key: value for key, value in variant.items() if key in ("accumulator", "selector", "ordered", "saturate")
    }
    return lambda a, b, c, metadata: execute(row, a, b, c, metadata, b_type=variant["b"], **options)


def operands(row: Instruction, variant: dict) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Whole numbers that every type holds and every order of summing keeps exact; C large where sums may wrap."""
    generator = torch.Generator().manual_seed(0)
    dense = sparse(row.a, row.m * BLOCKS, row.k, 0)
    operand = Operand.from_dense(dense, row.a)
    stored = row.a.from_raw(row.a.raw(operand.values).view(BLOCKS, row.m, -1))
    partner = next(kind for kind in row.partners if kind.name == variant["b"])
    b = numbers(partner, (BLOCKS, row.k, variant["n"]), generator)
    high = 2**31 - 1 if row.a.whole else 64
    c = torch.randint(-high, high, (BLOCKS, row.m, variant["n"]), generator=generator)
    c = c_registers(row, c.to(ACCUMULATORS[variant["accumulator"]]))
    metadata = metadata_registers(row, operand.codes.view(BLOCKS, row.m, -1), variant["selector"])
    b = b_registers(row, b, partner) if row.family == "mma.sp" else b
    return stored if variant.get("shared_a") else a_registers(row, stored), b, c, metadata


@pytest.mark.parametrize("row", ROWS)
def test_the_gpu_reads_the_metadata_where_the_table_says(row: Instruction) -> None:
    needs_gpu(row)
    plain = {"accumulator": row.accumulators[0], "b": row.a.name, "n": 8 if row.family == "mma.sp" else 16}
    for selector in range(row.selectors):
        assert torch.equal(
            code_slots(row, machine(row, {**plain, "selector": selector})), expected_slots(row, selector)
        )


@pytest.mark.parametrize("row", ROWS)
def test_the_gpu_answers_as_the_emulator_does(row: Instruction) -> None:
    needs_gpu(row)
    for variant in variants(row):
        given = operands(row, variant)
        assert torch.equal(machine(row, variant)(*given), emulator(row, variant)(*given)), variant


@pytest.mark.parametrize("row", ROWS)
def test_the_search_finds_the_table_in_the_emulator(row: Instruction) -> None:
    for selector in range(row.selectors):
        plain = {"accumulator": row.accumulators[0], "b": row.a.name, "selector": selector}
        assert torch.equal(code_slots(row, emulator(row, plain)), expected_slots(row, selector))


@pytest.mark.parametrize("row", ROWS[::5])
def test_the_operands_of_the_check_run_through_the_emulator(row: Instruction) -> None:
    for variant in variants(row):
        given = operands(row, variant)
        assert emulator(row, variant)(*given).shape == given[2].shape


def test_tiles_are_core_matrices_of_eight_rows_by_sixteen_bytes() -> None:
    rows = torch.arange(16 * 32).view(16, 32)  # 16 rows of 32 bytes
    bytes_of_tile = probe.tile_words(8, rows & 0xFF).contiguous().view(torch.uint8)
    assert bytes_of_tile[:16].tolist() == list(range(16))  # row 0, its first 16 bytes
    assert bytes_of_tile[16:32].tolist() == list(range(32, 48))  # row 1
    assert bytes_of_tile[16 * 16 : 16 * 16 + 16].tolist() == list(range(16, 32))  # row 0 again, the next 16 bytes


def test_no_driver_is_said() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA driver")
    with pytest.raises(PackingError, match="no CUDA driver"):
        probe._driver()
