"""Fusion: eight models, dense and 2:4, in every runtime; time, kernels of a run, bytes between them.

As the case `models`, on one thread, with what the engine is about beside it: our layers without a graph, how many
kernels one run of ours, of Inductor (freezing off and on) and of ONNX Runtime calls, and the bytes that torch's
allocator hands out meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console

from cases import counts
from cases.columns import headed, milliseconds, show_missing
from cases.models import (
    DENSE,
    EAGER,
    INDUCTOR,
    OPENVINO,
    OPENVINO_SPARSE,
    ORT,
    SPARSE,
    Bench,
    Builders,
    Side,
    compiled,
)
from cases.records import machine_line
from models import Subject
from models.fusion import FUSION
from twofour.errors import DataError
from twofour.measure import Record, geometric_mean

LAYERS, CLOSE, UNFROZEN = "twofour dense, by layers", "twofour dense, close", f"{INDUCTOR}, freezing off"
SPARSE_CLOSE = "twofour 2:4, close"
OUTSIDE = (ORT, OPENVINO, OPENVINO_SPARSE)
"""Runtimes whose memory torch's allocator does not see."""

TIMED = (EAGER, INDUCTOR, ORT, OPENVINO, LAYERS, DENSE, CLOSE, SPARSE, SPARSE_CLOSE)

OURS = {"dense": DENSE, "close": CLOSE, "2:4": SPARSE, "2:4 close": SPARSE_CLOSE}


def cells(models: Sequence[str]) -> list[dict[str, object]]:
    """List the cells: each model at batch 1 on one thread.

    Raises:
        DataError: There is no such model.
    """
    for name in models:
        if name not in FUSION:
            raise DataError(f"there is no model {name!r}", got=name, wanted=f"one of {', '.join(FUSION)}")
    return [{"case": "fusion", "model": name, "dtype": "float32", "batch": 1, "threads": 1} for name in models]


class FusionBench(Bench):
    """Measures cells, counting too unless `count` is False: Inductor compiles each model twice more for that."""

    def __init__(self, seconds: float, without: Sequence[str] = (), *, count: bool = True) -> None:
        super().__init__(seconds, without)
        self.builders, self.count = {name: lambda _, build=build: build() for name, build in FUSION.items()}, count

    def ours(self, side: Side, subject: Subject, dtype: str, reference: np.ndarray) -> Builders:
        """Return the layers by themselves, and what compile chooses, also of rules that are merely close."""
        return {
            LAYERS: (partial(compiled, side, LAYERS, subject, dtype, graph=False), reference),
            DENSE: (partial(compiled, side, DENSE, subject, dtype, graph="auto"), reference),
            CLOSE: (partial(compiled, side, CLOSE, subject, dtype, graph="auto", rules="close"), reference),
        }

    def ours_pruned(self, side: Side, pruned: Subject, dtype: str, reference: np.ndarray) -> Builders:
        """Return the 2:4 model, and the same by rules that are merely close: dense layers of fewer sums compete."""
        close = partial(compiled, side, SPARSE_CLOSE, pruned, dtype, graph="auto", rules="close")
        return {**super().ours_pruned(side, pruned, dtype, reference), SPARSE_CLOSE: (close, reference)}

    def facts(self, subject: Subject, side: Side) -> dict[str, object]:
        """Return the kernels of a run by runtime, and what torch's allocator sees of it."""
        memory = {name: counts.allocated(call) for name, call in side.calls.items() if name not in OUTSIDE}
        kernels = {
            name: counts.our_kernels(account)
            for name, account in side.accounts.items()
            if account and account.engine == "graph" and account.after
        }
        if self.count:
            kernels[UNFROZEN], unfrozen = counts.inductor_kernels(subject, freezing=False)
            memory[UNFROZEN] = counts.allocated(unfrozen)
            kernels[INDUCTOR], _ = counts.inductor_kernels(subject, freezing=True)
            kernels[ORT] = counts.onnxruntime_kernels(subject)
        return {"kernels": kernels, "memory": memory}


def figures(record: Record) -> dict[str, float | None]:
    """Return the times of ours over the best peer's, and kernels and bytes over the better count's; lower is better."""
    best = min((record.median(name) for name in record.baseline), default=None)
    kernels = {name: found["all"] for name, found in _facts(record, "kernels").items()}
    theirs = [count for name, count in kernels.items() if name in (ORT, INDUCTOR, UNFROZEN)]
    unfrozen = _facts(record, "memory").get(UNFROZEN)
    ours = _facts(record, "kernels").get(DENSE, {}).get("intermediate_bytes")
    return {
        **{f"{title} / best": _over(record, name, best) for title, name in OURS.items()},
        "kernels": kernels[DENSE] / min(theirs) if DENSE in kernels and theirs else None,
        "bytes": ours / unfrozen["bytes"] if ours and unfrozen else None,
    }


def _over(record: Record, name: str, best: float | None) -> float | None:
    return record.median(name) / best if best and name in record.timings else None


def show(records: Sequence[Record], console: Console) -> None:
    """Print milliseconds, kernels and bytes of each model, then the means of the ratios."""
    _print(console, "milliseconds per call, medians", TIMED, records, lambda r, name: milliseconds(r, name, 1))
    counted = (UNFROZEN, INDUCTOR, ORT, *OURS.values())
    _print(console, "kernels of a run", counted, records, lambda r, name: _fact(r, "kernels", name, "all", 1))
    held = (EAGER, UNFROZEN, INDUCTOR, LAYERS, *OURS.values())
    for title, key in (("megabytes that torch's allocator hands out in a run", "bytes"), ("the most at once", "peak")):
        _print(console, title, held, records, lambda r, name, key=key: _fact(r, "memory", name, key, 1e6))
    between = "megabytes between the calls of ours, each tensor once"
    for title, key in ((between, "intermediate_bytes"), ("megabytes planned for them", "arena_bytes")):
        _print(
            console, title, list(OURS.values()), records, lambda r, name, key=key: _fact(r, "kernels", name, key, 1e6)
        )
    ratios = [figures(record) for record in records]
    names = list(ratios[0]) if ratios else []
    found = {id(record): values for record, values in zip(records, ratios, strict=True)}
    _print(console, "ours over the best", names, records, lambda r, name: _two(found[id(r)][name]))
    for name in names:
        values = [value for entry in ratios if (value := entry[name])]
        if values:
            console.print(
                f"{name}: geometric mean {geometric_mean(values):.2f}, worst {max(values):.2f}", highlight=False
            )
    show_missing(records, lambda record: str(record.meta["model"]), console)
    console.print(machine_line(records[-1]), highlight=False, markup=False, soft_wrap=True)


def _print(
    console: Console,
    title: str,
    names: Sequence[str],
    records: Sequence[Record],
    cell: Callable[[Record, str], str],
) -> None:
    console.print(f"\n{title}", style="bold")
    table = headed(("model", *names))
    for record in records:
        table.add_row(str(record.meta["model"]), *(cell(record, name) for name in names))
    console.print(table)


def _facts(record: Record, name: str) -> dict[str, Any]:
    found = record.meta.get(name)
    assert isinstance(found, dict), found
    return found


def _fact(record: Record, name: str, runtime: str, key: str, unit: float) -> str:
    found = _facts(record, name).get(runtime)
    return (
        "-"
        if found is None or key not in found
        else f"{found[key] / unit:.0f}"
        if unit == 1
        else f"{found[key] / unit:.1f}"
    )


def _two(value: float | None) -> str:
    return f"{value:.2f}" if value else "-"
