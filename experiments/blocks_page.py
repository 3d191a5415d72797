"""The sections of docs/results.md about recurrent nets that lose blocks, drawn from their records alone."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from block_rnn import ARMS, DENSE, SMALL, SQUARES, UNSTRUCTURED, Arm
from over_seeds import difference, interval, paired, signed, values
from records import Trained, load
from tasks import BLOCKS, Recurrent

HEAD = """## Block-sparse recurrent nets: what a row is

Narang, Undersander and Diamos 2017 (arXiv 1711.02782): blocks go while the only training runs. Every net of a table has
the same batches, epochs and optimiser; embedding, biases and head stay dense and count as parameters.

* **BP**: the paper's rising thresholds alone, from the second epoch until half of the training, aimed at the 0.9
  quantile of |w| of the dense net with the same seed. **GLP**: with group lasso until then. The factor of both is
  searched with the first seed, so sparsities differ a little; the others take it as it is.
* **cubic**: `training.gradual`, which reaches its sparsity without a search, between the same steps.
* **1x2**: stands for single weights. Blocks have two values at least here.
* **small dense**: as wide as makes its parameters those that the pruned nets keep. **large**: a wider net, pruned to
  the parameters of the dense one.
* ± behind a value is the standard deviation over seeds; behind a difference, Student's 95 % interval of the pairs with
  the same seed.
"""

ORDER = (DENSE, Arm("BP", UNSTRUCTURED), Arm("GLP", SQUARES[0]), Arm("BP", SQUARES[0]), Arm("BP", SQUARES[1]))
"""Best first, at like sparsity: what the paper's text and tables amount to for small blocks."""


def sections(folder: Path) -> list[str]:
    """What all tables share, then one section per task, measured or not."""
    found = [HEAD]
    for name, kind in BLOCKS.items():
        path = folder / f"{name}.json"
        found.append(_section(kind(), *load(path, Trained)) if path.exists() else _waiting(kind()))
    return found


def _command(task: Recurrent) -> str:
    return f"`python experiments/run.py blocks {task.name.removeprefix('blocks-')} --record`"


def _waiting(task: Recurrent) -> str:
    return f"## Blocks: {task.title}\n\nNot measured yet: {_command(task)}.\n"


def _section(task: Recurrent, head: dict[str, Any], rows: list[Trained]) -> str:
    metric = head["metric"]
    of = {arm: [row for row in rows if row.key == arm.key] for arm in ARMS}
    unit = f" ({metric['unit']})" if metric["unit"] else ""
    name = f"{metric['name']}{unit}"
    missing = [arm.key for arm in ARMS if not of[arm]]
    lines = [
        f"## Blocks: {task.title}\n",
        f"{_command(task)}\n",
        f"{name}, {'higher' if metric['higher'] else 'lower'} is better, {metric['held_out']:,} held-out "
        f"{metric['of']}. {task.notes.format(epochs=task.epochs)}\n",
        f"| net | width | zeros (%) | parameters | {name} | difference to dense | to small dense | factor | seeds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_line(arm, of, metric) for arm in ARMS if of[arm]),
        "",
        *_order(of, metric),
        *_versus(of, SMALL, [arm for arm in ARMS if arm.way and not arm.size], metric),
        *_versus(of, DENSE, [arm for arm in ARMS if arm.size == "large"], metric),
        *([f"Not run: {', '.join(missing)}.\n"] if missing else []),
        f"Measured in {sum(row.seconds for row in rows) / 3600:.1f} h, the last row on {head['machine']['cpu']}; "
        f"twofour at {', '.join(sorted({row.commit for row in rows}))}.\n",
    ]
    return "\n".join(lines)


def _line(arm: Arm, of: dict[Arm, list[Trained]], metric: dict[str, Any]) -> str:
    rows, decimals = of[arm], metric.get("decimals", 2)
    apart = ["" if arm == control else difference(rows, of[control], decimals) for control in (DENSE, SMALL)]
    zeros = _zeros([100 * row.sparsity for row in rows]) if arm.way else ""
    kept = f"{statistics.mean(row.parameters for row in rows):,.0f}"
    factor = f"{rows[0].factor:.2f}" if rows[0].factor else ""
    value = values([row.value for row in rows], metric)
    return (
        f"| {arm.key} | {rows[0].width} | {zeros} | {kept} | {value} | {' | '.join(apart)} | {factor} | {len(rows)} |"
    )


def _zeros(found: list[float]) -> str:
    """The mean, or the least and the most where seeds differ by more than a point."""
    apart = max(found) - min(found) > 1
    return f"{min(found):.1f} to {max(found):.1f}" if apart else f"{statistics.mean(found):.1f}"


def _order(of: dict[Arm, list[Trained]], metric: dict[str, Any]) -> list[str]:
    """Say which neighbours of the expected order come out in it."""
    expected = [arm for arm in ORDER if of[arm]]
    if len(expected) < len(ORDER):
        return []
    apart = [_apart(of[worse], of[better], metric) for better, worse in itertools.pairwise(expected)]
    said = [
        f"{better.key}, {worse.key} {word}"
        for (better, worse), word in zip(itertools.pairwise(expected), apart, strict=True)
    ]
    return [
        f"Expected order, best first: {', '.join(arm.key for arm in expected)}. Neighbours here: {'; '.join(said)}.\n"
    ]


def _apart(worse: Sequence[Trained], better: Sequence[Trained], metric: dict[str, Any]) -> str:
    mean, half = _loss(worse, better, metric)
    if half is None:
        return f"in order (+{mean:.3f}, one seed)" if mean > 0 else f"reversed ({mean:.3f}, one seed)"
    if abs(mean) <= half:
        return f"tie ({signed(mean, 3)} ± {half:.3f})"
    return f"{'in order' if mean > 0 else 'reversed'} ({signed(mean, 3)} ± {half:.3f})"


def _loss(rows: Sequence[Trained], control: Sequence[Trained], metric: dict[str, Any]) -> tuple[float, float | None]:
    """By how much rows are worse than a control, and half the interval; None of one seed."""
    sign = -1 if metric["higher"] else 1
    apart = [sign * (a - b) for a, b in paired(rows, control)]
    return interval(apart) if len(apart) > 1 else (apart[0], None)


def _versus(of: dict[Arm, list[Trained]], control: Arm, arms: list[Arm], metric: dict[str, Any]) -> list[str]:
    """Say which pruned nets are better than a dense one of as many parameters."""
    verdicts: dict[str, list[str]] = {"better": [], "tie": [], "worse": []}
    sign = -1 if metric["higher"] else 1
    for arm in arms:
        if not paired(of[arm], of[control]):
            continue
        mean, half = _loss(of[arm], of[control], metric)
        word = "tie" if half is None or abs(mean) <= half else "worse" if mean > 0 else "better"
        seeds = " (one seed)" if half is None else ""
        verdicts[word].append(f"{arm.key} {signed(sign * mean, 3)}{seeds}")
    if not any(verdicts.values()):
        return []
    said = "; ".join(f"{word}: {', '.join(found)}" for word, found in verdicts.items() if found)
    best = "higher" if metric["higher"] else "lower"
    return [f"Against {control.key}, of as many parameters ({best} is better): {said}.\n"]
