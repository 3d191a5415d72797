"""The check on a GPU: each instruction as a kernel of one instruction, on registers that are given, as the table says.

`source` writes the kernel in PTX, from the table; any `ptxas` assembles it, and `run` gives it to the driver (libcuda),
which needs no compiler. What it returns is compared with `execute`: `check.py`.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from twofour.errors import KernelError, cut
from twofour.tensor_core.bits import BitInstruction
from twofour.tensor_core.element import to_words
from twofour.tensor_core.instruction import Instruction

VERSION = "8.5"
"""PTX version of the kernels: the first with `::ordered_metadata`."""

_CORE = 16
"""Bytes of a row of a core matrix in shared memory; a core matrix has 8 of them (PTX ISA 9.0, 9.7.15.5.1)."""


def source(
    row: Instruction,
    accumulator: str,
    b: str,
    *,
    selector: int = 0,
    n: int = 8,
    ordered: bool = False,
    saturate: bool = False,
    shared_a: bool = False,
) -> str:
    """Write a PTX module whose kernel `probe` executes the instruction once in every block.

    It takes pointers to A, B, C, the metadata and D, each a block's words after the other: registers lane by lane,
    but for tiles in shared memory the words of `tile`.

    Args:
        row: The instruction.
        accumulator: Type of C and D.
        b: B's element type.
        selector: The sparsity selector, a literal of the instruction.
        n: Columns, one of `row.widths`.
        ordered: `::ordered_metadata`.
        saturate: `.satfinite`.
        shared_a: Read A from shared memory; `wgmma.sp` only.
    """
    warp = row.family == "mma.sp"
    halves = 2 if accumulator == "f16" else 1
    count = {"a": row.a_registers, "c": row.m * n // row.lanes // halves}
    body = [_load("a", count["a"], row.lanes), _load("c", count["c"], row.lanes), _load("e", 1, row.lanes)]
    opcode = row.ptx(accumulator, b, n, ordered=ordered)
    if saturate:
        opcode = opcode.replace(".s32.", ".satfinite.s32.", 1)
    if warp:
        body += [_load("b", row.b_registers, row.lanes)]
        body += [f"{opcode} {_list('c', count['c'])}, {_list('a', count['a'])}, {_list('b', row.b_registers)}, "]
        body[-1] += f"{_list('c', count['c'])}, %e0, {selector};"
    else:
        body += _shared(row, opcode, count, n, selector, shared_a)
    return _module(row.arch, {**count, "e": 1, "b": 4}, [*body, _store(count["c"], row.lanes)])


def bit_source(row: BitInstruction) -> str:
    """Write a PTX module whose kernel `probe` executes a product of single bits once in every block, like `source`."""
    a, b, c = row.registers
    body = [_load(name, count, row.lanes) for name, count in (("a", a), ("b", b), ("c", c))]
    body += [f"{row.ptx} {_list('c', c)}, {_list('a', a)}, {_list('b', b)}, {_list('c', c)};", _store(c, row.lanes)]
    return _module(row.arch, {"a": a, "b": b, "c": c}, body)


def tile(matrix: Tensor) -> Tensor:
    """Put rows into core matrices for a descriptor without swizzle: int32 words of (..., rows, bytes of a row / 4).

    Args:
        matrix: int32 words (..., rows, columns): rows of stored A, or of B transposed; rows a multiple of 8.

    Returns:
        int32 (..., rows * columns): 16 bytes of all rows, then the next 16 bytes.
    """
    units = matrix.unflatten(-1, (-1, _CORE // 4))
    return units.transpose(-2, -3).flatten(-3).contiguous()


def tile_words(kind_bits: int, raw: Tensor) -> Tensor:
    """Turn raw elements (..., rows, columns), neighbours of K beside each other, into the words of `tile`."""
    return tile(to_words(raw, kind_bits))


def run(text: str, row: Instruction | BitInstruction, a: Tensor, b: Tensor, c: Tensor, metadata: Tensor) -> Tensor:
    """Execute `source` on the current CUDA device: int32 (blocks, ...) operands on the CPU in, D's registers out.

    Raises:
        KernelError: The driver refuses the module, with what it says, or there is no driver.
    """
    given = [operand.contiguous().cuda() for operand in (a, b, c, metadata)]
    d = torch.full(c.shape, 0x7FC00000, dtype=torch.int32, device="cuda")
    launch(text, len(c), row.lanes, (*given, d))
    torch.cuda.synchronize()
    return d.cpu()


def launch(text: str, blocks: int, threads: int, operands: tuple[Tensor, ...]) -> None:
    """Start the kernel `probe` of a PTX module on the current stream with pointers to tensors on the device.

    Raises:
        KernelError: The driver refuses the module, with what it says, or there is no driver.
    """
    driver, function = _driver(), _function(text)
    pointers = [ctypes.c_uint64(tensor.data_ptr()) for tensor in operands]
    values = (ctypes.c_void_p * len(pointers))(*(ctypes.addressof(pointer) for pointer in pointers))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    started = driver.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, values, None)
    _require(driver, started, "the probe cannot be launched")


def _module(arch: str, count: dict[str, int], body: list[str]) -> str:
    """Write a module of one kernel with so many registers of each name."""
    registers = "".join(f".reg .b32 %{name}<{max(size, 1)}>;\n" for name, size in count.items())
    params = ", ".join(f".param .u64 p_{name}" for name in "abced")
    return (
        f".version {VERSION}\n.target {arch}\n.address_size 64\n"
        f".visible .entry probe({params})\n{{\n{registers}"
        ".reg .b32 %t<4>;\n.reg .b64 %q<8>;\n.reg .pred %p<2>;\n"
        "mov.u32 %t0, %tid.x;\nmov.u32 %t1, %ctaid.x;\n" + "\n".join(body) + "\nret;\n}\n"
    )


def _load(name: str, count: int, lanes: int) -> str:
    """Load `count` registers of this lane of this block."""
    moves = [f"ld.global.b32 %{name}{i}, [%q0+{4 * i}];" for i in range(count)]
    return "\n".join([_address(name, count, lanes), *moves])


def _store(count: int, lanes: int) -> str:
    moves = [f"st.global.b32 [%q0+{4 * i}], %c{i};" for i in range(count)]
    return "\n".join([_address("d", count, lanes), *moves])


def _address(name: str, count: int, lanes: int) -> str:
    """Put the address of this lane's registers of this block into q0."""
    return (
        f"ld.param.u64 %q0, [p_{name}];\nmad.lo.u32 %t2, %t1, {lanes}, %t0;\n"
        f"mul.wide.u32 %q1, %t2, {4 * count};\nadd.u64 %q0, %q0, %q1;"
    )


