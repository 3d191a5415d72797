"""docs/results.md, drawn from experiments/records alone."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from arms import AGAIN, CONTROL, ONE_SHOT, Arm
from records import TRACKED, Row, load
from tasks import TASKS, Task
from twofour.files import replacing

PAGE = Path(__file__).resolve().parent.parent / "docs" / "results.md"

# Two-sided 95 % quantiles of Student's t by degrees of freedom (any table of the distribution).
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}

HEAD = """# Results

Written by `python experiments/run.py page` from `experiments/records`; do not edit. Each table comes from one
command, which stands above it, and goes on where it was stopped.

How to read it:

* **one-shot**: pruned, nothing trained. **trained again**: the paper's workflow (Mishra et al. 2021): prune once,
  repeat the training with masks fixed and the optimiser's state from zero.
* **The control** is the dense model whose training is repeated the same: same batches, same schedule, same seed.
  "Sparse, trained again" against "dense, trained once" would flatter sparsity, so *difference* is always to the
  control with the same seed, averaged over seeds; the interval is Student's 95 % over seeds.
* ± behind a figure is the standard deviation over seeds; one-shot rows of a published checkpoint have one seed, and ±
  is the binomial standard error over the held-out examples where the metric is an accuracy.
* **random** keeps random values: what any criterion must beat. Where it ties, the text says so.
"""


def write() -> Path:
    """Write the page; returns its path."""
    parts = [HEAD]
    for name, kind in TASKS.items():
        path = TRACKED / f"{name}.json"
        parts.append(_section(kind(), *load(path)) if path.exists() else _waiting(kind()))
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
        f"`python experiments/run.py task {task.name} --record`\n",
        f"{metric['name']}{unit}, {direction} is better, "
        f"{metric['held_out']:,} held-out {metric['of']}. {task.notes.format(epochs=task.epochs)}\n",
    ]
    one_shot = [arm for arm in ONE_SHOT if arm.key in found]
    if one_shot:
        dense = _values([row.dense for row in _one_per_seed(rows)], metric)
        lines += [f"| one-shot | {metric['name']} | difference to dense |", "| --- | --- | --- |"]
        lines += [f"| dense | {dense} | |", *(_one_shot_line(arm, found[arm.key], metric) for arm in one_shot), ""]
        lines += _remarks(one_shot, found, metric)
    again = [arm for arm in AGAIN if arm.key in found]
    if again:
        lines += [
            f"| trained again | before | {metric['name']} | difference to the control | seeds |",
            "| --- | --- | --- | --- | --- |",
            *(_again_line(arm, found[arm.key], found[CONTROL.key], metric) for arm in again),
            "",
        ]
        lines += _verdict(found, metric)
    hours = sum(row.seconds for row in rows) / 3600
    commits = sorted({row.commit for row in rows})
    lines.append(f"Measured on {machine['cpu']}, {hours:.1f} h in all; twofour at {', '.join(commits)}.\n")
    return "\n".join(lines)


def _one_shot_line(arm: Arm, rows: Sequence[Row], metric: dict[str, object]) -> str:
    differences = [row.value - row.dense for row in rows]
    return f"| {arm.name} | {_values([row.value for row in rows], metric)} | {_signed(statistics.mean(differences))} |"


def _again_line(arm: Arm, rows: Sequence[Row], control: Sequence[Row], metric: dict[str, object]) -> str:
    before = _values([row.one_shot for row in rows], metric)
    value = _values([row.value for row in rows], metric)
    difference = "" if arm == CONTROL else _difference(rows, control)
    return f"| {arm.name} | {before} | {value} | {difference} | {len(rows)} |"


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
    pairs = _paired(magnitude, chance)
    if len(pairs) < 2:
        return []
    mean, half = _interval([a - b for a, b in pairs])
    gain = mean if metric["higher"] else -mean
    if abs(mean) <= half:
        return [f"After training, magnitude and a random mask tie: {_signed(mean)} ± {half:.2f}.\n"]
    word = "better" if gain > 0 else "worse"
    return [f"After training, magnitude is {word} than a random mask: {_signed(mean)} ± {half:.2f}.\n"]


def _difference(rows: Sequence[Row], control: Sequence[Row]) -> str:
    pairs = _paired(rows, control)
    if not pairs:
        return "no control yet"
    if len(pairs) == 1:
        return f"{_signed(pairs[0][0] - pairs[0][1])} (one seed)"
    mean, half = _interval([a - b for a, b in pairs])
    return f"{_signed(mean)} ± {half:.2f}"


def _paired(rows: Sequence[Row], control: Sequence[Row]) -> list[tuple[float, float]]:
    other = {row.seed: row.value for row in control}
    return [(row.value, other[row.seed]) for row in rows if row.seed in other]


def _interval(differences: Sequence[float]) -> tuple[float, float]:
    """Mean and half the 95 % interval of Student's t."""
    half = STUDENT[len(differences) - 1] * statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.mean(differences), half


def _signed(value: float) -> str:
    return f"{round(value, 2) + 0.0:+.2f}"  # + 0.0: no minus before zero


def _one_per_seed(rows: Sequence[Row]) -> list[Row]:
    return list({row.seed: row for row in rows if not row.key.startswith("again")}.values())


def _values(values: Sequence[float], metric: dict[str, object]) -> str:
    values = list(values)
    mean = statistics.mean(values)
    if len(set(values)) > 1:
        return f"{mean:.2f} ± {statistics.stdev(values):.2f}"
    if metric["unit"] == "%":
        return f"{mean:.2f} ± {math.sqrt(mean * (100 - mean) / float(str(metric['held_out']))):.2f}"
    return f"{mean:.2f}"
