"""Records of a run: one file per machine, added to after every cell so that a stopped run can be resumed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from twofour import measure
from twofour.errors import DataError
from twofour.measure import Record

ROOT = Path(__file__).resolve().parent.parent
TRACKED, SCRATCH = ROOT / "records", ROOT.parent / "runs"
KEY = (
    "case",
    "model",
    "shape",
    "pattern",
    "geometry",
    "example",
    "batch",
    "tokens",
    "size",
    "threads",
    "weights",
    "dtype",
    "beside",
    "budget",
    "sentences",
    "lengths",
)
"""Facts of a cell that tell it from the others of its file."""


def listed(facts: Mapping[str, object], known: Collection[object], **axes: Sequence[object]) -> list[dict[str, object]]:
    """List the cells of every combination of axes, those that differ in the first axis alone beside each other.

    Args:
        facts: What all of them share.
        known: What the first axis may hold.
        **axes: Facts of a cell -> what they are in turn.

    Raises:
        DataError: The first axis holds something else.
    """
    (first, names), *others = axes.items()
    if unknown := [name for name in names if name not in known]:
        raise DataError(f"no cell has the {first} {unknown[0]!r}", got=unknown[0], wanted=", ".join(map(str, known)))
    found = itertools.product(*(values for _, values in others))
    keys = [key for key, _ in others]
    return [{**facts, first: name, **dict(zip(keys, values, strict=True))} for values in found for name in names]


def default_path(name: str, tracked: bool = False) -> Path:
    """Return <name>-<processor>.json in benchmarks/records when the records are to be kept, else in runs/."""
    machine = measure.machine()
    processor = re.sub(r"[^a-z0-9]+", "-", str(machine["cpu"]).lower().replace("(r)", "")).strip("-")
    identity = "-".join(re.findall(r"\d+", str(machine["cpu_identity"])))
    return (TRACKED if tracked else SCRATCH) / f"{name}-{processor}-{identity}.json"


def key(meta: dict[str, object]) -> tuple[object, ...]:
    """Return what tells one cell from another."""
    return tuple(str(meta.get(name)) for name in KEY)


def run(
    cells: Sequence[dict[str, object]],
    measure_cell: Callable[[dict[str, object]], Record],
    path: Path,
    resume: bool,
) -> list[Record]:
    """Measure every cell, saving after each; with `resume`, keep what the file has, these cells and others.

    Raises:
        DataError: Two cells are alike in all that a file tells them apart by: one record would replace the other.
    """
    names = [key(cell) for cell in cells]
    if twice := next((cell for cell, name in zip(cells, names, strict=True) if names.count(name) > 1), None):
        raise DataError(
            "two cells would share one record", got=str(twice), wanted=f"cells that differ in {', '.join(KEY)}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {key(dict(record.meta)): record for record in measure.load(path)} if resume and path.exists() else {}
    done: dict[tuple[object, ...], Record] = {}
    # Weights are prepared and copied on one thread: on a busy machine each short parallel region may wait for a core.
    torch.set_num_threads(1)
    for cell in _shown(cells):
        name = key(cell)
        done[name] = known.get(name) or measure_cell(cell)
        measure.save([*(known | done).values()], path)
    return list(done.values())


def _shown(cells: Sequence[dict[str, object]]) -> Iterator[dict[str, object]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(cells))
        for cell in cells:
            bar.update(task, description=" ".join(str(cell[name]) for name in KEY if name in cell))
            yield cell
            bar.advance(task)


def machine_line(record: Record) -> str:
    """Say in one line what the records were measured on."""
    return f"{_place(record)}, {_commit(record)}"


def machine_lines(records: Iterable[Record]) -> list[str]:
    """Say in a line for each machine and its software what records were measured on, with all their commits."""
    found: dict[str, dict[str, None]] = {}
    for record in records:
        found.setdefault(_place(record), {})[_commit(record)] = None
    return [f"{place}, {', '.join(commits)}" for place, commits in found.items()]


def _place(record: Record) -> str:
    machine = record.machine
    software = cast("Mapping[str, str]", machine["software"])
    return (
        f"{machine['cpu']} ({machine['cpu_identity']}), {machine['cores_allowed']} cores, {machine['os']}; "
        f"torch {software['torch']}, {software['mkl']}, oneDNN {software['onednn']}, "
        f"twofour {software['twofour']} [{software['native_isa']}]"
    )


def _commit(record: Record) -> str:
    commit = record.machine.get("commit")
    return "no commit" if not commit else f"commit {commit['id'][:10]}{' + changes' if commit['dirty'] else ''}"  # pyright: ignore
