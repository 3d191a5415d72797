"""How fast a GPU executes one instruction of the tensor cores: every multiprocessor full of it, operands in registers.

A rate is a ceiling for kernels of that instruction: nothing is loaded, and eight sums that do not wait for each other
hide its latency. `wgmma.sp` reads shared memory and is not among them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from cases.gpu_products import GpuCase
from twofour.measure import Record, compare_on_gpu
from twofour.native import gpu
from twofour.tensor_core import INSTRUCTIONS, probe
from twofour.tensor_core.bits import MMA_B1
from twofour.tensor_core.check import missing

LOOPS, SUMS, BLOCKS, THREADS = 512, 8, 4, 128
"""Rounds of a warp, instructions of a round, blocks of a multiprocessor, threads of a block."""

_ODD = 0x9E3779B1
"""Spreads the bits of thread and register: zeros would take less power, and run faster, than numbers do."""

DENSE = {
    "mma.m16n8k16.f16": ("sm_80", "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", 4, 2, 16),
    "mma.m16n8k16.bf16": ("sm_80", "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", 4, 2, 16),
    "mma.m16n8k32.s8": ("sm_80", "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", 4, 2, 32),
    "mma.m16n8k32.e4m3": ("sm_89", "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", 4, 2, 32),
}
"""Dense instructions of 16 by 8 outputs beside the sparse ones: architecture, opcode, registers of A and B, K
(PTX ISA 9.0, 9.7.14.5)."""


def rates() -> list[GpuCase]:
    """Return one case: every instruction of a warp that this GPU has."""
    return [GpuCase("rates", _rates)]


def _rates() -> Record:
    texts: dict[str, str] = {}
    operations: dict[str, int] = {}
    warps = LOOPS * SUMS * BLOCKS * THREADS // 32 * gpu.processors()
    for name, (arch, opcode, a, b, k) in DENSE.items():
        if gpu.unavailable(_capability(arch)) is None:
            texts[name] = source(arch, opcode, a, b, 4, "")
            operations[name] = 2 * 16 * 8 * k * warps
    for row in MMA_B1:
        if missing(row) is None:
            texts[row.name] = source(row.arch, row.ptx, *row.registers, "")
            operations[row.name] = 2 * row.m * row.n * row.k * warps
    for row in INSTRUCTIONS.values():
        if row.family == "mma.sp" and missing(row) is None:
            opcode = row.ptx(row.accumulators[0], row.a.name, 8, ordered=True)
            texts[row.name] = source(row.arch, opcode, row.a_registers, row.b_registers, 4, ", %e0, 0")
            operations[row.name] = 2 * row.m * 8 * row.k * warps
    sink = torch.zeros(1, dtype=torch.int32, device=gpu.device())
    blocks = BLOCKS * gpu.processors()
    calls = {name: partial(probe.launch, text, blocks, THREADS, (sink,)) for name, text in texts.items()}
    meta: dict[str, object] = {"part": "rates", "operations": operations}
    return compare_on_gpu(calls, repeats=5, seconds=2.0, meta=meta)


TABLE = (
    ("bfloat16", "mma.m16n8k16.bf16", "mma.sp.m16n8k16.bf16", "mma.sp.m16n8k32.bf16"),
    ("float16", "mma.m16n8k16.f16", "mma.sp.m16n8k16.f16", "mma.sp.m16n8k32.f16"),
    ("tf32", "", "mma.sp.m16n8k8.tf32", "mma.sp.m16n8k16.tf32"),
    ("s8", "mma.m16n8k32.s8", "mma.sp.m16n8k32.s8", "mma.sp.m16n8k64.s8"),
    ("u8", "", "mma.sp.m16n8k32.u8", "mma.sp.m16n8k64.u8"),
    ("e4m3", "", "", "mma.sp.m16n8k64.e4m3"),
    ("e5m2", "", "", "mma.sp.m16n8k64.e5m2"),
    ("s4", "", "mma.sp.m16n8k64.s4", "mma.sp.m16n8k128.s4"),
    ("u4", "", "mma.sp.m16n8k64.u4", "mma.sp.m16n8k128.u4"),
    ("single bits, AND", "mma.m16n8k256.b1.and.popc", "", ""),
    ("single bits, AND, k 128", "mma.m16n8k128.b1.and.popc", "", ""),
    ("single bits, XOR", "mma.m16n8k256.b1.xor.popc", "", ""),
    ("single bits, XOR, k 128", "mma.m16n8k128.b1.xor.popc", "", ""),
)
"""Type, its dense instruction, the sparse one of the dense one's K and that of twice it, as the page shows them."""


def table(record: Record) -> str:
    """Return the rates of a record in TOP/s, a table in Markdown."""
    operations: Any = record.meta["operations"]
    lines = [
        "| type | dense `mma` | `mma.sp` of the dense K | `mma.sp` of twice the dense K |",
        "| --- | --- | --- | --- |",
    ]
    for kind, *names in TABLE:
        rates = [f"{operations[name] / record.median(name) / 1e12:,.0f}" if name else "" for name in names]
        lines.append("| " + " | ".join((kind, *rates)) + " |")
    return "\n".join(lines)


def source(arch: str, opcode: str, a: int, b: int, c: int, metadata: str) -> str:
    """Write a PTX module whose kernel `probe` executes an instruction SUMS times a round, LOOPS rounds.

    Each sum has an A of its own: a type that the assembler makes others of would be multiplied once for all.
    Metadata says that the first two of four are kept, a code that every type has. What is summed is stored if it is a
    number that it never is, so that it counts as used.
    """
    many = [[f"%a{a * one + i}" for i in range(a)] for one in range(SUMS)]
    others = [f"%b{i}" for i in range(b)]
    sums = [[f"%c{c * one + i}" for i in range(c)] for one in range(SUMS)]
    body = ["mov.u32 %t0, %tid.x;", "mov.u32 %t1, 0;", "mov.u32 %e0, 0x44444444;"]
    every = (*(register for each in many for register in each), *others)
    body += [f"mad.lo.u32 {one}, %t0, {_ODD}, {_ODD * (i + 1) % 2**32};" for i, one in enumerate(every)]
    body += [f"mov.u32 {one}, 0;" for each in sums for one in each]
    body += ["round:"]
    for each, left in zip(sums, many, strict=True):
        total, right = _listed(each), _listed(others)
        body += [f"{opcode} {total}, {_listed(left)}, {right}, {total}{metadata};"]
    body += ["add.u32 %t1, %t1, 1;", f"setp.lt.u32 %p0, %t1, {LOOPS};", "@%p0 bra round;", "mov.u32 %t2, 0;"]
    body += [f"xor.b32 %t2, %t2, {one};" for each in sums for one in each]
    body += ["setp.eq.u32 %p0, %t2, 0x7FABCDEF;", "ld.param.u64 %q0, [p_d];", "@%p0 st.global.b32 [%q0], %t2;"]
    registers = {"a": SUMS * a, "b": b, "c": SUMS * c, "e": 1, "t": 4}
    declared = "\n".join(f".reg .b32 %{name}<{size}>;" for name, size in registers.items())
    return (
        f".version {probe.VERSION}\n.target {arch}\n.address_size 64\n.visible .entry probe(.param .u64 p_d)\n{{\n"
        f"{declared}\n.reg .b64 %q<1>;\n.reg .pred %p<1>;\n" + "\n".join(body) + "\nret;\n}\n"
    )


def _listed(registers: list[str]) -> str:
    return "{" + ", ".join(registers) + "}"


def _capability(arch: str) -> tuple[int, int]:
    number = int(arch.removeprefix("sm_"))
    return number // 10, number % 10
