"""Tables whose columns are sorted by a click on their heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twofour.report.markup import Markup, tag

LONG = 16
"""Rows from which a table scrolls in itself."""


@dataclass(frozen=True)
class Cell:
    """One cell.

    Attributes:
        text: What it shows.
        kind: "number", "name", "text" or "", how it is set.
        value: What it is sorted by, None for its text.
    """

    text: str
    kind: str = ""
    value: str | None = None


def number(value: float | None, digits: int) -> Cell:
    """Return the cell of a number, which is sorted by its value; an empty one of None."""
    return Cell("", "number", "") if value is None else Cell(f"{value:,.{digits}f}", "number", repr(float(value)))


def table(head: Sequence[str], rows: Sequence[Sequence[str | Cell]], marked: Sequence[bool] = ()) -> Markup:
    """Return a table; a column that is empty in every row is left out, and rows in `marked` are ours."""
    cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    shown = [column for column in range(len(head)) if not cells or any(row[column].text for row in cells)]
    heads = [
        tag("th", tag("button", head[column], type="button"), scope="col", aria_sort="none",
            class_="number" if any(row[column].kind == "number" for row in cells) else None)
        for column in shown
    ]  # fmt: skip
    body = [
        tag(
            "tr",
            *(_cell(row[column]) for column in shown),
            class_="ours" if index < len(marked) and marked[index] else None,
        )
        for index, row in enumerate(cells)
    ]
    made = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *body))
    return tag(
        "div", made, class_="scroll long" if len(cells) >= LONG else "scroll", tabindex=0, role="region",
        aria_label=f"Table: {', '.join(head[column] for column in shown)}",
    )  # fmt: skip


def _cell(cell: Cell) -> Markup:
    return tag("td", cell.text, class_=cell.kind or None, data_value=cell.value)
