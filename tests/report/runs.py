"""Runs as commands leave them, small, and names that mean harm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twofour import measure
from twofour.measure import Record, Timing
from twofour.training.result import Epoch, Result, Run

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "'; alert(3) //",
    "</style></script><iframe src='https://example.com'>",
    "javascript:alert(4)",
    "a\u202eb\u200bc\x00d\x1be\ud800f",
    "encoder.layer.0.attention.self.query",
)
MACHINE = {"cpu": "<b>AMD</b>", "isa": ["avx2", "<i>"], "cores_allowed": 2, "software": {"torch": "<u>2"}}
MACHINE |= {"commit": {"id": "<b>0123456789", "dirty": True}}


def timing(seconds: float) -> Timing:
    return Timing(seconds, 0.9 * seconds, 1.2 * seconds, 0.8 * seconds, 20, 1)


def record(case: str, **meta: Any) -> Record:
    times = {"torch eager": timing(4e-3), "OpenVINO": timing(2e-3), "twofour 2:4, float32": timing(1e-3)}
    about = {"case": case, "model": "small", "batch": 1, **meta}
    return Record(times, ("torch eager", "OpenVINO"), noise=0.01, meta=about, machine=MACHINE, created="2026-01-01")


def layer(name: str, **given: Any) -> dict[str, Any]:
    whole = {"name": name, "kind": "Linear", "shape": [64, 32], "kernel": "nm_matmul_x", "sparse": True}
    return {**whole, "reason": "sparse is faster", "dense_ms": 0.2, "sparse_ms": 0.1, "parts": [], **given}


def optimized(folder: Path, names: tuple[str, ...] = ("fc1", "fc2", "head")) -> Path:
    """Write what `optimize` leaves, with these layers, and these texts wherever a text stands."""
    first = names[0]
    scores = [
        {"name": "dense", "value": 100.0, "error": None},
        {"name": first, "value": 98.4, "error": 0.5, "note": first, "ours": True},
    ]
    meta = {
        "model": first,
        "verdict": first,
        "figures": [["times as fast", "2.00x", first]],
        "quality": [{"title": first, "said": first, "unit": "%", "floor": 98.0, "scores": scores}],
        "sizes": {"dense": 4_000_000, first: 2_200_000},
        "candidates": {name: name for name in names},
        "losses": {name: 0.1 * index for index, name in enumerate(names)},
        "weights": [{"name": name, "promised": "2:4", "zeros": 0.5, "legal": True, "verdict": name} for name in names],
        "loading": first,
        "notes": [first],
    }
    layers = [
        layer(name, reason=name, sparse_ms=0.05 * (index + 1), sparse=index % 2 == 0)
        for index, name in enumerate(names)
    ]
    folder.mkdir(exist_ok=True)
    measure.save([record("optimize", **meta)], folder / "results.json")
    measure.write_json(folder / "plan.json", {"layers": layers})
    return folder


def trained() -> dict[str, Any]:
    """Return what `finetune` does, as JSON holds it."""
    runs = [
        Run(name, 0.5, tuple(Epoch(n, 1.0 / n, 0.01, 0.8 + n / 100) for n in range(1, epochs)), 3.0)
        for name, epochs in (("sparse", 6), ("control", 6))
    ]
    return Result(runs[0], runs[1], 0).to_dict()
