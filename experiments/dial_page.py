"""The sections of docs/results.md about the dial, and its drawing; as a program it draws alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import records
from arms import DENSE
from dial import DIALS, PATTERNS, SHARES, TWO_FOUR, Dial, key, mixed
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
  the straight line between the ends, by the difference of the two in points of a hundred. Of the task it is left out
  where 2:4 lost no more than 0.2 points, or 0.5 of perplexity.
* A loss of accuracy has at most the standard error that stands beside it: that of nets which never err on the same
  example. Of a loss smaller than twice that, shares say little. None is known here of a correlation or a perplexity.
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
    def above(self) -> float | None:
        """How far above the straight line by the task; None where 2:4 lost nothing of it."""
        return None if self.regained is None else self.regained - self.given

    @property
    def closer(self) -> float:
        """How far above the straight line by the answers."""
        return self.nearer - self.given


def curve(rows: Mapping[str, Turned], times: Mapping[str, Clocked], criterion: str, higher: bool) -> list[Point]:
    """The rows of a criterion that are timed, and dense, in the order of their times.

    None where an end is missing, 2:4 takes no less time than dense, or answers as dense does: nothing can be given up.
    """
    first = key(criterion, TWO_FOUR)
    if not {first, DENSE} <= rows.keys() & times.keys():
        return []
    low, high = rows[first], rows[DENSE]
    if times[first].ms >= times[DENSE].ms or not low.away:
        return []
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
            if axes.lines:
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
    if not curves:
        return f"{title}\n{command}\n\nNo curve: 2:4 and dense are not both timed, or 2:4 takes no less time.\n"
    for criterion, points in curves.items():
        lines += [_line(point, metric) for point in points if point.row.key != DENSE]
        verdicts.append(_verdict(criterion, points, metric))
    dense = next(point for points in curves.values() for point in points if point.row.key == DENSE)
    load_average = max((row.load for row in times.values() if row.load is not None), default=0.0)
    return "\n".join(
        [
            *lines,
            f"{_line(dense, metric)}\n",
            *verdicts,
            *(f"{said}\n" for said in (dial.remark, _missing(dial, rows.keys() & times.keys())) if said),
            f"Timed on {head['timed']['cpu']} ({times[DENSE].samples} rounds, load {load_average:.1f}); "
            f"{_versions(rows, times)}\n",
        ]
    )


def _line(point: Point, metric: dict[str, Any]) -> str:
    row, clocked = point.row, point.clocked
    dense_kernels = sum(count for name, count in clocked.operations.items() if name.startswith(("dense", "torch")))
    layers = sum(clocked.operations.values())
    regained = "" if point.regained is None else _share(point.regained)
    cells = [
        row.key,
        f"{row.value:.{metric.get('decimals', 2)}f}",
        f"{row.away:.4f}",
        _share(row.density),
        f"{layers - dense_kernels} of {layers}",
        f"{clocked.ms:.2f}",
        regained,
        _share(point.nearer),
        _share(point.given),
    ]
    return f"| {' | '.join(cells)} |"


def _share(share: float) -> str:
    """In per cent, whole ones, and no minus in front of a zero."""
    return f"{round(100 * share)} %"


def _verdict(criterion: str, points: Sequence[Point], metric: dict[str, Any]) -> str:
    """Say where the curve lies, by the task where 2:4 lost something of it, and by the answers."""
    first, dense = (next(p.row for p in points if p.row.key == end) for end in (key(criterion, TWO_FOUR), DENSE))
    between = [point for point in points if point.row.key not in (DENSE, first.key)]
    lost = f"2:4 {_loss(first, dense, metric)}."
    if not between:
        return f"{criterion}: {lost} Nothing is measured between 2:4 and dense.\n"
    by_task = {_short(p.row.key): p.above for p in between if p.above is not None}
    task = f"By the task {_placed(by_task)}" if by_task else "It is where dense is: the task has nothing to win."
    answers = _placed({_short(p.row.key): p.closer for p in between})
    return f"{criterion}: {lost} {task} By the answers {answers}\n"


def _loss(first: Turned, dense: Turned, metric: dict[str, Any]) -> str:
    """What 2:4 loses of the task, with the standard error of an accuracy, at most."""
    lost = (dense.value - first.value) * (1 if metric["higher"] else -1)
    said = f"{'loses' if lost >= 0 else 'gains'} {abs(lost):.{metric.get('decimals', 2)}f}"
    if metric["name"] != "accuracy":
        return said
    # Pairs of which one net is right and the other wrong: at most the errors of both, 100 % = 1.
    apart = (200 - first.value - dense.value) / 100
    error = 100 * math.sqrt(apart / metric["held_out"])
    chance = ", which chance can make" if abs(lost) < 2 * error else ""
    return f"{said} (standard error at most {error:.2f}){chance}"


def _placed(above: Mapping[str, float]) -> str:
    """Say where rows lie, by how far each is above the straight line."""
    high = [far > 0 for far in above.values()]
    verdict = "above" if all(high) else "partly above" if any(high) else "below"
    told = ", ".join(f"{name} {round(100 * far):+d}" for name, far in above.items())
    return f"the curve lies {verdict} the straight line: {told}."


def _missing(dial: Dial, measured: Collection[str]) -> str:
    """Name the rows that are not measured yet, and criteria of which none is; nothing where all are."""
    wanted = (*PATTERNS, *(mixed(share) for share in SHARES))
    told: list[str] = []
    for criterion in dial.criteria:
        lacking = [key(criterion, pattern) for pattern in wanted if key(criterion, pattern) not in measured]
        told += [criterion] if len(lacking) == len(wanted) else lacking
    return f"Not measured yet: {', '.join(told)}." if told else ""


def _versions(rows: Mapping[str, Turned], times: Mapping[str, Clocked]) -> str:
    """The versions of twofour that pruned and that ran the models, and whether those are several."""
    pruned, clocked = (sorted({row.commit for row in some.values()}) for some in (rows, times))
    several = " (rows of several versions of the code)" if len({*pruned, *clocked}) > 1 else ""
    return f"pruned by twofour at {', '.join(pruned)}, timed at {', '.join(clocked)}{several}."


def _short(name: str) -> str:
    return name.partition(": ")[2]


if __name__ == "__main__":
    draw(records.TRACKED, FIGURES / FIGURE)
