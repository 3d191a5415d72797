"""The sections of docs/results.md about nets of few bits, drawn from their records alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from low_bit_nets import FLOAT
from over_seeds import difference, interval, paired, signed, values
from records import Brought, Row, load
from tasks import CONVNETS, LOW_BITS, Task

HEAD = """## Low bits: what a row is

Weights and inputs of few bits (`twofour.quantize`), first and last layer 8 bits: `w1a2` has weights of 1 bit and inputs
of 2, `w1.58a8` ternary weights and inputs of 8 bits with a range for each token. Each net starts from the trained
float net of the same seed; **float** is that net trained again for as long, and *difference* is to it. *Rounded* is
the figure before any training in low bits. After training, the answers of 64-bit whole numbers to all held-out
examples give the same figure, and to the example the same bits (on CIFAR-10 to all of them, of compiled kernels too): a
row that did not would not be kept. Where a task's
note says that a layer stays dense, it has 8 bits here.
"""

WITHIN = 3.0
"""Points that w1a2 may lose against the float net: the goal of these tables."""


def sections(folder: Path) -> list[str]:
    """What all tables share, then one section per task that has a record."""
    here = [_section(LOW_BITS[name](), *load(path)) for name, path in _kept(folder, LOW_BITS)]
    brought = [_brought(CONVNETS[name](), *load(path, Brought)) for name, path in _kept(folder, CONVNETS)]
    return [HEAD, *here, *brought] if here or brought else []


def _kept(folder: Path, names: Iterable[str]) -> list[tuple[str, Path]]:
    return [(name, path) for name in names if (path := folder / f"low-bits-{name}.json").exists()]


def _section(task: Task, head: dict[str, Any], rows: list[Row]) -> str:
    hours = sum(row.seconds for row in rows) / 3600
    return "\n".join(
        [
            f"## Low bits: {task.title}\n",
            f"`python experiments/run.py low-bits {task.name} --record`\n",
            *_table(task, head, rows, task.notes.format(epochs=task.epochs)),
            f"Measured in {hours:.1f} h, the last row on {head['machine']['cpu']}; twofour at {_commits(rows)}.\n",
        ]
    )


def _brought(task: Task, head: dict[str, Any], rows: list[Brought]) -> str:
    """Write the section of nets that a GPU trained."""
    said = {
        name: _each(getattr(row, name) for row in rows)
        for name in ("epochs", "start_epochs", "images", "batch", "recipe", "device")
    }
    teacher = ", taught by the float net" if all(row.taught for row in rows) else ""
    low = [row for row in rows if row.key != FLOAT]
    checked = []
    if low:
        checked = [
            f"All {min(row.answers for row in low):,} answers of compiled kernels and the first "
            f"{min(row.whole for row in low):,} of 64-bit whole numbers have the bits of the model that was trained, "
            f"in every row of few bits; accuracy is what those answers give on {head['machine']['cpu']}, float's what "
            "was found there.\n"
        ]
    return "\n".join(
        [
            f"## Low bits: {task.title}\n",
            "`python experiments/gpu_low_bits.py FOLDER` (`--help` has epochs, images, batch, and the CPU), then "
            f"`python experiments/run.py low-bits-from-gpu FOLDER --only {task.name} --record`\n",
            *_table(task, head, rows, task.notes.format(**said, teacher=teacher)),
            *checked,
            f"Trained on {said['device']} in {sum(row.seconds for row in rows) / 60:.0f} minutes; "
            f"twofour at {_commits(rows)}.\n",
        ]
    )


def _each(values: Iterable[object]) -> str:
    return " or ".join(sorted({f"{value:,}" if isinstance(value, int) else str(value) for value in values}))


def _commits(rows: Sequence[Row]) -> str:
    return ", ".join(sorted({row.commit for row in rows}))


def _table(task: Task, head: dict[str, Any], rows: Sequence[Row], notes: str) -> list[str]:
    metric, keys = head["metric"], (FLOAT, *task.low_bits)
    name = metric["name"] + (f" ({metric['unit']})" if metric["unit"] else "")
    of = {key: [row for row in rows if row.key == key] for key in keys}
    missing = [key for key in keys if not of[key]]
    return [
        f"{name}, {metric['held_out']:,} held-out {metric['of']}. {notes}\n",
        f"| net | rounded | {name} | difference to float | seeds |",
        "| --- | --- | --- | --- | --- |",
        *(_line(key, of, metric) for key in keys if of[key]),
        "",
        *_verdict(of),
        *([f"Not run: {', '.join(missing)}.\n"] if missing else []),
    ]


def _line(key: str, of: Mapping[str, Sequence[Row]], metric: dict[str, Any]) -> str:
    rows = of[key]
    value = values([row.value for row in rows], metric)
    if key == FLOAT:
        return f"| {key} | | {value} | | {len(rows)} |"
    rounded = values([row.one_shot for row in rows], metric)
    return f"| {key} | {rounded} | {value} | {difference(rows, of[FLOAT])} | {len(rows)} |"


def _verdict(of: Mapping[str, Sequence[Row]]) -> list[str]:
    """Say whether w1a2 is within what is expected of float, and above w1a1."""
    to_float, to_binary = (paired(of.get("w1a2", []), of.get(key, [])) for key in (FLOAT, "w1a1"))
    if not to_float or not to_binary:
        return []
    lost, gains = -statistics.mean(a - b for a, b in to_float), [a - b for a, b in to_binary]
    gain, half = interval(gains) if len(gains) > 1 else (gains[0], None)
    word = "above" if gain > (half or 0) else "below" if gain < -(half or 0) else "tied with"
    return [
        f"Wanted of w1a2: at most {WITHIN:g} points below float ({'met' if lost <= WITHIN else 'missed'}: {lost:.2f}) "
        f"and above w1a1 ({word} it: {signed(gain)}{', one seed' if half is None else f' ± {half:.2f}'}).\n"
    ]
