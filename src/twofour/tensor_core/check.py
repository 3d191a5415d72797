"""The GPU that is here against the emulator, instruction by instruction: `python -m twofour.tensor_core.check [FILE]`.

Prints a line per instruction and writes what was found as JSON; without a GPU it says so. Values are whole numbers that
every type holds, so that every order of summing is exact and a difference is one of place, not of rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twofour.errors import TwofourError
from twofour.files import replacing
from twofour.measure import machine
from twofour.measure.gpu import gpu_facts
from twofour.native.gpu import unavailable
from twofour.tensor_core import probe
from twofour.tensor_core.bits import MMA_B1, BitInstruction, execute_b1
from twofour.tensor_core.discover import Machine, code_slots, expected_slots
from twofour.tensor_core.element import Element
from twofour.tensor_core.execute import ACCUMULATORS, execute
from twofour.tensor_core.fragments import a_registers, b_registers, c_registers, metadata_registers
from twofour.tensor_core.instruction import INSTRUCTIONS, Instruction
from twofour.tensor_core.operand import Operand

BLOCKS = 4
"""Instructions of a check side by side, each with its own operands."""

Variant = dict[str, Any]
"""The arguments of `probe.source` behind the instruction."""


def variants(row: Instruction) -> Iterator[Variant]:
    """Yield every accumulator, partner, selector and source of A, one changed at a time."""
    plain = {"accumulator": row.accumulators[0], "b": row.a.name, "selector": 0, "n": row.widths[0]}
    yield plain
    yield from ({**plain, "accumulator": name} for name in row.accumulators[1:])
    yield from ({**plain, "b": kind.name} for kind in row.partners if kind != row.a)
    yield from ({**plain, "selector": selector} for selector in range(1, row.selectors))
    if row.a.integer:
        yield {**plain, "saturate": True}
    if row.family == "mma.sp":
        yield {**plain, "ordered": True}
    else:
        yield {**plain, "shared_a": True, "n": 64, "selector": row.selectors - 1}
        yield {**plain, "n": 256}


def operands(row: Instruction, variant: Variant, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make A, B, C and metadata for `execute`, `BLOCKS` instructions; column 0 of C holds the largest whole number."""
    generator = torch.Generator().manual_seed(seed)
    operand = _random(row, generator)
    partner = next(kind for kind in row.partners if kind.name == variant["b"])
    stored = row.a.from_raw(row.a.raw(operand.values).view(BLOCKS, row.m, -1))
    b = _small(partner, (BLOCKS, row.k, variant["n"]), generator)
    high = 2**31 - 1 if row.a.integer else 64
    c = torch.randint(-high, high, (BLOCKS, row.m, variant["n"]), generator=generator, device="cpu")
    c[..., 0] = high
    metadata = metadata_registers(row, operand.codes.view(BLOCKS, row.m, -1), variant["selector"])
    b = b_registers(row, b, partner) if row.family == "mma.sp" else b
    a = stored if variant.get("shared_a") else a_registers(row, stored)
    return a, b, c_registers(row, c.to(ACCUMULATORS[variant["accumulator"]])), metadata


def emulated(row: Instruction, variant: Variant) -> Machine:
    """Return the emulator as a machine."""
    options = {key: variant[key] for key in ("accumulator", "selector", "ordered", "saturate") if key in variant}
    return lambda a, b, c, metadata: execute(row, a, b, c, metadata, b_type=variant["b"], **options)


def on_gpu(row: Instruction, variant: Variant) -> Machine:
    """Return the current GPU as a machine; tiles go through shared memory."""
    text = probe.source(row, **variant)

    def run(a: Tensor, b: Tensor, c: Tensor, metadata: Tensor) -> Tensor:
        if row.family == "wgmma.sp":
            kind = next(kind for kind in row.partners if kind.name == variant["b"])
            b = probe.tile_words(row.a.bits, kind.raw(b).transpose(-1, -2))
            a = probe.tile_words(row.a.bits, row.a.raw(a)) if variant.get("shared_a") else a
        return probe.run(text, row, a, b, c, metadata)

    return run


def check(row: Instruction) -> dict[str, object]:
    """Compare the GPU with the emulator on every variant, and its metadata with the table.

    Returns:
        JSON-ready: "agrees", the "variants" that were run, those that differ, and the selectors whose metadata stands
        elsewhere ("moved", with what was found instead: 8 * lane + place for each row and chunk).

    Raises:
        KernelError: The driver refuses the kernel.
    """
    tried = list(variants(row))
    differing = []
    for variant in tried:
        given = operands(row, variant)
        if not torch.equal(on_gpu(row, variant)(*given), emulated(row, variant)(*given)):
            differing.append(variant)
    moved = {}
    for selector in range(row.selectors):
        found = code_slots(row, on_gpu(row, plain(row, selector)))
        if not torch.equal(found, expected_slots(row, selector)):
            moved[str(selector)] = found.tolist()
    return {"agrees": not differing and not moved, "variants": len(tried), "differing": differing, "moved": moved}


