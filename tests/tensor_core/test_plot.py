"""Drawings come out of the tables, the same each time, and the page keeps step with the table."""

import re
from pathlib import Path

import pytest

from tests.turns import in_turn
from twofour import tensor_core
from twofour.tensor_core import INSTRUCTIONS, instruction, sm80, sm90
from twofour.tensor_core.fragments import suppliers
from twofour.tensor_core.plot import FIGURES, plot, plot_all

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "sparse_tensor_core.md").read_text()


def test_a_drawing_names_every_register_of_every_lane(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs requirements/figures.txt")
    row = instruction("mma.sp.m16n8k8.tf32")
    plot(row, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    labels = re.findall(r">(T\d+ [^<]+)<", text)
    assert len(labels) == len(set(labels)) == 32 * (2 + 2 + 2) + 8 * 2
    assert {"T5 a1", "T31 b1", "T0 d2 d3", "T4 [15:0]", "T4 [31:16]"} <= set(labels)
    assert "confirmed on sm_90" in text


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_in_the_page(name: str) -> None:
    assert f"`docs/figures/{name}`" in PAGE


def test_all_figures_are_drawn_and_show_the_table(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs requirements/figures.txt")
    assert [path.name for path in plot_all(tmp_path) if path.stat().st_size] == list(FIGURES)
    row = instruction("mma.sp.m16n8k32.bf16")
    text = (tmp_path / "sparse-bf16.svg").read_text()
    labels = set(re.findall(r">(T\d+ [^<]+)<", text))
    lanes = range(32)
    wanted = {f"T{lane} {name}{r}" for lane in lanes for name in "ab" for r in range(4)}
    wanted |= {f"T{lane} d{r} d{r + 1}" for lane in lanes for r in (0, 2)}
    wanted |= {f"T{lane} {bits}" for lane in suppliers(row, 0).tolist() for bits in ("[15:0]", "[31:16]")}
    assert labels == wanted
    assert f"{row.section}; {row.evidence}" in text


@in_turn("row", INSTRUCTIONS.values(), ids=lambda row: row.name)
def test_the_page_says_of_each_instruction_what_the_table_says(row: tensor_core.Instruction) -> None:
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| `{row.name}` |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    registers = f"{row.a_registers} / {row.b_registers or 'shared memory'}"
    selectors = "0" if row.selectors == 1 else f"0 to {row.selectors - 1}"
    assert cells[1:] == [
        ", ".join(kind.name for kind in row.partners),
        ", ".join(row.accumulators),
        registers,
        str(row.holders),
        selectors,
        row.arch,
        row.section,
        row.evidence,
    ]


def test_the_page_has_every_public_name_and_what_is_unverified() -> None:
    assert [name for name in tensor_core.__all__ if f"`{name}" not in PAGE] == []
    layouts = next(line for line in PAGE.splitlines() if line.startswith("| CUTLASS sm80"))
    for name in tensor_core.ELEMENTS:
        before, after = layouts.split("u8, e4m3, e5m2, s4, u4: derived, unverified")
        assert (name in ("u8", "e4m3", "e5m2", "s4", "u4")) == (sm80.evidence(name) == "derived, unverified"), (
            before + after
        )
    assert sm90.evidence("bf16") in PAGE
