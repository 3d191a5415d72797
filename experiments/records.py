"""What a task's runs found: one JSON file per task, written whole after every row, so that a stopped run goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from twofour import measure
from twofour.errors import DataError
from twofour.files import PATIENCE, locked, replacing

ROOT = Path(__file__).resolve().parent
TRACKED, SCRATCH = ROOT / "records", ROOT.parent / "runs" / "experiments"
FORMAT = 1


SAME = "the same"
"""The recipe of rows that were trained before there was another."""


@dataclass(frozen=True)
class Row:
    """One model that was measured.

    Attributes:
        key: The arm's key.
        seed: Seed of the dense training (where there is one), of the repetition, and of a random mask.
        dense: The metric of the dense model it came from.
        one_shot: The metric right after pruning; the dense model's for the control.
        value: The metric at the end; equals `one_shot` where nothing was trained.
        seconds: Of pruning and training; of a row that was stopped, of what the last call did.
        epochs: Epochs of the repetition, 0 where there was none.
        commit: The version it was run with.
        pruning: Seconds of processor time of pruning alone; None where they were not kept.
        memory: Bytes that the process held at most while pruning, beyond what it held before; None where unknown.
        gpu: The GPU that it was pruned and trained on; None where that was the processor.
        control: The metric of the control itself that taught it, or that was pruned, on the same machine; None where it
            is known from a row of its own alone.
        instead: Whether that control, pruned after its training, is what stands.
    """

    key: str
    seed: int
    dense: float
    one_shot: float
    value: float
    seconds: float
    epochs: int
    commit: str
    pruning: float | None = None
    memory: int | None = None
    gpu: str | None = None
    control: float | None = None
    instead: bool = False


@dataclass(frozen=True, kw_only=True)
class Brought(Row):
    """One net that was trained elsewhere, on a GPU, and answers here: `seconds` are of there, `value` is found here.

    Attributes:
        start_epochs: Epochs of the float net that it began with.
        taught: Whether that net taught it.
        images: Training images, the first ones.
        batch: Of a step.
        device: What it was trained on.
        there: The metric at the end, found there.
        answers: Held-out examples that compiled kernels answered with the same bits; 0 for floats.
        whole: Those that 64-bit whole numbers did.
        recipe: What the nets of few bits beside it were trained by.
    """

    start_epochs: int
    taught: bool
    images: int
    batch: int
    device: str
    there: float
    answers: int = 0
    whole: int = 0
    recipe: str = SAME


@dataclass(frozen=True)
class Run:
    """One model trained from scratch.

    Attributes:
        key: What was done to its gradients.
        seed: Of its weights, its batches and a random choice.
        value: The metric at the end.
        seconds: Of the training.
        epochs: Of the training.
        commit: The version it was run with.
    """

    key: str
    seed: int
    value: float
    seconds: float
    epochs: int
    commit: str


@dataclass(frozen=True)
class Nearness:
    """How near the weight gradients of one batch come to the exact ones when each layer prunes its dL/dz.

    Attributes:
        key: What was done to the gradients.
        seed: Of the weights, of the training before and of a random choice.
        size: Norm of the first layer's weight gradient, relative to the exact one's.
        cosine: Between the two.
        lowest: The least cosine of all layers.
        commit: The version it was run with.
    """

    key: str
    seed: int
    size: float
    cosine: float
    lowest: float
    commit: str


@dataclass(frozen=True)
class Trained:
    """One recurrent net trained from scratch, pruned meanwhile.

    Attributes:
        key: How it was pruned.
        seed: Of its weights and its batches.
        value: The metric at the end.
        sparsity: Share of the recurrent weights that is zero.
        parameters: Those of the whole net that are not.
        width: Of the recurrent layer.
        factor: Of the thresholds; 0 where there are none.
        quantiles: The 0.9 quantile of |w| at the end, by parameter.
        seconds: Of the training, without the search for the factor.
        epochs: Of the training.
        commit: The version it was run with.
    """

    key: str
    seed: int
    value: float
    sparsity: float
    parameters: int
    width: int
    factor: float
    quantiles: dict[str, float]
    seconds: float
    epochs: int
    commit: str


@dataclass(frozen=True)
class Shrunk:
    """One net that lost channels while it was trained, or did not.

    Attributes:
        key: How.
        seed: Of its weights and its batches.
        value: The metric at the end.
        parameters: That it has at the end.
        widths: Channels of each group before and after, where they were learned.
        layers: Blocks that went, where that was learned.
        seconds: Of its trainings.
        epochs: Before the cut, or of the training where there is one alone.
        commit: The version it was run with.
    """

    key: str
    seed: int
    value: float
    parameters: int
    widths: dict[str, list[int]]
    layers: list[str]
    seconds: float
    epochs: int
    commit: str


@dataclass(frozen=True)
class Turned:
    """One model between 2:4 and dense, pruned once.

    Attributes:
        key: The criterion, and the pattern of all layers or the name of a mixed recipe; "dense".
        seed: Of the dense training, where there is one.
        value: The metric.
        away: Norm of the difference to the dense model's answers to the held-out examples, relative to theirs.
        density: Share of the eligible weights that is kept.
        seconds: Of pruning.
        commit: The version it was run with.
        recipe: Of a mixed one: pattern by layer.
    """

    key: str
    seed: int
    value: float
    away: float
    density: float
    seconds: float
    commit: str
    recipe: dict[str, str]


@dataclass(frozen=True)
class Clocked:
    """What the compiled model of a row of `Turned` takes.

    Attributes:
        key: The row's.
        seed: The row's.
        ms: Median milliseconds of processor time of a call, one thread.
        lower: First quartile.
        upper: Third quartile.
        samples: Of which.
        load: Processes that wanted to run meanwhile, this one included; None where unknown.
        commit: The version it was run with.
        operations: Layers by the operation that runs them.
    """

    key: str
    seed: int
    ms: float
    lower: float
    upper: float
    samples: int
    load: float | None
    commit: str
    operations: dict[str, int]


R = TypeVar("R", Row, Brought, Run, Nearness, Trained, Shrunk, Turned, Clocked)


class Records(Generic[R]):
    """The rows of one task.

    Args:
        task: Its name.
        metric: What the figures are, for the page.
        tracked: Keep them in git rather than in runs/.
        kind: What a row is.
    """

    def __init__(self, task: str, metric: dict[str, Any], tracked: bool, kind: type[R] = Row) -> None:
        self.path = (TRACKED if tracked else SCRATCH) / f"{task}.json"
        self.task, self.metric = task, metric
        self.rows: dict[tuple[str, int], R] = {}
        if self.path.exists():
            self.rows = {(row.key, row.seed): row for row in load(self.path, kind)[1]}

    def add(self, row: R) -> None:
        """Add a row and write the file, with the rows that another process has added meanwhile.

        Raises:
            DataError: Another process writes records for `PATIENCE` seconds.
        """
        remedy = "run one task at a time, or give the same command again: finished rows are kept"
        with locked(self.path.parent, DataError, remedy=remedy, wait=PATIENCE):
            if self.path.exists():
                self.rows = {(found.key, found.seed): found for found in load(self.path, type(row))[1]} | self.rows
            self.rows[row.key, row.seed] = row
            self._write()

    def replace(self, rows: Sequence[R]) -> None:
        """Write the file with these rows alone, where rows of two runs do not belong beside each other.

        Raises:
            DataError: As `add`.
        """
        with locked(self.path.parent, DataError, remedy="give the same command again", wait=PATIENCE):
            self.rows = {(row.key, row.seed): row for row in rows}
            self._write()

    def _write(self) -> None:
        content = {
            "format": FORMAT,
            "task": self.task,
            "metric": self.metric,
            "machine": measure.machine(),
            "rows": [asdict(row) for row in self.rows.values()],
        }
        with replacing(self.path) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def version() -> str:
    """The commit, as a row keeps it."""
    commit: Any = measure.machine().get("commit") or {}
    return f"{commit.get('id', 'none')[:10]}{' + changes' if commit.get('dirty') else ''}"


def load(path: Path, kind: type[R] = Row) -> tuple[dict[str, Any], list[R]]:
    """Return a file's head and its rows."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if content.get("format") != FORMAT:
        raise ValueError(f"{path}: format {content.get('format')!r}, wanted {FORMAT}")
    return content, [kind(**row) for row in content["rows"]]
