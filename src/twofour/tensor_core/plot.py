"""Drawings of the tables: codes, fragments of an instruction, who supplies metadata, and the layouts in memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from twofour.drawing import drawn
from twofour.errors import PackingError
from twofour.tensor_core.element import Element
from twofour.tensor_core.fragments import a_places, b_places, c_places, code_places, suppliers
from twofour.tensor_core.instruction import INSTRUCTIONS, Instruction, instruction
from twofour.tensor_core.operand import CODES
from twofour.tensor_core.sm90 import code_order
from twofour.tensor_core.warp import record_words

COLOURS = ("#a6cee3", "#b2df8a", "#fdbf6f", "#cab2d6")
"""One for each place in a group of four lanes."""

KEPT, DROPPED = "#6fae5c", "#f2f2f2"
TABLES = "twofour.tensor_core.fragments"

FIGURES = {
    "sparse-codes.svg": lambda path: plot_codes(path),
    "sparse-bf16.svg": lambda path: plot(instruction("mma.sp.m16n8k32.bf16"), path),
    "sparse-metadata.svg": lambda path: plot_metadata(path),
    "sparse-layouts.svg": lambda path: plot_layouts(path),
}
"""Name in docs/figures -> what draws it."""


def plot_all(folder: str | os.PathLike[str]) -> list[Path]:
    """Draw every figure of docs/sparse_tensor_core.md into a folder; needs matplotlib.

    Raises:
        PackingError: matplotlib is not installed, or a file cannot be written.
    """
    paths = [Path(folder) / name for name in FIGURES]
    for path in paths:
        FIGURES[path.name](path)
    return paths


def plot(row: Instruction, path: str | os.PathLike[str]) -> None:
    """Draw which lane and register of a warp holds which part of A, the metadata, B and D.

    Raises:
        PackingError: matplotlib is not installed, or the file cannot be written.
    """
    e = row.a.per_word
    with drawn(path, (13, 8.6), PackingError, TABLES) as figure:
        axes = figure.subplot_mosaic([["a", "b"], ["codes", "d"]], width_ratios=(3, 2), height_ratios=(1, 1))
        _grid(axes["a"], a_places(row), e, (row.m, row.k // 2), "A, stored: row by kept value", lambda r: f"a{r}")
        _codes(axes["codes"], row, 0)
        _grid(axes["b"], b_places(row), e, (row.k, 8), "B: row of K by column", lambda r: f"b{r}", down=True)
        _grid(axes["d"], c_places(row), 2, (16, 8), "C and D: row by column", lambda r: f"d{2 * r} d{2 * r + 1}")
        figure.suptitle(
            f"{row.name}: lane and register of each element (T5 a1: register 1 of lane 5). PTX ISA {row.section}; "
            f"{row.evidence}"
        )


def plot_metadata(path: str | os.PathLike[str]) -> None:
    """Draw who supplies the metadata, for the four ways there are.

    Raises:
        PackingError: matplotlib is not installed, or the file cannot be written.
    """
    seen: dict[tuple[int, int], Instruction] = {}
    for row in INSTRUCTIONS.values():
        if row.family == "mma.sp":
            seen.setdefault((row.rows_per_word, row.holders), row)
    with drawn(path, (14, 7.6), PackingError, TABLES) as figure:
        axes = figure.subplots(1, len(seen), width_ratios=[row.chunks for row in seen.values()])
        for place, row in zip(axes, seen.values(), strict=True):
            _codes(place, row, row.selectors - 1)
            alike = [
                f"k{other.k} {other.a.name}"
                for other in INSTRUCTIONS.values()
                if (other.rows_per_word, other.holders, other.family) == (row.rows_per_word, row.holders, "mma.sp")
            ]
            place.set_title(f"selector {row.selectors - 1} of 0..{row.selectors - 1}\n" + _lines(alike), fontsize=8)
        figure.suptitle("Codes of A, 16 rows by chunks: the lane that supplies each, and its bits")


def plot_codes(path: str | os.PathLike[str]) -> None:
    """Draw the codes of a chunk for each width of element, and what a code chooses of B.

    Raises:
        PackingError: matplotlib is not installed, or the file cannot be written.
    """
    with drawn(path, (13, 3.6), PackingError, TABLES) as figure:
        left, middle, right = figure.subplots(1, 3, width_ratios=(3, 2, 3))
        for line, code in enumerate(CODES):
            kept = {code & 3, code >> 2}
            _chunk(left, 0, line, [position in kept for position in range(4)], f"{code:#06b}")
            _chunk(middle, 0, line, [position // 2 in kept for position in range(8)], f"{code:#06b}")
        for line, code in enumerate((0b0100, 0b1110)):
            _chunk(left, 7.5, line, [line == 0, line == 1], f"{code:#06b}")
        left.set_title("2:4 of f16, bf16, s8, u8, e4m3, e5m2; 1:2 of tf32 (right)")
        middle.set_title("4:8 in pairs, of s4 and u4")
        for axes, width in ((left, 12), (middle, 11)):
            _bare(axes, width, len(CODES))
        _chosen(right)


def plot_layouts(path: str | os.PathLike[str]) -> None:
    """Draw where the metadata of bfloat16 stands in the layouts, and a warp's record.

    Raises:
        PackingError: matplotlib is not installed, or the file cannot be written.
    """
    row = instruction("mma.sp.m16n8k32.bf16")
    with drawn(path, (13, 6.4), PackingError, TABLES) as figure:
        grid = figure.add_gridspec(2, 2, height_ratios=(5, 1))
        _sm80(figure.add_subplot(grid[0, 0]), row)
        _atom(figure.add_subplot(grid[0, 1]), row.a)
        _record(figure.add_subplot(grid[1, :]), row)


def _grid(
    axes: Any,
    places: tuple[Tensor, Tensor],
    together: int,
    shape: tuple[int, int],
    title: str,
    name: Callable[[int], str],
    down: bool = False,
) -> None:
    """Draw a matrix whose neighbours of one register, `together` of them, are one box."""
    rows, columns = places[0][:, ::together], places[1][:, ::together]
    size = (1, together) if down else (together, 1)
    for lane in range(len(rows)):
        for register in range(rows.shape[1]):
            corner = int(columns[lane, register]), int(rows[lane, register])
            _box(axes, corner, size, COLOURS[lane % 4], f"T{lane} {name(register)}")
    _framed(axes, shape, title)


def _codes(axes: Any, row: Instruction, selector: int) -> None:
    """Draw the codes, those of a word and a row as one box."""
    rows, chunks = code_places(row)
    per_row = 8 // row.rows_per_word
    for index, lane in enumerate(suppliers(row, selector).tolist()):
        for part in range(row.rows_per_word):
            corner = int(chunks[index, part * per_row]), int(rows[index, part * per_row])
            bits = f"[{4 * per_row * (part + 1) - 1}:{4 * per_row * part}]"
            _box(axes, corner, (per_row, 1), COLOURS[lane % 4], f"T{lane} {bits}")
    _framed(axes, (row.m, row.chunks), f"metadata: row by chunk of {row.a.chunk}, selector {selector}")


def _sm80(axes: Any, row: Instruction) -> None:
    """Which 32-bit word of 128 bytes holds each half row of codes, 32 rows by 32 columns."""
    rows, chunks = code_places(row)
    for selector in range(row.selectors):
        for index, lane in enumerate(suppliers(row, selector).tolist()):
            for part in range(2):
                corner = int(chunks[index, 4 * part]) * 4, int(rows[index, 4 * part]) + 16 * selector
                _box(axes, corner, (16, 1), COLOURS[lane % 4], f"word {lane}, {'low' if part == 0 else 'high'} half")
    _framed(axes, (32, 32), "sm80: where the codes of 32 rows by 32 columns stand in 128 bytes")


def _atom(axes: Any, kind: Element) -> None:
    """First byte of each run of 16 columns of the upper half of an atom of 64 x 128."""
    bytes_of = code_order(kind) // 2
    for m in range(32):
        for k in range(0, 128, 16):
            byte = int(bytes_of[m, k // kind.chunk])
            _box(axes, (k, m), (16, 1), COLOURS[byte // 128], str(byte))
    _framed(axes, (32, 128), f"sm90: first byte of each 16 columns, rows 0 to 31 of an atom of 64 x 128, {kind.name}")


def _record(axes: Any, row: Instruction) -> None:
    """The parts of a warp's record, in bytes."""
    step = 32 * row.a_registers * 4
    for index in range(row.selectors):
        _box(axes, (index * step, 0), (step, 1), COLOURS[index], f"step {index}: lane 0 a0 a1 a2 a3, lane 1 a0 ...")
    total = record_words(row) * 4
    _box(axes, (row.selectors * step, 0), (128, 1), COLOURS[3], "metadata\nT0..T31")
    axes.set_xlim(0, total)
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_xticks([*(index * step for index in range(row.selectors + 1)), total])
    axes.set_title(f"warp-native: a record of {row.name}, 16 rows by {row.k * row.selectors} columns, in bytes")