def _shared(row: Instruction, opcode: str, count: dict[str, int], n: int, selector: int, shared_a: bool) -> list[str]:
    """Copy the tiles into shared memory, describe them, and multiply."""
    b_words = n * row.k * row.a.bits // 32
    a_words = row.m * row.k // 2 * row.a.bits // 32
    lines = [f".shared .align 128 .b32 tile_b[{b_words}];", _copy("b", b_words), _descriptor("b", n, 6)]
    a = _list("a", count["a"])
    if shared_a:
        lines += [f".shared .align 128 .b32 tile_a[{a_words}];", _copy("a", a_words), _descriptor("a", row.m, 5)]
        a = "%q5"
    floats = "" if row.a.integer else ", 1, 1"
    if row.a.bits == 16:
        floats += ", 0, 0" if shared_a else ", 0"
    return [
        *lines,
        "fence.proxy.async;\nbar.sync 0;\nwgmma.fence.sync.aligned;\nsetp.eq.u32 %p0, 0, 0;",
        f"{opcode} {_list('c', count['c'])}, {a}, %q6, %e0, {selector}, %p0{floats};",
        "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;",
    ]


def _copy(name: str, words: int) -> str:
    """Copy the block's words of a tile into shared memory, a word a thread in turn."""
    return (
        f"ld.param.u64 %q0, [p_{name}];\n"
        f"mul.wide.u32 %q1, %t1, {4 * words};\nadd.u64 %q0, %q0, %q1;\n"
        f"mov.u64 %q2, tile_{name};\nmov.u32 %t2, %t0;\n"
        f"loop_{name}:\nmul.wide.u32 %q1, %t2, 4;\nadd.u64 %q3, %q0, %q1;\nld.global.b32 %t3, [%q3];\n"
        f"add.u64 %q3, %q2, %q1;\nst.shared.b32 [%q3], %t3;\n"
        f"add.u32 %t2, %t2, 128;\nsetp.lt.u32 %p1, %t2, {words};\n@%p1 bra loop_{name};"
    )


def _descriptor(name: str, rows: int, register: int) -> str:
    """Describe a K-major tile without swizzle (9.7.15.5.1.2): 8 rows are 128 bytes; K goes on after all rows."""
    fixed = (rows * _CORE >> 4) << 16 | (8 * _CORE >> 4) << 32
    address = f"mov.u64 %q4, tile_{name};\nshr.u64 %q4, %q4, 4;\nand.b64 %q4, %q4, 0x3FFF;"
    return f"{address}\nor.b64 %q{register}, %q4, {fixed};"


def _list(name: str, count: int) -> str:
    return "{" + ", ".join(f"%{name}{i}" for i in range(count)) + "}"


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise KernelError("there is no CUDA driver here", got=str(error), wanted="libcuda.so.1") from error


@cache
def _function(text: str) -> ctypes.c_void_p:
    driver, module, function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    log = ctypes.create_string_buffer(8192)
    options = (ctypes.c_int * 2)(5, 6)  # CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES
    values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
    status = driver.cuModuleLoadDataEx(ctypes.byref(module), text.encode(), 2, options, values)
    said = cut(log.value.decode(errors="replace").strip(), 400)
    _require(driver, status, f"the driver does not take the probe: {said}")
    _require(driver, driver.cuModuleGetFunction(ctypes.byref(function), module, b"probe"), "the module has no probe")
    return function


def _require(driver: ctypes.CDLL, status: int, what: str) -> None:
    if status:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(name))
        raise KernelError(what, got=(name.value or b"").decode() or str(status), wanted="CUDA_SUCCESS")