def check_bits(row: BitInstruction) -> dict[str, object]:
    """Compare the GPU with the emulator on `BLOCKS` products of random bits; JSON-ready, as of `check`.

    Raises:
        KernelError: The driver refuses the kernel.
    """
    random = torch.Generator().manual_seed(0)
    a, b, c = (
        torch.randint(-(2**31), 2**31, (BLOCKS, row.lanes, count), generator=random, device="cpu").to(torch.int32)
        for count in row.registers
    )
    c >>= 1  # no sum of 256 ones wraps around
    want = torch.stack([execute_b1(row, *given) for given in zip(a, b, c, strict=True)])
    unread = torch.zeros(1, dtype=torch.int32, device="cpu")
    same = torch.equal(probe.run(probe.bit_source(row), row, a, b, c, unread), want)
    return {"agrees": same, "variants": 1, "differing": [] if same else [{}], "moved": {}}


def plain(row: Instruction, selector: int) -> Variant:
    """Return the variant that `code_slots` asks."""
    n = 8 if row.family == "mma.sp" else 16
    return {"accumulator": row.accumulators[0], "b": row.a.name, "selector": selector, "n": n}


def missing(row: Instruction | BitInstruction) -> str | None:
    """Return why the instruction cannot run here, or None: it needs its architecture, and an `a` one exactly that."""
    number = int(row.arch.strip("sma_"))
    reason = unavailable((number // 10, number % 10))
    if reason is None and row.arch.endswith("a") and torch.cuda.get_device_capability() != (number // 10, number % 10):
        return f"needs {row.arch} exactly"
    return reason


def main(arguments: list[str]) -> int:
    """Check every instruction, print a line each, and write the JSON; 1 when one disagrees, 2 for a bad path."""
    given = argparse.ArgumentParser(
        prog="python -m twofour.tensor_core.check", description="Compare the GPU that is here with the emulator."
    )
    given.add_argument("file", nargs="?", type=Path, help="where what was found is written, as JSON")
    file = given.parse_args(arguments).file
    if file is not None and (why := _unwritable(file)):  # now, not after the instructions have run
        print(f"{file} cannot be written: {why}", file=sys.stderr)
        return 2
    found: dict[str, object] = {}
    rows = (*INSTRUCTIONS.values(), *MMA_B1)
    for name, row in ((row.name, row) for row in rows):
        if reason := missing(row):
            found[name] = {"skipped": reason}
        else:
            try:
                found[name] = check_bits(row) if isinstance(row, BitInstruction) else check(row)
            except TwofourError as error:
                found[name] = {"agrees": False, "error": str(error)}
        print(name, _line(found[name]))
    if reason := unavailable():
        print(f"no instruction was run: {reason}; run this on a machine with one (docs/gpu.md)")
    if file is not None:
        facts = {"gpu": None if reason else gpu_facts(), "machine": machine()}
        with replacing(file) as temporary:
            temporary.write_text(json.dumps({**facts, "instructions": found}, indent=1) + "\n")
    return int(
        any("agrees" in result and not result["agrees"] for result in found.values() if isinstance(result, dict))
    )


def _unwritable(file: Path) -> str:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            return "it is a folder"
        tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _line(result: Any) -> str:
    if "skipped" in result:
        return f"not run: {result['skipped']}"
    if result["agrees"]:
        return f"agrees with the emulator, {result['variants']} variants"
    return "DIFFERS: " + (
        result.get("error") or f"{len(result['differing'])} variants, metadata moved {bool(result['moved'])}"
    )


def _random(row: Instruction, generator: torch.Generator) -> Operand:
    """Random kept units; four fifths of their values are not zero."""
    kind, shape = row.a, (row.m * BLOCKS, row.k)
    order = torch.rand(
        shape[0], row.chunks, kind.chunk // kind.unit, generator=generator, dtype=torch.float32, device="cpu"
    ).argsort(-1)
    keep = (order < kind.kept // kind.unit).repeat_interleave(kind.unit, -1).view(shape)
    keep &= torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu") < 0.8
    return Operand.from_dense(kind.from_raw(kind.raw(_small(kind, shape, generator)) * keep), kind)


def _small(kind: Element, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    low = 0 if kind.name.startswith("u") else -3
    return torch.randint(low, 4, shape, generator=generator, device="cpu").to(torch.float32).to(kind.dtype)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
