"""Records of the case `models` as a table: times, throughput and the three figures."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from cases.columns import headed, milliseconds
from cases.models import DENSE, DENSE_STATIC, OPENVINO, PEERS, SPARSE, SPARSE_STATIC
from cases.records import machine_line
from twofour.measure import Record

OURS = (DENSE, DENSE_STATIC, SPARSE, SPARSE_STATIC)
COLUMNS = ("model", "dtype", "batch", "threads", *PEERS, *OURS, "per second", "spread", "A/A")
FIGURES = (
    *("dense / best peer", "dense / OpenVINO", "2:4 / dense", "2:4 / best peer", "2:4 / OpenVINO"),
    *("static dense / OpenVINO", "static 2:4 / OpenVINO"),
)


def figures(record: Record) -> dict[str, float | None]:
    """Return the ratios of times by name, None where a side is missing; lower is better."""
    best = record.fastest(record.baseline) if record.baseline else ""
    sides = {"best peer": best, "OpenVINO": OPENVINO, "dense": DENSE, "2:4": SPARSE}
    sides |= {"static dense": DENSE_STATIC, "static 2:4": SPARSE_STATIC}
    found: dict[str, float | None] = {}
    for name in FIGURES:
        over, under = (sides[word] for word in name.split(" / "))
        both = over in record.timings and under in record.timings
        found[name] = record.median(over) / record.median(under) if both else None
    return found


def show_models(records: Sequence[Record], console: Console) -> None:
    """Print milliseconds of each runtime, then the figures, then what is missing and why."""
    console.print("\nmilliseconds per call, medians; - where a runtime has no such model", style="bold")
    table = headed(COLUMNS, words=2)
    for record in records:
        table.add_row(*_case(record), *(milliseconds(record, name) for name in (*PEERS, *OURS)), *_quality(record))
    console.print(table)
    console.print("\ntimes of the first over the second; below 1 the first is faster", style="bold")
    table = headed((*COLUMNS[:4], *FIGURES, "best peer"), words=2)
    for record in records:
        values = (f"{value:.2f}" if value else "-" for value in figures(record).values())
        table.add_row(*_case(record), *values, record.fastest(record.baseline) if record.baseline else "-")
    console.print(table)
    for line in _missing(records):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for note in dict.fromkeys(f"{record.meta['model']}: {record.meta['note']}" for record in records):
        console.print(note, highlight=False, markup=False)
    console.print(machine_line(records[-1]), highlight=False, markup=False, soft_wrap=True)


def _case(record: Record) -> tuple[str, ...]:
    return (*(str(record.meta[name]) for name in ("model", "dtype", "batch")), str(record.threads))


def _quality(record: Record) -> tuple[str, str, str]:
    ours = SPARSE if SPARSE in record.timings else record.fastest()
    rate = int(str(record.meta["tokens_per_call"])) / record.median(ours)
    spread = max(record.spread(name) for name in record.timings)
    return f"{rate:.1f}", f"{spread:.0%}", f"{record.noise or 0:.0%}"


def _missing(records: Sequence[Record]) -> list[str]:
    lines = []
    for record in records:
        missing = record.meta.get("missing")
        assert isinstance(missing, dict), missing
        lines += [f"not built: {' '.join(_case(record)[:2])}: {name}: {reason}" for name, reason in missing.items()]
    return list(dict.fromkeys(lines))
