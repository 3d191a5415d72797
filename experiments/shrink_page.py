"""The section of docs/results.md about nets that lose channels, and its drawing of widths."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from over_seeds import difference, paired, signed, values
from records import Shrunk, load
from shrink_encoder import GOAL, TAUGHT
from shrink_nets import LEARNED
from tasks import SHRINK, Task
from twofour.drawing import drawn
from twofour.errors import DataError

HEAD = """## Shrunk nets: what a row is

Nets that lose whole channels and blocks, and the dense net trained as long. Those of images lose them between two parts
of their training:

* **learned**: gates (`training.gates`) are pulled before the cut, in proportion to the parameters of a channel;
  every layer's width and which blocks go follow from one strength. The first strength sets the size that the others
  are cut to.
* **thresholds**: a threshold for the gates of each layer is trained before the cut (`training.channel_thresholds`),
  with that size as its budget.
* **slimming**: Network Slimming (Liu et al. 2017), an L1 penalty with the same pull on the scales of the inner batch
  norms before the cut, and one threshold for all layers. **L1**: the filters of least L1 norm of the dense net
  there, the same share of each layer. **random**: any filters, the same share of each layer.
* **small**: a net of the shape that the first strength left, trained from random weights in both parts.

Of all:

* ± behind a value is the standard deviation over seeds; behind a difference, Student's 95 % interval of the pairs with
  the same seed.
"""


def sections(folder: Path, figures: Path) -> list[str]:
    """What all tables share, then one section per task, measured or not."""
    found = [HEAD]
    for name, kind in SHRINK.items():
        path = folder / f"{name}.json"
        found.append(_section(kind(), *load(path, Shrunk), figures) if path.exists() else _waiting(kind()))
    return found


def _command(task: Task) -> str:
    return f"`python experiments/run.py shrink {task.name.removeprefix('shrink-')} --record`"


def _waiting(task: Task) -> str:
    return f"## Shrunk: {task.title}\n\nNot measured yet: {_command(task)}.\n"


def _section(task: Task, head: dict[str, Any], rows: list[Shrunk], figures: Path) -> str:
    metric = head["metric"]
    of = {key: [row for row in rows if row.key == key] for key in dict.fromkeys(row.key for row in rows)}
    first = next((key for key in LEARNED if key in of), "")
    name = f"{metric['name']} ({metric['unit']})" if metric["unit"] else metric["name"]
    columns = ["net", "parameters", name, "difference to dense", *([f"{first} minus it"] if first else []), "seeds"]
    lines = [
        f"## Shrunk: {task.title}\n",
        f"{_command(task)}\n",
        f"{name}, {metric['held_out']:,} held-out {metric['of']}. {task.notes.format(epochs=task.epochs)}\n",
        f"| {' | '.join(columns)} |",
        f"| {' | '.join(['---'] * len(columns))} |",
        *(_line(key, of, metric, first) for key in of),
        "",
        *[_widths(key, found, task) for key, found in of.items() if any(row.widths for row in found)],
        *_goal(of),
    ]
    if first:
        _draw(figures / f"{task.name}.svg", of[first])
        lines.append("`python experiments/run.py page` draws the widths into docs/figures, which git ignores.\n")
    hours = sum(row.seconds for row in rows) / 3600
    commits = ", ".join(sorted({row.commit for row in rows}))
    lines.append(f"Measured in {hours:.1f} h, the last row on {head['machine']['cpu']}; twofour at {commits}.\n")
    return "\n".join(lines)


def _line(key: str, of: dict[str, list[Shrunk]], metric: dict[str, Any], first: str) -> str:
    rows, dense = of[key], of.get("dense", [])
    sizes = [row.parameters for row in rows]
    size = f"{statistics.mean(sizes):,.0f}"
    if dense and key != "dense":
        size += f" ({100 * statistics.mean(sizes) / dense[0].parameters:.0f} %)"
    apart = "" if key == "dense" else difference(rows, dense)
    over = [difference(of[first], rows) if key not in (first, "dense") else ""] if first else []
    cells = [key, size, values([row.value for row in rows], metric), apart, *over, str(len(rows))]
    return f"| {' | '.join(cells)} |"


def _goal(of: dict[str, list[Shrunk]]) -> list[str]:
    """Say whether the distilled nets come within the goal of their controls."""
    lines: list[str] = []
    for key in TAUGHT:
        if pairs := paired(of.get(key, []), of.get("dense", [])):
            mean = statistics.mean(a - b for a, b in pairs)
            said = "met" if round(mean, 2) >= -GOAL else "missed"
            lines.append(f"Goal of -{GOAL:.1f}, {key}: {said} ({signed(mean)}).\n")
    return lines


def _widths(key: str, rows: Sequence[Shrunk], task: Task) -> str:
    """Say the widths of each seed."""
    told = [
        f"seed {row.seed}: {', '.join(f'{after}/{before}' for before, after in row.widths.values())}"
        + (f", without blocks {', '.join(row.layers)}" if row.layers else "")
        for row in rows
    ]
    shares = [after / before for row in rows for before, after in row.widths.values()]
    strength = f" (strength {task.strengths[LEARNED.index(key)]})" if key in LEARNED else ""
    return (
        f"{key}{strength}, channels left of each block: {'; '.join(told)}. "
        f"Change to full width: {signed(min(shares) - 1)} to {signed(max(shares) - 1)}.\n"
    )


def _draw(path: Path, rows: Sequence[Shrunk]) -> None:
    names = list(rows[0].widths)
    with drawn(path, (5.0, 2.4), DataError, "the records") as figure:
        axes = figure.subplots()
        for number, row in enumerate(rows):
            places = [index + 0.25 * (number - (len(rows) - 1) / 2) for index in range(len(names))]
            gone = [any(name.startswith(f"{block}.") for block in row.layers) for name in names]
            shares = [
                0 if out else 100 * row.widths[n][1] / row.widths[n][0] for n, out in zip(names, gone, strict=True)
            ]
            axes.bar(places, shares, 0.22, label=f"seed {row.seed}")
        axes.set_xticks(range(len(names)), [name.partition(".weight")[0] for name in names])
        axes.set_ylabel("channels left (%)")
        axes.set_ylim(0, 100)
        axes.legend(frameon=False)