def _chosen(axes: Any) -> None:
    """A chunk with its code, and the two rows of B that it multiplies."""
    _chunk(axes, 0, 2, [False, True, False, True], "", ["0", "5", "0", "7"])
    for position, value in ((0, "5"), (1, "7")):
        _box(axes, (6.6 + position, 2.1), (0.9, 0.8), KEPT, value)
    axes.text(1.9, 3.4, "a chunk of A", ha="center", va="center")
    axes.text(7.0, 1.7, "stored, code 0b1101", ha="center", va="center")
    for position in range(4):
        kept = position in (1, 3)
        _box(axes, (10.2, position * 1.25 + 0.4), (1.8, 0.9), KEPT if kept else DROPPED, f"B[{position}]")
        if kept:
            start = (8.5, 2.4) if position == 1 else (8.5, 2.7)
            arrow = {"arrowstyle": "->", "color": "#555555"}
            axes.annotate("", xy=(10.15, position * 1.25 + 0.85), xytext=start, arrowprops=arrow)
    axes.text(6.2, 5.4, "D += 5 B[1] + 7 B[3]; B[0] and B[2] do not count", ha="center", va="center")
    axes.set_title("what a code chooses")
    _bare(axes, 12.4, 6)


def _chunk(axes: Any, x: float, line: int, kept: list[bool], code: str, text: list[str] | None = None) -> None:
    for position, keep in enumerate(kept):
        label = text[position] if text else str(position)
        _box(axes, (x + position, line + 0.1), (0.9, 0.8), KEPT if keep else DROPPED, label)
    axes.text(x + len(kept) + 0.2, line + 0.5, code, va="center", family="monospace")


def _box(
    axes: Any, corner: tuple[float, float], size: tuple[float, float], colour: str, text: str, *, fontsize: float = 6
) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle(corner, *size, facecolor=colour, edgecolor="#777777", linewidth=0.4))
    if text:
        middle = corner[0] + size[0] / 2, corner[1] + size[1] / 2
        axes.text(*middle, text, ha="center", va="center", fontsize=fontsize)


def _framed(axes: Any, shape: tuple[int, int], title: str) -> None:
    axes.set_xlim(0, shape[1])
    axes.set_ylim(shape[0], 0)
    axes.set_xticks(range(0, shape[1] + 1, max(1, shape[1] // 8)))
    axes.set_yticks(range(0, shape[0] + 1, max(1, shape[0] // 8)))
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=7)


def _bare(axes: Any, width: float, height: float) -> None:
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")


def _lines(names: list[str]) -> str:
    return "\n".join(", ".join(names[start : start + 3]) for start in range(0, len(names), 3))
