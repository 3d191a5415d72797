"""docs/results.md, drawn from experiments/records alone."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import blocks_page
import dial_page
import gradients_page
import low_bits_page
import records
import shrink_page
from arms import CONTROL, Arm, again, one_shot
from over_seeds import difference, interval, paired, signed, strangers, values
from records import Row, load
from tasks import TASKS, Task
from twofour.files import replacing

PAGE = Path(__file__).resolve().parent.parent / "docs" / "results.md"

GOAL = 0.2
"""Points below the control, at most (Mishra et al. 2021: their retrained networks are within 0.2 of dense)."""
SURE = 0.4
"""Half the interval below which a mean of points says something."""
PERPLEXITY_GOAL = 0.5
"""Perplexity above the control, at most."""

STRANGER = "*"
STRANGERS = (
    "In some seeds the control began with another dense model, trained once more on another machine from the same "
    "seed: such a difference has the noise of a training in it."
)

HEAD = """# Results

Written by `python experiments/run.py page` from `experiments/records`; do not edit. Each table comes from one
command, which stands above it, and goes on where it was stopped.

How to read it:

* **one-shot**: pruned, nothing trained. **trained again**: the paper's workflow (Mishra et al. 2021): prune once,
  repeat the training with masks fixed and the optimiser's state from zero.
* **The control** is the dense model whose training is repeated the same: same batches, same schedule, same seed.
  "Sparse, trained again" against "dense, trained once" would flatter sparsity, so *difference* is always to the
  control with the same seed, averaged over seeds; the interval is Student's 95 % over seeds.
* ± behind a figure is the standard deviation over seeds; in rows of one seed it is the binomial standard error over
  the held-out examples, where the metric is an accuracy. An interval of two seeds is so wide that it says little.
* **seconds** and **MB**: processor time of pruning on one thread of the machine named below, and the most memory that
  the process held meanwhile beyond what it held before; empty where a row was measured without them. "auto" is what
  `twofour.prune` does with data by itself: `admm`, then the kept values solved together.
* **random** keeps random values: what any criterion must beat. Where it ties, the text says so.
* "default" is what `twofour.finetune` does with the dense model, the optimiser, schedule and epochs of its training and
  `control=None`, "taught" what it does with the control, which teaches then, "bare" without all that: pruned by batches
  of the loader; the state with the least loss on some of the training data stands, which can be that before the first
  step. "held back" is what it did before: a twentieth of the training data, which the dense model had seen, was kept
  from the training to judge. "pruned last" is the other order: the control, pruned after its training, with nothing
  trained behind, so that it has had no more training than the control. "its own control" is all of the default as a
  user has it: `twofour.finetune` trains the control itself, which teaches, prunes that one last, and keeps the better
  of the two by the loss on what judges; "bare, its own control" the same with no optimiser and no schedule given,
  where a copy is handed over as the control: both have the rate that short trainings of the pruned model find.
* A row whose control is known, since it taught or was pruned last, is compared with that one, not with that of the
  first row, which may have been trained on another machine.
* **Goal**: trained again, no more than 0.2 below the control, or 0.5 of perplexity above it, by the mean, with an
  interval below 0.4. Most repetitions here are a small part of what the model was trained with, which the paper's
  workflow repeats whole: each table says how much it had.
