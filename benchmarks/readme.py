"""The figure and the table of README.md, from the records in benchmarks/records and experiments/records."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from cases.models import DENSE, EAGER, INDUCTOR, OPENVINO, OPENVINO_SPARSE, ORT, SPARSE
from cases.records import TRACKED
from twofour import measure
from twofour.drawing import drawn
from twofour.errors import DataError
from twofour.measure import Record

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "README.md"
FIGURE = ROOT / "docs" / "figures" / "models.svg"
ACCURACY = ROOT / "experiments" / "records"
START, END = "<!-- written by `make figures` -->", "<!-- end of what is written -->"
MACHINE = "amd-epyc-26-2-1"
"""The machine of the table; the figure shows every machine that has the models."""

MODELS = {
    "minilm": "MiniLM-L6",
    "bert-base": "BERT-base",
    "gpt2-untied-decode": "GPT-2, one token",
    "resnet50": "ResNet-50",
}
TABLE = {"minilm": ("stsb", "STS-B", "again: 2:4 admm"), "bert-base": None, "resnet50": None}
"""Models of the table -> the task, its name and the arm that measured their accuracy, None where none did."""

CONTROL = "again: dense, trained again (the control)"
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # two-sided 95 % quantiles, by the number of seeds
BARS = {
    "dense: fastest of torch, torch.compile, ONNX Runtime, twofour": (EAGER, INDUCTOR, ORT, DENSE),
    "OpenVINO": (OPENVINO, OPENVINO_SPARSE),
    "twofour 2:4": (SPARSE,),
}
OTHERS = (EAGER, INDUCTOR, ORT, OPENVINO, OPENVINO_SPARSE, DENSE)
COLOURS = ("#b3b3b3", "#7ea6c9", "#2f7d32")
WEIGHTS = re.compile(r"weights ([\d.]+) MB dense.* ([\d.]+) MB in a file")


def draw() -> Path:
    """Draw the bars of every machine that has records of all the models."""
    machines = [path.stem.removeprefix("models-float32-") for path in sorted(TRACKED.glob("models-float32-*.json"))]
    panels = [found for machine in machines if len(found := _records(machine)) == len(MODELS)]
    with drawn(FIGURE, (5.2 * len(panels), 3), DataError, str(TRACKED)) as figure:
        rows = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, records in zip(rows, panels, strict=True):
            for index, (names, colour) in enumerate(zip(BARS.values(), COLOURS, strict=True)):
                for place, record in enumerate(records.values()):
                    seconds = _fastest(record, names)
                    height, x = seconds / _fastest(record, OTHERS), place + 0.27 * (index - 1)
                    axes.bar(x, height, 0.26, color=colour)
                    axes.text(x, height, f"{seconds * 1e3:.1f}", ha="center", va="bottom", fontsize=7)
            axes.set_xticks(range(len(records)), [MODELS[model] for model in records], fontsize=8)
            axes.set(ylim=(0, 1.3), yticks=(0, 0.5, 1))
            axes.set_title(_processor(next(iter(records.values()))), fontsize=8)
        rows[0].set_ylabel("relative time; labels: ms")
        handles = [rows[0].patches[index * len(MODELS)] for index in range(len(BARS))]
        figure.legend(handles, BARS, loc="outside lower center", ncols=len(BARS), frameon=False, fontsize=8)
    return FIGURE


def table() -> str:
    """The table as Markdown, and the machine and commits under it."""
    records = _records(MACHINE)
    lines = [
        "| float32 | accuracy lost | ms, fastest of the others → 2:4 | MB, dense → 2:4 |",
        "| --- | --- | --- | --- |",
    ]
    for model, accuracy in TABLE.items():
        record = records[model]
        times = f"{_fastest(record, OTHERS) * 1e3:.1f} → {record.median(SPARSE) * 1e3:.1f}"
        lost = _lost(*accuracy) if accuracy else f"not measured ({str(record.meta['note']).partition(',')[0]})"
        lines.append(f"| {MODELS[model]} | {lost} | {times} | {_megabytes(record)} |")
    return "\n".join([*lines, "", f"{_under([records[model] for model in TABLE])}"])


def write() -> Path:
    """Write the table into README between its two marks; nothing but the records decides what is written."""
    head, rest = PAGE.read_text().split(START)
    PAGE.write_text(f"{head}{START}\n{table()}\n{END}{rest.split(END)[1]}")
    return PAGE


def _records(machine: str) -> dict[str, Record]:
    """The float32 records of the models, batch 1 and one thread."""
    found = {
        str(record.meta["model"]): record
        for record in measure.load(TRACKED / f"models-float32-{machine}.json")
        if record.threads == 1 and record.meta["batch"] == 1
    }
    return {model: found[model] for model in MODELS if model in found}


def _fastest(record: Record, names: Sequence[str]) -> float:
    return min(record.median(name) for name in names if name in record.timings)


def _processor(record: Record) -> str:
    """The processor and the instruction set of the kernels, as a heading."""
    machine = record.machine
    software = dict(machine["software"])  # pyright: ignore[reportArgumentType,reportCallIssue]
    cpu = str(machine["cpu"]).replace("(R)", "")
    return f"{cpu} ({str(machine['cpu_identity']).rpartition(', ')[0]}), {software['native_isa']}"


def _under(records: Sequence[Record]) -> str:
    """Machine, versions and commits of the table."""
    commits = [dict(record.machine["commit"]) for record in records]  # pyright: ignore[reportArgumentType,reportCallIssue]
    names = dict.fromkeys(f"{commit['id'][:10]}{' + changes' if commit['dirty'] else ''}" for commit in commits)
    torch = dict(records[0].machine["software"])["torch"]  # pyright: ignore[reportArgumentType,reportCallIssue]
    return f"{_processor(records[0])}, one thread, batch 1; torch {torch}; twofour at {', '.join(names)}."


def _megabytes(record: Record) -> str:
    """What the plan says of the weights that were compiled."""
    found = WEIGHTS.search(record.meta["plans"][SPARSE])  # pyright: ignore[reportArgumentType,reportCallIssue,reportIndexIssue]
    return " → ".join(f"{float(part):.1f}" for part in found.groups()) if found else "not measured"


def _lost(task: str, title: str, arm: str) -> str:
    """Mean difference to the dense control of the same seed, with Student's 95 % interval."""
    record = json.loads((ACCURACY / f"{task}.json").read_text())
    values = {key: {row["seed"]: row["value"] for row in record["rows"] if row["key"] == key} for key in (arm, CONTROL)}
    losses = [values[CONTROL][seed] - value for seed, value in values[arm].items()]
    half = STUDENT[len(losses)] * statistics.stdev(losses) / math.sqrt(len(losses))
    of = statistics.mean(values[CONTROL].values())
    where = f"{record['metric']['name']} x 100, {title}, {len(losses)} seeds"
    return f"{statistics.mean(losses):.2f} ± {half:.2f} of {of:.2f} ({where})"
