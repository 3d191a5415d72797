"""What the demo found: one record, one table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twofour.checker import Report
from twofour.compiler import Plan
from twofour.measure import Record
from twofour.training import Result

if TYPE_CHECKING:
    from rich.table import Table

EAGER, BEST_DENSE, OURS = "F.linear", "best dense", "ours"


@dataclass(frozen=True)
class Difference:
    """Accuracy of the sparse model minus that of its control, on the same images.

    Attributes:
        value: The difference, a fraction.
        error: Its standard error over images: sqrt(b + c - (b - c)^2 / n) / n for b and c images that only one of
            the two models gets right (McNemar's counts).
    """

    value: float
    error: float

    @classmethod
    def of(cls, sparse_right: list[bool], control_right: list[bool]) -> Difference:
        """Compare two models image by image."""
        n = len(sparse_right)
        b = sum(s and not c for s, c in zip(sparse_right, control_right, strict=True))
        c = sum(c and not s for s, c in zip(sparse_right, control_right, strict=True))
        return cls((b - c) / n, math.sqrt(max(b + c - (b - c) ** 2 / n, 0.0)) / n)


@dataclass(frozen=True)
class Summary:
    """Result of one demo run.

    Attributes:
        data: Name of the data set.
        accuracy: Model name to the fraction of held-out images answered right.
        test: Number of held-out images.
        difference: Sparse minus control, image by image.
        agreement: Fraction of held-out images on which the saved file, loaded again, answers as the trained model.
        bytes_dense: Bytes of the dense checkpoint.
        bytes_packed: Bytes of the packed checkpoint.
        latency: Batch size to the interleaved comparison of the three models.
        training: The sparse run and its control.
        plan: The compiled model's plan.
        masks: What `twofour.check` says of the trained masked model.
        seconds: Wall time of the whole demo.
        seed: Seed of everything.
        folder: Where the run's files lie.
        quick: Whether the network was the tiny one, whose figures mean nothing.
    """

    data: str
    accuracy: Mapping[str, float]
    test: int
    difference: Difference
    agreement: float
    bytes_dense: int
    bytes_packed: int
    latency: Mapping[int, Record]
    training: Result
    plan: Plan
    masks: Report
    seconds: float
    seed: int
    folder: Path
    quick: bool = False

    def error(self, name: str) -> float:
        """Binomial standard error of one accuracy: sqrt(p (1 - p) / n)."""
        p = self.accuracy[name]
        return math.sqrt(p * (1 - p) / self.test)

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts, lists and numbers, ready for `json.dumps`."""
        return {
            "data": self.data,
            "seed": self.seed,
            "quick": self.quick,
            "test_images": self.test,
            "accuracy": dict(self.accuracy),
            "accuracy_standard_error": {name: self.error(name) for name in self.accuracy},
            "sparse_minus_control": {"value": self.difference.value, "standard_error": self.difference.error},
            "saved_file_agrees": self.agreement,
            "bytes": {"dense": self.bytes_dense, "packed": self.bytes_packed},
            "latency": {str(batch): record.to_dict() for batch, record in self.latency.items()},
            "training": self.training.to_dict(),
            "weights": [
                {"name": w.name, "promised": w.promised, "zeros": w.zeros, "legal": w.legal, "verdict": w.verdict}
                for w in self.masks.layers
            ],
            "seconds": self.seconds,
            "folder": str(self.folder),
        }

    def table(self) -> Table:
        """The one table: accuracy, checkpoint bytes, latency, ratio to the best dense."""
        from rich import box
        from rich.table import Table

        title = f"twofour demo on {self.data}, seed {self.seed}"
        title += " (quick: too small to judge by)" if self.quick else ""
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("model", no_wrap=True)
        for name in ("accuracy", "checkpoint", *(f"batch {batch}" for batch in self.latency)):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows():
            table.add_row(*row)
        return table

    def rows(self) -> list[tuple[str, ...]]:
        """Cells of the table, row by row."""
        dense, packed = f"{self.bytes_dense / 1e6:.2f} MB", f"{self.bytes_packed / 1e6:.2f} MB"
        return [
            ("dense", self._accuracy("dense"), dense),
            ("dense again: F.linear", self._accuracy("control"), dense, *self._latencies(EAGER)),
            ("  best dense kernels", "", "", *self._latencies(BEST_DENSE)),
            ("2:4 one-shot", self._accuracy("one-shot"), packed),
            ("2:4 trained again: ours", self._accuracy("sparse"), packed, *self._latencies(OURS)),
            ("  against the best dense", "", "", *self._ratios()),
        ]

    def notes(self) -> str:
        """What the figures rest on: images, errors, machine."""
        first = next(iter(self.latency.values()))
        software = first.machine.get("software")
        torch_version = software.get("torch") if isinstance(software, Mapping) else None
        threads = f"{first.threads} thread{'s' * (first.threads > 1)}"
        noise = ", ".join(f"{r.noise:.1%} at batch {b}" for b, r in self.latency.items() if r.noise is not None)
        return (
            f"n = {self.test} held-out images, one run: ± is the standard error over images, not over seeds.\n"
            f"ours minus dense again (the control), image by image: {self.difference.value * 100:+.2f} ± "
            f"{self.difference.error * 100:.2f} points.\n"
            f"The saved file, loaded again, agrees with the trained model on {self.agreement:.1%} of the images.\n"
            f"Times: medians of interleaved runs, float32; the best dense against itself differs by {noise}.\n"
            f"{first.machine.get('cpu')}, {threads}, torch {torch_version}; {self.seconds:.0f} s in all."
        )

    def _accuracy(self, name: str) -> str:
        return f"{self.accuracy[name] * 100:.2f} ± {self.error(name) * 100:.2f} %"

    def _latencies(self, name: str) -> list[str]:
        return [f"{record.median(name) * 1e3:.3g} ms" for record in self.latency.values()]

    def _ratios(self) -> list[str]:
        return [f"{record.ratio(OURS):.2f}x" for record in self.latency.values()]
