"""The sections of docs/results.md about the dial, and its drawing; as a program it draws alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import records
from arms import DENSE
from dial import DIALS, TWO_FOUR, Dial, key
from records import Clocked, Turned, load
from tasks import TASKS
from twofour.drawing import drawn
from twofour.errors import DataError

FIGURE = "dial.svg"
FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"

NOTHING = {True: 0.2, False: 0.5}
"""Points, and perplexity, up to which 2:4 is where dense is: the page's goals."""

HEAD = """## The dial: what a row is

Models between 2:4 and dense ([2:4 with dense groups](hybrid.md)), pruned once, nothing trained: what they keep of the
task against what the compiled model takes.

* `2:4+25%` has a quarter of the groups of inputs dense in every layer. **mixed 50 %** is what `twofour.allocation`
  chose layer by layer, of dense and the other rows' patterns, by the task's loss on training batches under a budget of
  milliseconds: half of the way from 2:4 to dense.
* **auto** is what `twofour.prune` does with data by itself; a weaker criterion stands beside it where auto's 2:4 is
  where dense is, or near it.
* **answers**: norm of the difference to the dense model's answers to the held-out examples (the first 2^28 numbers of
  them), relative to theirs.
* **regained** is the share of what 2:4 lost that a row has back, by the task and by the answers; **given up** the share
  of the time that 2:4 won. Both are 0 for 2:4 and 100 % for dense: a row that regains more than it gives up lies above
  the straight line between the ends. Of the task it is left out where 2:4 lost no more than 0.2 points, or 0.5 of
  perplexity.
* **ms**: median of a call of the compiled model in float32, processor time of one thread. The models of a table are
  compiled first, then called in turns on the same real data; activations are packed within the call, weights are warm.
* **sparse**: products that leave zeros out. `compile` takes the dense one where it measured that to be faster.

`docs/figures/dial.svg` has the curves, and the straight lines between their ends.
"""


@dataclass(frozen=True)
class Point:
    """A row with its times.

    Attributes:
        row: What the task keeps.
        clocked: What a call takes.
        regained: Share of what 2:4 lost of the task; None where that is nothing.
        nearer: Share of what 2:4 lost of the answers.
        given: Share of the time that 2:4 won.
    """

    row: Turned
    clocked: Clocked
    regained: float | None
    nearer: float
    given: float

    @property
    def above(self) -> float:
        """How far above the straight line: by the task, else by the answers."""
        return (self.nearer if self.regained is None else self.regained) - self.given


def curve(rows: Mapping[str, Turned], times: Mapping[str, Clocked], criterion: str, higher: bool) -> list[Point]:
    """The rows of a criterion that are timed, and dense, in the order of their times; none where an end is missing."""
    first = key(criterion, TWO_FOUR)
    if not {first, DENSE} <= rows.keys() & times.keys():
        return []
    low, high = rows[first], rows[DENSE]
    lost = (high.value - low.value) * (1 if higher else -1)
    won = times[DENSE].ms - times[first].ms
    points = [
        Point(
            row,
            times[name],
            None if lost <= NOTHING[higher] else (row.value - low.value) / (high.value - low.value),
            1 - row.away / low.away,
            (times[name].ms - times[first].ms) / won,
        )
        for name, row in rows.items()
        if name in times and (name == DENSE or name.startswith(f"{criterion}: "))
    ]
    return sorted(points, key=lambda point: point.clocked.ms)


def sections(folder: Path, figures: Path) -> list[str]:
    """What all tables share, then one section per dial, measured or not; draws the curves."""
    found = {name: _read(folder, name) for name in DIALS}
    draw(folder, figures / FIGURE)
    return [HEAD, *(_section(dial, *found[name]) for name, dial in DIALS.items())]


def draw(folder: Path, path: Path) -> None:
    """Draw the curves of all dials that are measured."""
    shown = [
        (dial, *_read(folder, name)) for name, dial in DIALS.items() if (folder / f"dial-{name}-times.json").exists()
    ]
    if not shown:
        return
    with drawn(path, (3.3 * len(shown), 3.0), DataError, "the records") as figure:
        for axes, (dial, head, rows, times) in zip(
            figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True
        ):
            for criterion in dial.criteria:
                _draw_curve(axes, criterion, curve(rows, times, criterion, head["metric"]["higher"]))
            if not head["metric"]["higher"]:
                axes.invert_yaxis()
            axes.set(title=TASKS[dial.task].title.partition(" (")[0], xlabel="ms", ylabel=head["metric"]["name"])
            axes.title.set_fontsize(8)
            axes.legend(frameon=False, fontsize=7)


