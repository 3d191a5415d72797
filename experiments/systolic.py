"""Does twofour.hardware.systolic agree with SCALE-Sim, and how much faster is it? Runs both on the same files.

python -m venv /tmp/scalesim && /tmp/scalesim/bin/pip install scalesim==3.0.0 "numpy==2.2.*"
python experiments/systolic.py /tmp/scalesim/bin/python [small: without the large products, whose record stays]

Writes experiments/records/hardware/systolic.json and, of the small cases, what the tests compare with:
tests/hardware/systolic/scalesim.json. Times are processor time of one thread: SCALE-Sim's of one layer's run without
traces, ours of the closed form, of stepping real products, and of all columns of the reports.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from twofour import measure
from twofour.errors import HardwareError
from twofour.hardware import systolic
from twofour.hardware.systolic import reports

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "hardware" / "systolic" / "scalesim.json"
RECORD = ROOT / "experiments" / "records" / "hardware" / "systolic.json"
CONFIG = """[general]
run_name = {name}
[architecture_presets]
ArrayHeight: {array[0]}
ArrayWidth: {array[1]}
IfmapSramSzkB: {memory[0]}
FilterSramSzkB: {memory[1]}
OfmapSramSzkB: {memory[2]}
IfmapOffset: 0
FilterOffset: 10000000
OfmapOffset: 20000000
Dataflow : {dataflow}
Bandwidth : {bandwidth}
ReadRequestBuffer: 512
WriteRequestBuffer: 512
[layout]
IfmapCustomLayout: False
IfmapSRAMBankBandwidth: 10
IfmapSRAMBankNum: 10
IfmapSRAMBankPort: 2
FilterCustomLayout: False
FilterSRAMBankBandwidth: 10
FilterSRAMBankNum: 10
FilterSRAMBankPort: 2
[sparsity]
SparsitySupport : {sparse}
SparseRep : {stored}
OptimizedMapping : {rowwise}
BlockSize : {block}
RandomNumberGeneratorSeed : 40
[run_presets]
InterfaceBandwidth: {mode}
UseRamulatorTrace: False
"""
GEMM = ((16, 16, 16), (1, 9, 20), (33, 7, 12), (20, 50, 5))
CONV = (
    (8, 8, 3, 3, 3, 8, 1),
    (9, 7, 3, 2, 4, 5, 2),
    (6, 6, 3, 3, 3, 1, 1),
    (5, 5, 1, 1, 8, 12, 1),
    (11, 11, 4, 4, 2, 6, 3),
)
GEMM_NM = (
    (16, 16, 16, "2:4"),
    (12, 9, 22, "2:4"),
    (7, 20, 30, "1:4"),
    (9, 9, 17, "4:8"),
    (8, 8, 8, "3:4"),
    (10, 6, 13, "1:1"),
)
CONV_NM = ((8, 8, 3, 3, 4, 8, 1, "2:4"), (9, 7, 3, 2, 4, 5, 2, "1:4"), (6, 6, 3, 3, 5, 7, 1, "4:8"))
LARGE = ((60, 40, 50), (100, 30, 20))
KINDS = ("closed", "stepped", "reports")
"""What is timed of ours: the closed form, stepping, and everything that the reports need."""
BIG = {"os": (512, 512, 512), "ws": (512, 512, 512), "is": (512, 512, 512), "ws 2:4": (512, 512, 512, "2:4")}


def case(name: str, rows: Sequence[Sequence[object]], **changes: Any) -> dict[str, Any]:
    """One run: a configuration and a topology. The second convolution of three channels is depth-wise."""
    choices: dict[str, Any] = {"memory": (64, 64, 64), "bandwidth": 10, "mode": "CALC", "sparse": "false"}
    choices |= {"stored": "ellpack_block", "rowwise": "false", "block": 4, **changes}
    gemm = len(rows[0]) <= 4
    names = [f"DP{i}" if not gemm and row[4:6] == (3, 1) else f"layer{i}" for i, row in enumerate(rows)]
    head = "Layer, M, N, K," if gemm else "Layer name, height, width, filter height, width, channels, filters, stride,"
    lines = [", ".join(map(str, (each, *row))) + "," for each, row in zip(names, rows, strict=True)]
    text = CONFIG.format(name=name.replace(" ", "_"), **choices)
    return {"name": name, "config": text, "topology": "\n".join([head, *lines, ""]), "gemm": gemm}


def small() -> Iterator[dict[str, Any]]:
    """Cases that the tests keep."""
    for dataflow in systolic.DATAFLOWS:
        for array in ((4, 4), (8, 5), (16, 16)):
            size = f"{dataflow} {array[0]}x{array[1]}"
            yield case(f"gemm {size}", GEMM, dataflow=dataflow, array=array)
            yield case(f"conv {size}", CONV, dataflow=dataflow, array=array)
        flow = {"dataflow": dataflow, "array": (8, 8)}
        yield case(f"gemm N:M {dataflow}", GEMM_NM, sparse="true", **flow)
        yield case(f"conv N:M {dataflow}", CONV_NM, sparse="true", dataflow=dataflow, array=(4, 8))
        yield case(f"memory of 1 kB {dataflow}", LARGE, memory=(1, 1, 1), **flow)
        yield case(f"conv, 1 kB {dataflow}", ((12, 12, 3, 3, 8, 24, 1),), memory=(1, 1, 1), **flow)
        yield case(
            f"2 a cycle {dataflow}", ((30, 20, 25), (64, 64, 16)), memory=(16, 16, 2), mode="USER", bandwidth=2, **flow
        )
        yield case(f"1 a cycle {dataflow}", ((60, 60, 12),), memory=(16, 16, 1), mode="USER", bandwidth=1, **flow)
        yield case(f"conv 10 a cycle {dataflow}", CONV, mode="USER", **flow)
        waits = {"memory": (1, 2, 1), "mode": "USER"}
        yield case(f"waiting {dataflow}", ((60, 40, 50), (31, 17, 23)), **waits, **flow)
        yield case(f"waiting N:M {dataflow}", ((60, 40, 50, "2:4"),), sparse="true", **waits, **flow)
        yield case(f"waiting conv {dataflow}", ((12, 9, 3, 2, 8, 24, 2),), bandwidth=3, **waits, **flow)
        yield case(f"each filter its own {dataflow}", GEMM_NM, sparse="true", rowwise="true", **flow)
    ws = {"dataflow": "ws", "sparse": "true"}
    yield case("each filter its own, 8", GEMM_NM, rowwise="true", block=8, array=(8, 8), **ws)
    yield case("each filter its own, conv", CONV_NM, rowwise="true", block=8, array=(16, 4), **ws)
    for stored in ("csr", "csc"):
        yield case(stored, GEMM_NM, stored=stored, array=(8, 8), **ws)


def peer(python: str, cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Run SCALE-Sim in its own environment."""
    command = [python, str(Path(__file__).with_name("scalesim_side.py"))]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def ours(entry: dict[str, Any]) -> tuple[systolic.Settings, list[systolic.Simulated]]:
    """Read the same files and simulate."""
    with tempfile.TemporaryDirectory() as folder:
        config, topology = Path(folder) / "config", Path(folder) / "topology"
        config.write_text(entry["config"])
        topology.write_text(entry["topology"])
        settings = systolic.read_settings(config)
        return settings, list(systolic.simulated(systolic.read_topology(topology), settings))


