"""Products of single bits as Tensor Cores make them, and those of 1 to 8 bits made of them, against whole numbers."""

import importlib.util
import itertools
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.turns import in_turn
from twofour.errors import PackingError
from twofour.tensor_core import bits as of_bits
from twofour.tensor_core.bits import (
    MMA_B1,
    SYSTEMS,
    BitInstruction,
    bit_product,
    execute_b1,
    planes_of,
    popcount,
    to_registers,
)

_TRITON = importlib.util.find_spec("triton")
TOOLS = Path(_TRITON.origin or "").parent / "backends/nvidia/bin" if _TRITON else Path()
"""Where Triton keeps NVIDIA's assembler and disassembler."""

VALUES = {
    "unsigned": lambda u, p: u,
    "twos": lambda u, p: u - (1 << (p - 1)),
    "bipolar": lambda u, p: 2 * u - ((1 << p) - 1),
    "ternary": lambda u, p: u - 1,
}
"""What codes stand for, written again."""


def codes_of(bits: int, rows: int, k: int) -> torch.Tensor:
    return torch.randint(0, 1 << bits, (rows, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits + k))


@in_turn("row", MMA_B1, ids=lambda row: row.name)
def test_lanes_hold_what_the_ptx_isa_says(row) -> None:
    """Element i of a lane by the text: conditions on i, threads 4 to a group."""
    words = row.k // 32
    a, b = (torch.arange(size * words, dtype=torch.int32).view(size, words) for size in (row.m, 8))
    for lane, (of_a, of_b) in enumerate(zip(*to_registers(row, a, b), strict=True)):
        group, thread = lane >> 2, lane % 4
        for i in range(0, row.m * row.k // 32, 32):
            upper = row.m == 16 and not (i < 32 or 64 <= i < 96)
            assert of_a[i // 32] == a[group + 8 * upper, thread + 4 * (i >= 64)]
        for i in range(0, row.k // 4, 32):
            assert of_b[i // 32] == b[group, thread + 4 * (i >= 32)]


@in_turn("row", MMA_B1, ids=lambda row: row.name)
def test_an_instruction_counts_the_ones_in_both_or_in_one(row) -> None:
    bits_a, bits_b = codes_of(1, row.m, row.k), codes_of(1, 8, row.k)
    a, b = planes_of(bits_a, 1, row.k)[0], planes_of(bits_b, 1, row.k)[0]
    registers = row.m // 4
    start = torch.arange(32 * registers, dtype=torch.int32).view(32, registers)
    d = execute_b1(row, *to_registers(row, a, b), start)
    want = bits_a.long() @ bits_b.long().T
    if row.operation == "xor":
        want = (bits_a[:, None] != bits_b).sum(2)
    for lane, register in itertools.product(range(32), range(registers)):
        place = (lane >> 2) + 8 * (register >= 2), lane % 4 * 2 + (register & 1)
        assert d[lane, register] == want[place] + start[lane, register]
    with pytest.raises(PackingError, match="other registers of B"):
        execute_b1(row, *to_registers(row, a, b)[:1], start[:, :1].repeat(1, 3), start)
    for some, of in (((a[:, 1:], b), "A"), ((a, b[:4]), "B"), ((a, b.long()), "B")):
        with pytest.raises(PackingError, match=f"other words of {of}"):
            to_registers(row, *some)
    words = torch.tensor([0, -1, 1 << 30, -(1 << 31), 0x0F0F0F0F], dtype=torch.int32)
    assert popcount(words).tolist() == [0, 32, 1, 1, 16]


def test_every_pair_of_widths_and_systems_is_exact() -> None:
    k = 131  # more than one instruction of 128, and no multiple of a word
    for p, q in itertools.product(range(1, 9), repeat=2):
        for (i, of_x), (j, of_w) in itertools.product(enumerate(SYSTEMS), repeat=2):
            if p * q > 6 and (i + 2 * j + p + q) % 3:
                continue  # pairs of systems take turns where planes are many
            if (of_x == "ternary" and p != 2) or (of_w == "ternary" and q != 2):
                continue
            x, w = (
                codes.clamp(max=2) if of == "ternary" else codes
                for codes, of in ((codes_of(p, 3, k), of_x), (codes_of(q, 5, k), of_w))
            )
            row, want = MMA_B1[(p + 3 * q + i) % len(MMA_B1)], VALUES[of_x](x.long(), p) @ VALUES[of_w](w.long(), q).T
            assert torch.equal(bit_product(x, w, (p, of_x), (q, of_w), row), want), (p, of_x, q, of_w)


def test_several_tiles_and_codes_that_do_not_fit() -> None:
    x, w = codes_of(2, 17, 300), codes_of(1, 9, 300)
    want = x.long() @ (2 * w.long() - 1).T
    assert torch.equal(bit_product(x, w, (2, "unsigned"), (1, "bipolar")), want)
    for of_x, k in (
        ((1, "unsigned"), 300),
        ((2.0, "unsigned"), 300),
        ((9, "unsigned"), 300),
        ((2, "ternary"), 300),
        ((3, "ternary"), 300),
        ((2, "quaternary"), 300),
        ((2, "twos"), 299),
    ):
        with pytest.raises(PackingError, match="do not fit their bits"):
            bit_product(x, w[:, :k], of_x, (1, "bipolar"))
    for some in ((x[:0], w), (x, w[:0]), (x[:, :0], w[:, :0]), (x.float(), w), (x, w[0])):
        with pytest.raises(PackingError, match="not rows of bytes"):
            bit_product(*some, (2, "unsigned"), (1, "bipolar"))
    assert of_bits.MMA_B1[1].name == "mma.m16n8k256.b1.and.popc"
    assert of_bits.MMA_B1[5].name == "mma.m8n8k128.b1.xor.popc"


ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


def machine_code(row: BitInstruction, arch: str, folder: Path) -> str | None:
    """What NVIDIA's assembler makes of the instruction, as its disassembler shows it; None where it refuses it."""
    a, b, c = row.m * row.k // 1024, row.k // 128, row.m // 4
    registers = [f"%r{i}" for i in range(a + b + c)]
    loads = "".join(f"ld.global.b32 {name},[%rd+{4 * i}];" for i, name in enumerate(registers))
    stores = "".join(f"st.global.b32 [%rd+{4 * i}],{name};" for i, name in enumerate(registers[-c:]))
    of_a, of_b, of_c = (",".join(part) for part in (registers[:a], registers[a : a + b], registers[-c:]))
    (folder / "b1.ptx").write_text(
        f".version 8.7\n.target {arch}\n.address_size 64\n.visible .entry b1(.param .u64 p){{\n"
        f".reg .b32 %r<{len(registers)}>;.reg .b64 %rd;ld.param.u64 %rd,[p];{loads}\n"
        f"mma.sync.aligned.m{row.m}n8k{row.k}.row.col.s32.b1.b1.s32.{row.operation}.popc "
        f"{{{of_c}}},{{{of_a}}},{{{of_b}}},{{{of_c}}};\n"
        f"{stores}ret;}}\n"
    )
    command = [str(TOOLS / "ptxas"), "-arch", arch, str(folder / "b1.ptx"), "-o", str(folder / "b1.cubin")]
    if subprocess.run(command, capture_output=True, timeout=60, check=False).returncode:
        return None
    command = [str(TOOLS / "cuobjdump"), "-sass", str(folder / "b1.cubin")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.skipif(not (TOOLS / "cuobjdump").exists(), reason="needs the package triton, which brings the tools")
@pytest.mark.parametrize("row", [MMA_B1[1], MMA_B1[5]], ids=lambda row: row.name)
def test_the_assembler_has_it_where_the_table_says(row: BitInstruction, tmp_path: Path) -> None:
    """ptxas 12.8: on Hopper XOR is two ANDs, on Blackwell both are products of bytes."""
    first, last = (ARCHITECTURES.index(arch) for arch in (row.arch, row.last))
    near = {max(first - 1, 0), first, last, last + 1, len(ARCHITECTURES) - 1}
    for place in sorted(near):
        code = machine_code(row, ARCHITECTURES[place], tmp_path)
        own = f"BMMA.{row.m}{row.n}{row.k}.{row.operation.upper()}.POPC"
        assert (code is None) == (place < first)
        if code is not None:
            assert len(re.findall(own, code)) == (first <= place <= last) and ("IMMA" in code) == (place > 4)
