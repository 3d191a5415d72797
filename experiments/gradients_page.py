"""The sections of docs/results.md about pruned gradients, drawn from their records alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradients import CONTROL, RULES, Rule
from over_seeds import difference, interval, paired, signed, values
from records import Nearness, Run, load
from tasks import GRADIENTS, Task

GOAL = 0.3
"""Points; the authors' full-size runs differ by 0.1."""


def sections(folder: Path) -> list[str]:
    """One section per task, measured or not."""
    found = []
    for name, kind in GRADIENTS.items():
        path = folder / f"{name}.json"
        found.append(_section(kind(), *load(path, Run)) if path.exists() else _waiting(kind()))
    path = folder / "gradients-nearness.json"
    return [*found, _nearness(*load(path, Nearness))] if path.exists() else found


def _nearness(head: dict[str, Any], rows: list[Nearness]) -> str:
    lines = [
        "## Pruned gradients (SDGP): how near one batch's come to exact ones\n",
        "`python experiments/run.py nearness --record`\n",
        "The same net after one epoch of exact training, one batch: weight gradients with every layer's dL/dz pruned, "
        "beside the exact ones. The first layer lies behind seven pruned ones, so the error has compounded there. "
        "Mean ± standard deviation over seeds.\n",
        "| dL/dz | first layer: norm / exact | its cosine | lowest cosine of all layers | seeds |",
        "| --- | --- | --- | --- | --- |",
    ]
    for rule in RULES:
        of = [row for row in rows if row.key == rule.key]
        if of:
            columns = ([row.size for row in of], [row.cosine for row in of], [row.lowest for row in of])
            lines.append(f"| {rule.key} | {' | '.join(_spread(column) for column in columns)} | {len(of)} |")
    commits = ", ".join(sorted({row.commit for row in rows}))
    return "\n".join([*lines, "", f"Measured on {head['machine']['cpu']}; twofour at {commits}.\n"])


def _spread(found: list[float]) -> str:
    return f"{statistics.mean(found):.3f}" + (f" ± {statistics.stdev(found):.3f}" if len(found) > 1 else "")


def _command(task: Task) -> str:
    return f"`python experiments/run.py gradients {task.name.removeprefix('gradients-')} --record`"


def _waiting(task: Task) -> str:
    return f"## {task.title}\n\nNot measured yet: {_command(task)}.\n"


def _section(task: Task, head: dict[str, Any], runs: list[Run]) -> str:
    metric, machine = head["metric"], head["machine"]
    of = {rule: [run for run in runs if run.key == rule.key] for rule in RULES}
    rules = [rule for rule in RULES if of[rule]]
    published = metric["unit"] == "%"  # the authors trained no language model
    unit = f" ({metric['unit']})" if metric["unit"] else ""
    lines = [
        f"## {task.title}\n",
        f"{_command(task)}\n",
        f"{metric['name']}{unit}, {'higher' if metric['higher'] else 'lower'} is better, {metric['held_out']:,} "
        f"held-out {metric['of']}. {task.notes.format(epochs=task.epochs)}\n",
        f"| dL/dz | {metric['name']} | difference to dense | seeds |{' published, full size |' if published else ''}",
        f"| --- | --- | --- | --- |{' --- |' if published else ''}",
        *(_line(rule, of[rule], of[CONTROL], metric, published) for rule in rules),
        "",
        *_verdict(of, metric),
        *_goal(of, published),
        f"Measured in {sum(run.seconds for run in runs) / 3600:.1f} h, the last row on {machine['cpu']}; twofour at "
        f"{', '.join(sorted({run.commit for run in runs}))}.\n",
    ]
    return "\n".join(lines)


def _line(rule: Rule, runs: Sequence[Run], control: Sequence[Run], metric: dict[str, Any], published: bool) -> str:
    apart = "" if rule == CONTROL else difference(runs, control)
    theirs = f" {'-' if rule.published is None else rule.published} |" if published else ""
    return f"| {rule.key} | {values([run.value for run in runs], metric)} | {apart} | {len(runs)} |{theirs}"


def _goal(of: dict[Rule, list[Run]], published: bool) -> list[str]:
    """Say whether pruned gradients come as near to dense ones as the authors' do."""
    rescaled = next(rule for rule in RULES if (rule.pattern, rule.mode) == ("2:4", "rescaled"))
    pairs = paired(of[rescaled], of[CONTROL])
    if not published or not pairs:
        return []
    mean = statistics.mean(a - b for a, b in pairs)
    word = "met" if abs(mean) <= GOAL else "missed"
    apart = {rule: [a - b for a, b in paired(of[rule], of[CONTROL])] for rule in RULES if rule.pattern == "2:4"}
    nearest = max((rule for rule in apart if apart[rule]), key=lambda rule: statistics.mean(apart[rule]))
    return [
        f"Goal, rescaled 2:4 within {GOAL} points of dense: {word}, {signed(mean)}. Nearest to dense at 2:4 here: "
        f"{nearest.mode}, {signed(statistics.mean(apart[nearest]))}.\n"
    ]


def _verdict(of: dict[Rule, list[Run]], metric: dict[str, Any]) -> list[str]:
    """Say whether a random choice came out worse than magnitude's: on small tasks it may not."""
    at = {rule.mode: of[rule] for rule in RULES if rule.pattern == "2:4"}
    pairs = paired(at["random"], at["rescaled"])
    if len(pairs) < 2:
        return []
    mean, half = interval([a - b for a, b in pairs])
    if abs(mean) <= half:
        return [f"Random and rescaled tie at 2:4 here: {signed(mean)} ± {half:.2f}.\n"]
    worse = mean < 0 if metric["higher"] else mean > 0
    return [f"At 2:4 random comes out {'worse' if worse else 'better'} than rescaled: {signed(mean)} ± {half:.2f}.\n"]