def compared(entry: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Cycles and reports of one case, equal or not; where SCALE-Sim crashes, we have to refuse."""
    if "error" in theirs:
        try:
            ours(entry)
        except HardwareError as error:
            return {"name": entry["name"], "layers": 0, "scalesim": theirs["error"], "ours": error.what}
        raise SystemExit(f"{entry['name']}: SCALE-Sim fails with {theirs['error']}, we do not refuse")
    settings, rows = ours(entry)
    cells = [line.split(", ") for line in theirs["reports"]["COMPUTE_REPORT.csv"].splitlines()[1:]]
    want = [int(row[2]) - int(row[3]) for row in cells]
    closed = [int(closed_form(row.layer, settings)) - 1 for row in rows]
    same = sum(text == theirs["reports"][name] for name, text in reports.texts(rows, settings).items())
    return {
        "name": entry["name"],
        "layers": len(want),
        "cycles_equal": sum(a == b == row.cycles - row.stalls for a, b, row in zip(want, closed, rows, strict=True)),
        "reports": len(theirs["reports"]),
        "reports_identical": same,
        "seconds": theirs["seconds"],
    }


def closed_form(layer: systolic.Layer, settings: systolic.Settings) -> int:
    """Cycles of a layer from its sizes alone."""
    if settings.representation is None:
        return systolic.cycles(settings.array, layer.m, layer.n, layer.k)
    if settings.block is not None:  # blocks are filled up to pairs, half of each is kept
        half = -(-layer.k // (2 * settings.block)) * settings.block
        return systolic.cycles(settings.array, layer.m, layer.n, half)
    return systolic.cycles(settings.array, layer.m, layer.n, layer.k, layer.kept, layer.group)


def speeds(layer: systolic.Layer, settings: systolic.Settings, theirs: float, seconds: float) -> dict[str, float]:
    """Seconds of both sides for one layer, and SCALE-Sim's over ours."""
    drawn = np.random.default_rng(0)
    x, w = (drawn.standard_normal(size).astype(np.float32) for size in ((layer.m, layer.k), (layer.k, layer.n)))
    kept = w
    if settings.representation is not None:
        w[np.arange(layer.k) % layer.group >= layer.kept] = 0
        kept = systolic.keep(w, layer.kept, layer.group)
    record = measure.compare(
        {
            "closed": lambda: closed_form(layer, settings),
            "stepped": lambda: systolic.step(settings.array, x, kept),
            "reports": lambda: systolic.simulate(layer, settings),
        },
        clock="thread",
        threads=1,
        seconds=seconds,
    )
    found = {name: record.median(name) for name in KINDS}
    seconds_ = {f"{name}_seconds": value for name, value in {"scalesim": theirs, **found}.items()}
    return {**seconds_, **{f"{name}_ratio": theirs / value for name, value in found.items()}}


def summed(table: list[dict[str, Any]]) -> dict[str, int]:
    """Count layers and reports over all cases, and those that are equal."""
    return {
        key: sum(row.get(key, 0) for row in table) for key in ("layers", "cycles_equal", "reports", "reports_identical")
    }


def small_sums(timed: list[dict[str, Any]]) -> dict[str, float]:
    """Add the times of the small layers, with the ratios of the sums and the least ratio of one layer."""
    sums = {f"{key}_seconds": sum(row[f"{key}_seconds"] for row in timed) for key in ("scalesim", *KINDS)}
    ratios = {f"{key}_ratio": sums["scalesim_seconds"] / sums[f"{key}_seconds"] for key in KINDS}
    least = {f"least_{key}": min(row[key] for row in timed) for key in ("closed_ratio", "stepped_ratio")}
    return {"layers": len(timed), **sums, **ratios, **least}


def main() -> None:
    """Run both sides and write what they found."""
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    cases = list(small())
    found = peer(sys.argv[1], cases)
    kept = [
        {**entry, **{k: v for k, v in r.items() if k != "seconds"}}
        for entry, r in zip(cases, found["results"], strict=True)
    ]
    measure.write_json(GOLDEN, {"versions": found["versions"], "cases": kept})
    table = [compared(entry, result) for entry, result in zip(cases, found["results"], strict=True)]
    ran = [(entry, row) for entry, row in zip(cases, table, strict=True) if row["layers"]]
    timed = []
    for entry, row in ran:
        settings, rows = ours(entry)
        if settings.block is None:
            layers = [
                (simulated.layer, settings, theirs) for simulated, theirs in zip(rows, row["seconds"], strict=True)
            ]
            timed += [speeds(*layer, seconds=0.02) for layer in layers]
    kept_big = sys.argv[2:] == ["small"]
    big = json.loads(RECORD.read_text())["big"] if kept_big else {}
    for name, size in () if kept_big else BIG.items():
        entry = case(f"big {name}", (size,), dataflow=name[:2], array=(32, 32), sparse=str(len(size) > 3).lower())
        row = compared(entry, peer(sys.argv[1], [entry])["results"][0])
        settings, rows = ours(entry)
        big[name] = {**row, **speeds(rows[0].layer, settings, row["seconds"][0], seconds=4)}
        print(name, {key: value for key, value in big[name].items() if "ratio" in key or "scalesim" in key}, flush=True)
    record = {
        "versions": found["versions"],
        "machine": measure.machine(),
        **summed(table),
        "small": small_sums(timed),
        "big": big,
        "cases": table,
    }
    measure.write_json(RECORD, record)
    print(summed(table), record["small"])


if __name__ == "__main__":
    main()
