"""The partial order of instruction sets: what a level contains, and what TWOFOUR_ISA allows."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import each_row
from tests.turns import SPREAD
from twofour import native
from twofour.errors import KernelError
from twofour.kernels.base import Row
from twofour.kernels.nm_matmul import native_rows
from twofour.native import InstructionSet

DEF = Path(__file__).parent.parent.parent / "src/twofour/native/isa.def"  # the wheel has no sources
CACHED = (native._allowed, native._within, native.level)

TWO_BRANCHES = {
    name: InstructionSet(name, level, tuple(parents.split()))
    for name, level, parents in (
        ("scalar", "scalar", ""),
        ("avx2", "avx2", "scalar"),
        ("avx_vnni", "avx_vnni", "avx2"),
        ("avx512", "avx512", "avx2"),
        ("avx512_vnni", "avx512", "avx512"),
        ("avx512_vbmi", "avx512", "avx512_vnni"),
        ("amx", "amx", "avx512_vbmi"),
        ("neon", "neon", "scalar"),
        ("neon_i8mm", "neon", "neon"),
    )
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A CPU with the sets named, among those of two architectures."""

    def forget() -> None:
        for function in CACHED:
            function.cache_clear()

    def make(*has: str, cap: str = "") -> None:
        monkeypatch.setattr(native, "instruction_sets", lambda: TWO_BRANCHES)
        monkeypatch.setattr(native, "_cpu_has", has.__contains__)
        monkeypatch.setenv("TWOFOUR_ISA", cap)
        forget()

    forget()
    yield make
    forget()


def usable() -> list[str]:
    return [name for name in TWO_BRANCHES if native.supports(name)]


def test_a_level_contains_its_ancestors_and_their_extensions_and_no_other_branch(machine) -> None:
    x86 = ("scalar", "avx2", "avx512", "avx512_vnni", "avx512_vbmi", "amx")
    for cap, allowed in (("", x86), ("amx", x86), ("avx512", x86[:5]), ("avx2", x86[:2]), ("neon", x86[:1])):
        machine(*x86, cap=cap)
        assert usable() == list(allowed), cap
        assert native.isa() == ([name for name in allowed if TWO_BRANCHES[name].level == name])[-1]
    arm = ("scalar", "neon", "neon_i8mm")
    for cap, allowed in (("", arm), ("neon", arm), ("scalar", arm[:1]), ("amx", arm[:1])):
        machine(*arm, cap=cap)
        assert usable() == list(allowed), cap


def test_of_two_branches_that_a_cpu_has_the_later_is_the_level_and_a_cap_names_either(machine) -> None:
    both = ("scalar", "avx2", "avx_vnni", "avx512", "avx512_vnni")
    for cap, allowed in (("", both), ("avx_vnni", both[:3]), ("avx512", (*both[:2], *both[3:])), ("avx2", both[:2])):
        machine(*both, cap=cap)
        assert usable() == list(allowed), cap
        assert native.isa() == (cap or "avx512")
    machine(*both[:3])  # a client CPU
    assert usable() == list(both[:3]) and native.isa() == "avx_vnni"
    machine("scalar", "avx2", "avx512", "avx512_vnni", cap="avx_vnni")
    assert usable() == ["scalar", "avx2"] and native.isa() == "avx2"


def test_a_set_that_is_no_level_allows_what_it_contains_alone(machine) -> None:
    x86 = ("scalar", "avx2", "avx512", "avx512_vnni", "avx512_vbmi", "amx")
    machine(*x86, cap="avx512_vnni")
    assert usable() == list(x86[:4]) and native.isa() == "avx512"
    machine(*x86, cap="avx512_vbmi")
    assert usable() == list(x86[:5]) and native.isa() == "avx512"
    machine(*x86[:3], cap="avx512_vnni")  # which the CPU lacks
    assert usable() == list(x86[:3]) and native.isa() == "avx512"