* A row names the commit it was measured at. Branches are rebased before they land, so not every one is in the history.
"""


def write() -> Path:
    """Write the page; returns its path."""
    parts = [HEAD]
    for name, kind in TASKS.items():
        path = records.TRACKED / f"{name}.json"
        parts.append(_section(kind(), *load(path)) if path.exists() else _waiting(kind()))
    parts += dial_page.sections(records.TRACKED, PAGE.parent / "figures")
    parts += blocks_page.sections(records.TRACKED)
    parts += gradients_page.sections(records.TRACKED)
    parts += shrink_page.sections(records.TRACKED, PAGE.parent / "figures")
    parts += low_bits_page.sections(records.TRACKED)
    with replacing(PAGE) as temporary:
        temporary.write_text("\n".join(parts), encoding="utf-8")
    return PAGE


def _waiting(task: Task) -> str:
    return f"## {task.title}\n\nNot measured yet: `python experiments/run.py task {task.name} --record`.\n"


def _section(task: Task, head: dict[str, object], rows: list[Row]) -> str:
    metric, machine = dict(head["metric"]), dict(head["machine"])  # type: ignore[call-overload]
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.key].append(row)
    direction = "higher" if metric["higher"] else "lower"
    unit = f" ({metric['unit']})" if metric["unit"] else ""
    lines = [
        f"## {task.title}\n",
        f"`python experiments/run.py task {task.name}{' --device cuda' * any(row.gpu for row in rows)} --record`\n",
        f"{metric['name']}{unit}, {direction} is better, "
        f"{metric['held_out']:,} held-out {metric['of']}. {task.notes.format(epochs=task.epochs)}\n",
    ]
    pruned = [arm for arm in one_shot(task) if arm.key in found]
    if pruned:
        dense = values([row.dense for row in _one_per_seed(rows)], metric)
        lines += [
            f"| one-shot | {metric['name']} | difference to dense | seconds | MB |",
            "| --- | --- | --- | --- | --- |",
        ]
        lines += [f"| dense | {dense} | | | |", *(_one_shot_line(arm, found[arm.key], metric) for arm in pruned), ""]
        lines += _remarks(pruned, found, metric)
    trained = [arm for arm in again(task) if arm.key in found]
    if trained:
        lines += [
            f"| trained again | before | {metric['name']} | difference to the control | seeds |",
            "| --- | --- | --- | --- | --- |",
            *(_again_line(arm, found[arm.key], found[CONTROL.key], metric) for arm in trained),
            "",
        ]
        lines += [f"{STRANGER} {STRANGERS}\n"] * any(STRANGER in line for line in lines)
        lines += [*_verdict(found, metric), *_stood(trained, found), *_goal(trained, found, metric)]
    hours = sum(row.seconds for row in rows) / 3600
    commits = sorted({row.commit for row in rows})
    last = next((f"{row.gpu}, beside {machine['cpu']}" for row in rows[-1:] if row.gpu), machine["cpu"])
    lines.append(f"Measured in {hours:.1f} h, the last row on {last}; twofour at {', '.join(commits)}.\n")
    return "\n".join(lines)


def _one_shot_line(arm: Arm, rows: Sequence[Row], metric: dict[str, object]) -> str:
    apart = signed(statistics.mean([row.value - row.dense for row in rows]))
    seconds = [row.pruning for row in rows if row.pruning is not None]
    memory = [row.memory / 1e6 for row in rows if row.memory is not None]
    costs = f"{_mean(seconds, 1)} | {_mean(memory, 0)}"
    return f"| {arm.name} | {values([row.value for row in rows], metric)} | {apart} | {costs} |"


def _mean(found: Sequence[float], decimals: int) -> str:
    return f"{statistics.mean(found):,.{decimals}f}" if found else ""


def _again_line(arm: Arm, rows: Sequence[Row], control: Sequence[Row], metric: dict[str, object]) -> str:
    before = values([row.one_shot for row in rows], metric)
    value = values([row.value for row in rows], metric)
    apart = "" if arm == CONTROL else difference(rows, control)
    apart += f" {STRANGER}" * bool(arm != CONTROL and strangers(rows, control))
    return f"| {arm.name} | {before} | {value} | {apart} | {len(rows)} |"


def _remarks(arms: Sequence[Arm], found: dict[str, list[Row]], metric: dict[str, object]) -> list[str]:
    """Name what a reader would not expect: criteria that lose to magnitude, orders of channels that do not help."""
    sign = 1 if metric["higher"] else -1
    value = {arm: sign * statistics.mean(row.value for row in found[arm.key]) for arm in arms}
    plain = Arm("2:4", "magnitude")
    informed = [arm for arm in arms if arm.pattern == "2:4" and arm.criterion != "random" and not arm.permuted]
    worse = [arm.name for arm in informed if value[arm] < value.get(plain, -math.inf)]
    orders = [arm for arm in arms if arm.permuted and replace(arm, permuted=False) in value]
    lost = [arm.name for arm in orders if value[arm] < value[replace(arm, permuted=False)]]
    said = [f"Worse than magnitude here: {', '.join(worse)}."] if worse else []
    said += [f"No better for the permutation here: {', '.join(lost)}."] if lost else []
    return [" ".join(said) + "\n"] if said else []


def _verdict(found: dict[str, list[Row]], metric: dict[str, object]) -> list[str]:
    """Say whether magnitude beats a random mask after training: on small tasks it may not."""
    magnitude, chance = (found.get(Arm("2:4", name, again=True).key, []) for name in ("magnitude", "random"))
    pairs = paired(magnitude, chance)
    if len(pairs) < 2:
        return []
    mean, half = interval([a - b for a, b in pairs])
    gain = mean if metric["higher"] else -mean
    if abs(mean) <= half:
        return [f"After training, magnitude and a random mask tie: {signed(mean)} ± {half:.2f}.\n"]
    word = "better" if gain > 0 else "worse"
    return [f"After training, magnitude is {word} than a random mask: {signed(mean)} ± {half:.2f}.\n"]


def _stood(again: Sequence[Arm], found: dict[str, list[Row]]) -> list[str]:
    """Say what stands in rows of the default with its own control: that one, pruned last, or the sparse run."""
    own = [(arm, [row.instead for row in found[arm.key]]) for arm in again if arm.own]
    return [f"{arm.name}: the control, pruned last, stands in {sum(rows)} of {len(rows)} seeds.\n" for arm, rows in own]


def _goal(again: Sequence[Arm], found: dict[str, list[Row]], metric: dict[str, object]) -> list[str]:
    """Say which 2:4 rows come within the goal of their control, and which do not."""
    if not metric["higher"] and metric["name"] != "perplexity":
        return []
    rows = [arm for arm in again if arm.pattern == "2:4" and arm.criterion != "random"]
    apart = {arm.name: [a - b for a, b in paired(found[arm.key], found[CONTROL.key])] for arm in rows}
    means = {name: statistics.mean(differences) for name, differences in apart.items() if differences}
    sign, goal = (-1, GOAL) if metric["higher"] else (1, PERPLEXITY_GOAL)
    near = [name for name, mean in means.items() if sign * round(mean, 2) <= goal]
    wide = _wide(apart) if metric["higher"] else {}
    met = [name for name in near if name not in wide]
    little = [f"{name} ({wide[name]})" for name in near if name in wide]
    missed = [f"{name} ({signed(mean)})" for name, mean in means.items() if name not in near]
    parts = [f"met by {', '.join(met)}"] if met else []
    parts += [f"by the mean alone, whose interval is no smaller than {SURE}, by {', '.join(little)}"] if little else []
    parts += [f"missed by {', '.join(missed)}"] if missed else []
    return [f"Goal of {sign * goal:+}: {'; '.join(parts)}.\n"] if parts else []


def _wide(apart: dict[str, list[float]]) -> dict[str, str]:
    """Return the rows whose differences say little, with half their interval."""
    halves = {name: interval(found)[1] for name, found in apart.items() if len(found) > 1}
    wide = {name: f"± {half:.2f}" for name, half in halves.items() if half >= SURE}
    return wide | {name: "one seed" for name, found in apart.items() if len(found) == 1}


def _one_per_seed(rows: Sequence[Row]) -> list[Row]:
    return list({row.seed: row for row in rows if not row.key.startswith("again")}.values())
