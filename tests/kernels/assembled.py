"""Compile the Triton kernels to machine code, without a GPU: `python -m tests.kernels.assembled 80 89 90 100`.

Without architectures those of `QUICK` are compiled for Hopper, in a few seconds, and the first for Ampere, too.
"""

import argparse
import re
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twofour.kernels.bits_matmul.cuda import planes_triton
from twofour.kernels.block_matmul.cuda import rows_triton
from twofour.kernels.nm_compress import on_gpu
from twofour.kernels.nm_matmul.cuda import eight_bits_triton, few_tokens_triton
from twofour.patterns import nm_mask_triton, nm_tiles_triton

AFTER = {"BIAS": True, "ACTIVATION": "gelu", "COMBINE": "add"}
FEW = {"PARTIAL": False, "TOKENS": 16, "ROWS": 64, "GROUPS": 32, "INTERPRETED": 0, "ZEROS": False}
TYPES = {"x": "*i64", "codes": "*i32", "scales": "*bf16", "zeros": "*i8", "bias": "*fp32", "other": "*bf16"}
TYPES |= {"y": "*bf16", "partial": "*fp32", "total": "*i32", "x_scale": "*fp32", "w_scale": "*fp32"}
TYPES |= {"scores": "*bf16", "keep": "*i8", "weight": "*bf16", "given": "*i8", "mask": "*i8", "q": "*i8"}
PACKED = {"MASK": True, "ROWS": on_gpu.ROWS, "GROUPS": on_gpu.GROUPS}
PLANES = {name: "*i32" for name in ("inputs", "planes", "sums", "zeros", "row_sums", "levels")}
ROUNDED = {"LEAST": 2.0**-126, "WORDS": 32, "STEPS": 4}

KERNELS: list[tuple[Any, dict[str, Any], dict[str, str]]] = [
    (few_tokens_triton.few_tokens, {**FEW, **AFTER, "DTYPE": tl.bfloat16, "GROUP": 0}, {"values": "*i32", "x": "*i16"}),
    (
        few_tokens_triton.one_to_four_tokens,
        {**FEW, **AFTER, "DTYPE": tl.float16, "GROUP": 64, "TOKENS": 2, "ROWS": 8, "GROUPS": 128},
        {"values": "*u8", "y": "*fp16"},
    ),
    (few_tokens_triton.summed, {**AFTER, "SPLIT": 4, "ROWS": 1024}, {}),
    (nm_mask_triton._mask, {"ABSOLUTE": True, "GROUPS": 1024}, {}),
    (nm_tiles_triton._tiles, {"ABSOLUTE": True, "TILES": 128}, {}),
    (on_gpu._compress, {**PACKED, "GIVEN": False, "CUTLASS": True}, {"values": "*bf16", "codes": "*i16"}),
    (on_gpu._compress, {**PACKED, "GIVEN": True, "CUTLASS": False}, {"values": "*bf16", "codes": "*u8"}),
    (
        eight_bits_triton._rounded,
        {"LARGEST": 448.0, "LEAST": 2.0**-126, "WHOLE": False, "BLOCK": 4096},
        {"x": "*bf16", "q": "*fp8e4nv", "scales": "*fp32"},
    ),
    (eight_bits_triton._rescaled, {**AFTER, "SCALED": True, "TOKENS": 32, "ROWS": 128}, {}),
    (
        rows_triton._row_of_blocks,
        {**AFTER, "TOKENS": 64, "R": 32, "C": 32, "MOST": 0},
        {"x": "*bf16", "values": "*bf16", "starts": "*i32", "columns": "*i32"},
    ),
    (
        planes_triton.product_of_planes,
        {
            **AFTER,
            "X_BITS": 2,
            "W_BITS": 1,
            "FACTOR": 1,
            "TOKENS": 16,
            "ROWS": 64,
            "WORDS": 4,
            "STEPS": 32,
            "INTERPRETED": False,
        },
        PLANES | {"scales": "*fp32", "weight": "*i32", "row_scales": "*fp32"},
    ),
    (
        planes_triton.planes_of_inputs,
        {**ROUNDED, "DYNAMIC": True, "BITS": 2, "ZERO": 0, "FIXED": 0, "ABOVE": 1, "BIPOLAR": False},
        PLANES | {"x": "*bf16", "scales": "*fp32", "given_scale": "fp32"},
    ),
]


QUICK = (0, 1, 5, 7, 9, 10)
"""The products, the packing into CUTLASS's order and float8's rounding: what uses the most of the language."""


def assemble(kernel: Any, fixed: dict[str, Any], types: dict[str, str], architecture: int) -> None:
    names = kernel.arg_names
    known = TYPES | types
    signature = {name: "constexpr" if name in fixed else known.get(name, "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in fixed}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in fixed.items()}, attrs=aligned)
    found = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
    ptx = found.asm["ptx"]
    wide = len(re.findall(r"(?:ld|st)\.global\S*\.v4|cp\.async\.\S+ \[[^]]*\], \[[^]]*\], 0x10", ptx))
    units = " ".join(sorted(set(re.findall(r"wgmma\.mma_async|mma\.sync|popc\.b32", ptx))))
    print(f"{kernel.__name__} sm_{architecture}: {len(found.asm['cubin'])} bytes, {wide} wide accesses, units: {units}")


def architecture_of(text: str) -> int:
    if not re.fullmatch("[0-9]{2,3}", text) or int(text) < 80:
        raise argparse.ArgumentTypeError(f"{text!r} is no architecture with 2:4 units: a number from 80, as of sm_80")
    return int(text)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(prog="python -m tests.kernels.assembled", description=__doc__)
    arguments.add_argument("architectures", nargs="*", type=architecture_of, metavar="ARCHITECTURE")
    asked = arguments.parse_args().architectures
    for index, (kernel, fixed, types) in enumerate(KERNELS):
        for architecture in asked or ((80, 90) if index == 0 else (90,) if index in QUICK else ()):
            if architecture >= 89 or not any("fp8" in kind for kind in types.values()):  # float8 begins with Ada
                assemble(kernel, fixed, types, architecture)