def test_words_name_the_extensions_where_they_are_not_all(machine) -> None:
    x86 = ("scalar", "avx2", "avx512", "avx512_vnni", "avx512_vbmi")
    for has, cap, words in (
        *((x86, "", "avx512"), (x86, "avx512", "avx512"), (x86, "avx512_vbmi", "avx512")),
        *((x86, "avx512_vnni", "avx512 with avx512_vnni"), (x86[:4], "", "avx512 with avx512_vnni")),
        *((x86[:3], "", "avx512 alone"), (x86, "avx2", "avx2"), (x86, "scalar", "scalar")),
    ):
        machine(*has, cap=cap)
        assert native.isa_text() == words, (has, cap)
    machine(*x86, cap="avx512_vnni")
    allowed = "this CPU and TWOFOUR_ISA allow avx512 with avx512_vnni"
    assert native.unavailable("avx512_vbmi") == f"needs avx512_vbmi; {allowed}"


def test_a_cpu_with_vnni_alone_runs_its_rows_and_none_of_vbmi(machine) -> None:
    machine("scalar", "avx2", "avx512", "avx512_vnni")
    assert usable() == ["scalar", "avx2", "avx512", "avx512_vnni"] and native.isa() == "avx512"


def test_what_the_cpu_lacks_is_never_used(machine) -> None:
    machine("scalar", "avx2", "avx512")
    assert usable() == ["scalar", "avx2", "avx512"] and native.isa() == "avx512"


def test_ranks_are_the_order_of_the_levels(machine) -> None:
    machine("scalar")
    ranks = [native.level(name) for name in TWO_BRANCHES]
    assert ranks == [0, 1, 2, 3, 3, 3, 4, 5, 5]


def test_a_set_that_is_none_is_refused(machine) -> None:
    machine("scalar", cap="avx512_vnny")
    with pytest.raises(KernelError, match="names no instruction set") as error:
        native.isa()
    assert "one of scalar, avx2, avx_vnni, avx512, avx512_vnni, avx512_vbmi, amx, neon, neon_i8mm" in str(error.value)


def test_the_extension_has_the_rows_of_the_file_parents_first() -> None:
    found = native.instruction_sets()
    here = "arm" if platform.machine() in ("aarch64", "arm64") else "x86"
    rows = re.findall(rf'^TWOFOUR_ISA\((\w+), (?:any|{here}), (\w+), "([\w ]*)", "', DEF.read_text(), re.M)
    assert [(one.name, one.level, " ".join(one.parents)) for one in found.values()] == rows and rows
    names = list(found)
    for one in found.values():
        assert one.level in found and all(names.index(parent) < names.index(one.name) for parent in one.parents)
        for parent in one.parents:
            assert native.extension().cpu_has(parent) or not native.extension().cpu_has(one.name)


def test_what_vbmi_makes_faster_runs_without_it_too_but_for_the_tables() -> None:
    rows = [row for table in native.tables().values() for row in table]
    alone = {row.name.removesuffix("__avx512_vbmi") for row in rows if row.isa == "avx512_vbmi"}
    below = {row.name.removesuffix("__avx512_vnni") for row in rows if row.isa == "avx512_vnni"}
    assert alone - below == alone & {"bits_matmul_tables", "bits_conv_lookups"}
    assert native.extensions("avx512") == frozenset(), "a level has its name for all of it"
    if "avx512_vnni" in native.instruction_sets():
        assert native.extensions("avx512_vnni") == {"avx512_vbmi", "avx512_vpopcntdq"}


@pytest.mark.skipif(SPREAD, reason="every row is an item of its own")
def test_the_tests_name_sets_above_the_cap_with_the_reason_and_run_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOUR_ISA", "scalar")
    ran: list[Row] = []

    def append(row: Row) -> None:
        ran.append(row)

    test: Any = each_row(native_rows())(append)
    cases = test.pytestmark[0].args[1]
    assert [case.id for case in cases] == list(dict.fromkeys(row.isa for row in native_rows()))
    for case in cases:
        (rows,) = case.values
        assert rows == [row for row in native_rows() if row.isa == case.id]
        reasons = [mark.kwargs["reason"] for mark in case.marks if mark.name == "skip"]
        assert reasons == ([] if case.id == "scalar" else [f"needs {case.id}; this CPU and TWOFOUR_ISA allow scalar"])
        test(row=rows)
    assert sorted(row.name for row in ran) == sorted(row.name for row in native_rows())
