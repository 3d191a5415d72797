"""Write the tables of docs/kernels.md and docs/rewriting.md from the lists that the code has; `make tables` runs this.

The page of kernels lists the kernels of x86-64: on other processors the extension has fewer.
"""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

from twofour.graph import ALL_RULES
from twofour.kernels.table import Listed, listing

PAGE = Path(__file__).parent / "kernels.md"
RULES_PAGE = Path(__file__).parent / "rewriting.md"
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


def rules() -> str:
    """Return a line for each rule of algebra, in the order of the code."""
    lines = [
        "| rule | before | after | kind | holds for | error | saves |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for rule in ALL_RULES:
        cells = (rule.name, f"`{rule.before}`", _after(rule.after), rule.kind, rule.domain, rule.bound, rule.saves)
        lines.append(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def _after(after: object) -> str:
    """Return what replaces a pattern; of several forms the first is code."""
    first, comma, rest = str(after).partition(", ") if isinstance(after, str) and "(Q" not in after else (after, "", "")
    return f"`{first}`{comma}{rest}"


def write() -> None:
    """Write the tables between the two marks of their pages."""
    for page, made in ((PAGE, table()), (RULES_PAGE, rules())):
        head, rest = page.read_text().split(START)
        page.write_text(f"{head}{START}\n{made}\n{END}{rest.split(END)[1]}")


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
