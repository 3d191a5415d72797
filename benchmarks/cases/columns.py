"""Tables of text: columns under their heads, words to the left, numbers to the right; what was not built, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.table import Table

from twofour.measure import Record


def headed(heads: Iterable[str], words: int = 1) -> Table:
    """Return a table without rows or borders, of which the first `words` columns hold words."""
    table = Table(box=None, pad_edge=False)
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index >= words else "left")
    return table


def milliseconds(record: Record, name: str, digits: int = 2) -> str:
    """Return the median of a candidate's times, "-" where it was not timed."""
    return f"{record.median(name) * 1e3:.{digits}f}" if name in record.timings else "-"


def show_missing(records: Sequence[Record], named: Callable[[Record], str], console: Console) -> None:
    """Print which candidates were not built for each cell, and why."""
    for record in records:
        missing = record.meta["missing"]
        assert isinstance(missing, dict), missing
        for name, reason in missing.items():
            console.print(
                f"not built: {named(record)}: {name}: {reason}", highlight=False, markup=False, soft_wrap=True
            )
