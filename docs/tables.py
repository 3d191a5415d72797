"""Write the table of docs/kernels.md from the list that `twofour kernels --json` writes; `make tables` runs this.

The page lists the kernels of x86-64: on other processors the extension has fewer.
"""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

from twofour.kernels.table import Listed, listing

PAGE = Path(__file__).parent / "kernels.md"
START, END = "<!-- written by `make tables` -->", "<!-- end of what is written -->"


def table() -> str:
    """Return a line for each name without its hardware, in an order that does not depend on the list's."""
    lines = ["| kernel | pattern | type | hardware |", "| --- | --- | --- | --- |"]
    for name, group in groupby(sorted(listing(), key=_order), key=_without_hardware):
        rows = list(group)
        patterns = ", ".join(dict.fromkeys(row.pattern for row in rows))
        types = ", ".join(dict.fromkeys(row.dtype for row in rows))
        lines.append(f"| `{name}` | {patterns} | {types} | {', '.join(map(_hardware, rows))} |")
    return "\n".join(lines)


def write() -> None:
    """Write the table between the two marks of the page."""
    head, rest = PAGE.read_text().split(START)
    PAGE.write_text(f"{head}{START}\n{table()}\n{END}{rest.split(END)[1]}")


def _without_hardware(kernel: Listed) -> str:
    return kernel.name.partition("__")[0]


def _order(kernel: Listed) -> list[tuple[int, str]]:
    """Alphabetical, numbers by size: b8 before b16."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", kernel.name)]


def _hardware(kernel: Listed) -> str:
    suffix = kernel.name.partition("__")[2]
    return f"`{suffix}`" if kernel.isa in (suffix, "any") else f"`{suffix}` from {kernel.isa}"


if __name__ == "__main__":
    write()