def _draw_curve(axes: Any, criterion: str, points: Sequence[Point]) -> None:
    """A line through patterns that are the same everywhere, a dashed one between its ends, crosses for mixed rows."""
    if not points:
        return
    steady = [point for point in points if not point.row.recipe]
    (line,) = axes.plot(
        [point.clocked.ms for point in steady], [point.row.value for point in steady], "o-", ms=3, label=criterion
    )
    ends = [point for point in points if point.row.key in (DENSE, key(criterion, TWO_FOUR))]
    axes.plot([p.clocked.ms for p in ends], [p.row.value for p in ends], "--", lw=0.8, color=line.get_color())
    for point in points:
        if point.row.recipe:
            axes.plot(point.clocked.ms, point.row.value, "x", color=line.get_color())


def _read(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Turned], dict[str, Clocked]]:
    """The head and the rows of a dial, by their keys, and its times."""
    path, timed = folder / f"dial-{name}.json", folder / f"dial-{name}-times.json"
    head, rows = load(path, Turned) if path.exists() else ({}, [])
    clocked_head, times = load(timed, Clocked) if timed.exists() else ({}, [])
    machine = {"timed": clocked_head["machine"]} if clocked_head else {}
    return {**head, **machine}, {row.key: row for row in rows}, {row.key: row for row in times}


def _section(dial: Dial, head: dict[str, Any], rows: dict[str, Turned], times: dict[str, Clocked]) -> str:
    title = f"## The dial: {TASKS[dial.task].title}\n"
    command = f"`python experiments/run.py dial {dial.task} --record`"
    if not times:
        return f"{title}\nNot measured yet: {command}.\n"
    metric = head["metric"]
    unit = f" ({metric['unit']})" if metric["unit"] else ""
    lines = [
        title,
        f"{command}\n",
        f"{metric['name']}{unit} of {metric['held_out']:,} held-out {metric['of']}; a call has {dial.timed_on}.\n",
        f"| | {metric['name']} | answers | kept | sparse | ms | regained | by the answers | given up |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    verdicts = []
    curves = {criterion: curve(rows, times, criterion, metric["higher"]) for criterion in dial.criteria}
    curves = {criterion: points for criterion, points in curves.items() if points}
    for criterion, points in curves.items():
        lines += [_line(point, metric) for point in points if point.row.key != DENSE]
        verdicts.append(_verdict(criterion, points, metric))
    dense = next(point for points in curves.values() for point in points if point.row.key == DENSE)
    load_average = max((row.load for row in times.values() if row.load is not None), default=0.0)
    commits = ", ".join(sorted({row.commit for row in (*rows.values(), *times.values())}))
    return "\n".join(
        [
            *lines,
            f"{_line(dense, metric)}\n",
            *verdicts,
            f"Timed on {head['timed']['cpu']} ({times[DENSE].samples} rounds, load {load_average:.1f}); "
            f"twofour at {commits}.\n",
        ]
    )


def _line(point: Point, metric: dict[str, Any]) -> str:
    row, clocked = point.row, point.clocked
    dense_kernels = sum(count for name, count in clocked.operations.items() if name.startswith(("dense", "torch")))
    layers = sum(clocked.operations.values())
    regained = "" if point.regained is None else f"{100 * point.regained:.0f} %"
    cells = [
        row.key,
        f"{row.value:.{metric.get('decimals', 2)}f}",
        f"{row.away:.4f}",
        f"{100 * row.density:.0f} %",
        f"{layers - dense_kernels} of {layers}",
        f"{clocked.ms:.2f}",
        regained,
        f"{100 * point.nearer:.0f} %",
        f"{100 * point.given:.0f} %",
    ]
    return f"| {' | '.join(cells)} |"


def _verdict(criterion: str, points: Sequence[Point], metric: dict[str, Any]) -> str:
    """Say where the curve lies: by the task, or by the answers where the task has nothing to win."""
    between = [point for point in points if point.row.key not in (DENSE, key(criterion, TWO_FOUR))]
    by = "task" if points[0].regained is not None else "answers"
    high = sorted((point for point in between if point.above > 0), key=lambda point: -point.above)
    under = sorted((point for point in between if point.above <= 0), key=lambda point: point.above)
    told = [
        f"{word} it {', '.join(f'{_short(p.row.key)} ({100 * p.above:+.0f})' for p in some)}"
        for word, some in (("above", high), ("on or below", under))
        if some
    ]
    verdict = "above" if high and not under else "below" if not high else "partly above"
    nothing = "2:4 is where dense is, so the task has nothing to win. " if by == "answers" else ""
    return (
        f"{criterion}: {nothing}By the {by} the curve lies {verdict} the straight line; points of a hundred "
        f"{'; '.join(told)}.\n"
    )


def _short(name: str) -> str:
    return name.partition(": ")[2]


if __name__ == "__main__":
    draw(records.TRACKED, FIGURES / FIGURE)
