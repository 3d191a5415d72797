"""The table of instructions: counts that must come out, names, and what is said of the evidence."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.turns import in_turn
from twofour.errors import PackingError
from twofour.tensor_core import ELEMENTS, INSTRUCTIONS, MMA_SP, WGMMA_SP, instruction, widest
from twofour.tensor_core.bits import MMA_B1
from twofour.tensor_core.check import variants
from twofour.tensor_core.instruction import CHECKED, CONFIRMED, DERIVED

ROWS = list(INSTRUCTIONS.values())


@in_turn("row", ROWS)
def test_registers_hold_every_element_and_every_code_once(row) -> None:
    assert row.a_registers * row.lanes * row.a.per_word == row.m * row.k // 2
    assert row.holders * row.lanes // 4 * 8 == row.m * row.chunks
    if row.family == "mma.sp":
        assert row.b_registers * 32 * row.a.per_word == row.k * 8
    assert row.selectors * row.holders == 4
    assert row.section.startswith("9.7.14.6.2." if row.family == "mma.sp" else "9.7.15.6.2.")


def test_all_shapes_of_the_isa_are_there() -> None:
    shapes = {(row.a.name, row.k) for row in MMA_SP}
    assert shapes == {
        *((name, k) for name in ("f16", "bf16") for k in (16, 32)),
        ("tf32", 8), ("tf32", 16), ("e4m3", 64), ("e5m2", 64),
        *((name, k) for name in ("s8", "u8") for k in (32, 64)),
        *((name, k) for name in ("s4", "u4") for k in (64, 128)),
    }  # fmt: skip
    assert {(row.a.name, row.k) for row in WGMMA_SP} == {
        ("f16", 32), ("bf16", 32), ("tf32", 16), ("s8", 64), ("u8", 64), ("e4m3", 64), ("e5m2", 64)
    }  # fmt: skip


def test_nothing_claims_more_than_is_known() -> None:
    rows = INSTRUCTIONS.values()
    derived = {row.name.removeprefix("mma.sp.") for row in rows if replace(row, confirmed=()).evidence == DERIVED}
    assert derived == {
        "m16n8k8.tf32", "m16n8k32.s8", "m16n8k32.u8",
        "m16n8k64.s4", "m16n8k64.u4", "m16n8k128.s4", "m16n8k128.u4",
    }  # fmt: skip
    assert {replace(row, confirmed=()).evidence for row in rows} == {DERIVED, CHECKED}
    assert {row.evidence for row in rows} == {"confirmed on sm_90"}


@pytest.mark.parametrize("arch", CONFIRMED)
def test_what_is_confirmed_has_a_record_of_every_variant(arch: str) -> None:
    record = json.loads((Path(__file__).parent / "records" / f"{arch}.json").read_text())
    assert arch == f"sm_{record['gpu']['capability'].replace('.', '')}"
    found = record["instructions"]
    assert set(found) == {*INSTRUCTIONS, *(row.name for row in MMA_B1)} and all(one["agrees"] for one in found.values())
    assert {name: found[name]["variants"] for name in INSTRUCTIONS} == {
        name: len(list(variants(row))) for name, row in INSTRUCTIONS.items()
    }


def test_opcodes_are_those_of_ptx() -> None:
    assert (
        instruction("mma.sp.m16n8k32.bf16").ptx("f32", "bf16")
        == "mma.sp.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32"
    )
    assert instruction("mma.sp.m16n8k64.u8").ptx("s32", "s8", ordered=True) == (
        "mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.s32.u8.s8.s32"
    )
    assert instruction("wgmma.sp.m64nNk32.f16").ptx("f32", "f16", 128) == (
        "wgmma.mma_async.sp.sync.aligned.m64n128k32.f32.f16.f16"
    )


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(PackingError, match="no such sparse instruction"):
        instruction("mma.sp.m16n8k16.s8")
    with pytest.raises(PackingError, match=r"wgmma\.sp has no instruction for u4"):
        widest(ELEMENTS["u4"], "wgmma.sp")
