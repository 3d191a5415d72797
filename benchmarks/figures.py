"""docs/figures/*.svg and the tables of docs/benchmarks.md from the records in benchmarks/records.

Git keeps the figure of README.md alone (`readme.py`); the others are drawn where somebody wants to see them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import fusion_tables
import operation_tables
import use_tables
from cases import models_table
from cases.models import DENSE, EAGER, INDUCTOR, OPENVINO, ORT, SPARSE
from cases.records import TRACKED, machine_line, machine_lines
from cases.table import best_ratio
from cases.training import ALL, BOTH, CONTROL, KEPT, SDGP
from twofour import measure
from twofour.measure import Record, geometric_mean

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "figures"
PAGE = FOLDER.parent / "benchmarks.md"
START, END = "<!-- drawn by `make figures` -->", "<!-- end of what is drawn -->"
DTYPES = ("float32", "bfloat16", "int8", "int4")
STATES = ("hot", "cold")
BARS = (EAGER, INDUCTOR, ORT, OPENVINO, DENSE, SPARSE)
COLOURS = ("#b3b3b3", "#8c8c8c", "#c9b37e", "#7ea6c9", "#9bc98a", "#2f7d32")
PART_COLOURS = ("#b3541e", "#2f7d32", "#6fae5c", "#b9dba8", "#c8c8c8", "#9a9a9a", "#7ea6c9")
SETTINGS = {"svg.hashsalt": "twofour", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}


def draw_all() -> list[Path]:
    """Draw the figures, and write them and the tables of the models into the page between its two marks."""
    head, rest = PAGE.read_text().split(START)
    blocks: list[str] = []
    drawn: list[Path] = []
    for machine in machines("fusion", "algebra"):
        tables = {name: _load(f"{name}-float32", machine) for name in ("fusion", "algebra")}
        every = [record for records in tables.values() for record in records]
        blocks += [f"### Fusion and algebra: {_heading(every[0])}"]
        for name, write in (("fusion", fusion_tables.of_fusion), ("algebra", fusion_tables.of_algebra)):
            blocks += [write(tables[name]), *_measured(tables[name])] if tables[name] else []
    for title, written in TITLES.items():
        for machine in recorded(written):
            tables = {name: found for name in written if (found := _load(name, machine))}
            blocks += [f"### {title}: {_heading(next(iter(tables.values()))[0])}"]
            for name, records in tables.items():
                said, write = written[name]
                blocks += [said, write(records), *_measured(records)]
    for machine in machines():
        figures = draw(machine)
        every = [r for dtype in DTYPES for name in ("linear", "models") for r in _load(f"{name}-{dtype}", machine)]
        blocks += [f"### {_heading(every[0])}"]
        blocks += [f"`make figures` draws these records as `docs/figures/*-{machine}.svg`."]
        for state in STATES:
            if found := [record for dtype in DTYPES for record in _linear(dtype, state, machine)]:
                blocks += [_ratio_table(state, machine), *_measured(found)]
        for dtype in DTYPES:
            if records := _load(f"models-{dtype}", machine):
                blocks += [_table(records), *_measured(records)]
        drawn += figures
    PAGE.write_text("\n\n".join([head + START, *blocks, END + rest.split(END)[1]]))
    return [*drawn, PAGE]


def _measured(records: list[Record]) -> list[str]:
    return [f"Measured on: {line}." for line in machine_lines(records)]


def _heading(record: Record) -> str:
    machine = cast("Mapping[str, Any]", record.machine)
    return f"{machine['cpu']}, {machine['software']['native_isa']} kernels"


TITLES = {"Recurrent layers, blocks and low bits": operation_tables.TABLES, "Models in use": use_tables.TABLES}
"""Headings of the page -> what stands under each, by the names of records."""


def recorded(names: Iterable[str]) -> list[str]:
    """The machines that have records of these names, as their files' names end."""
    found: set[str] = set()
    for path in TRACKED.glob("*.json"):
        if cases := [name for name in names if path.stem.startswith(f"{name}-")]:
            found.add(path.stem.removeprefix(f"{max(cases, key=len)}-"))  # "bits-nets-..." is no record of "bits"
    return sorted(found)


def machines(*names: str) -> list[str]:
    """The machines that have records of some cases, as their files' names end; figures never mix two of them."""
    kinds = [f"{name}-{dtype}-" for name in names or ("linear", "models") for dtype in DTYPES]
    found = {path.stem.removeprefix(kind) for kind in kinds for path in TRACKED.glob(f"{kind}*.json")}
    return sorted(found)


def _table(records: Sequence[Record]) -> str:
    """Milliseconds and the figures of whole models as a Markdown table; lower ratios are better."""
    names = (*models_table.PEERS, *models_table.OURS)
    head = ["model", "batch", "threads", *(f"{name}, ms" for name in names), *models_table.FIGURES]
    lines = [head, ["---"] * len(head)]
    for record in records:
        times = (f"{record.median(name) * 1e3:.1f}" if name in record.timings else "-" for name in names)
        ratios = (f"{value:.2f}" if value else "-" for value in models_table.figures(record).values())
        meta = record.meta
        lines.append(
            [f"{meta['model']}, {meta.get('dtype')}", str(meta["batch"]), str(record.threads), *times, *ratios]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _ratio_table(state: str, machine: str) -> str:
    """Best dense over best 2:4 of a Linear by token count: geometric mean over the shapes, least and most."""
    groups = {dtype: records for dtype in DTYPES if (records := _linear(dtype, state, machine))}
    counts = sorted({int(str(record.meta["tokens"])) for records in groups.values() for record in records})
    head = [f"Linear, 1 thread, weights {state}", *(f"{count} tokens" for count in counts)]
    lines = [head, ["---"] * len(head)]
    for dtype, records in groups.items():
        ratios = [[best_ratio(r) for r in records if r.meta["tokens"] == count] for count in counts]
        cells = [f"{geometric_mean(v):.2f} ({min(v):.2f} to {max(v):.2f})" if v else "-" for v in ratios]
        lines.append([dtype, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def predicted() -> Path:
    """Draw the predicted roofline of an A100 SXM, with the products of BERT-base at batch 8 and 128 tokens on it."""
    import torch
    from torch import nn

    import twofour

    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).eval()
    rows = twofour.estimate(encoder, torch.zeros(8, 128, 768), machine="a100-sxm")
    return twofour.hardware.plot("a100-sxm", FOLDER / "hardware-a100-sxm.svg", rows=rows)


def draw(machine: str) -> list[Path]:
    """Draw every figure that has records of one machine; return the files."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(SETTINGS)  # names and text that do not change from one drawing to the next
    FOLDER.mkdir(parents=True, exist_ok=True)
    drawn = []
    for state in STATES:
        found = {dtype: _linear(dtype, state, machine) for dtype in DTYPES}
        if any(found.values()):
            drawn.append(_ratios({dtype: group for dtype, group in found.items() if group}, state, machine))
    for dtype in DTYPES:
        if records := _load(f"models-{dtype}", machine):
            drawn.append(_models(records, dtype, machine))
    training = [record for dtype in DTYPES for record in _load(f"training-{dtype}", machine)]
    if records := [record for record in training if record.meta["threads"] == 1]:
        drawn.append(_training(records, machine))
    return drawn


def _load(name: str, machine: str) -> list[Record]:
    path = TRACKED / f"{name}-{machine}.json"
    return measure.load(path) if path.exists() else []


def _linear(dtype: str, state: str, machine: str) -> list[Record]:
    return [record for record in _load(f"linear-{dtype}", machine) if record.weights == state and record.threads == 1]


def _ratios(groups: dict[str, list[Record]], state: str, machine: str) -> Path:
    """Best dense over best 2:4 against tokens: the geometric mean over the shapes, and their range."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    for colour, (dtype, records) in zip(("#2f7d32", "#1f5fa8", "#b3541e", "#6a3d9a"), groups.items(), strict=False):
        tokens = sorted({int(str(record.meta["tokens"])) for record in records})
        ratios = [[best_ratio(r) for r in records if r.meta["tokens"] == count] for count in tokens]
        means = [geometric_mean(values) for values in ratios]
        axes.plot(tokens, means, marker="o", color=colour, label=f"{dtype} ({len(ratios[0])} shapes)")
        axes.fill_between(tokens, [min(v) for v in ratios], [max(v) for v in ratios], color=colour, alpha=0.12, lw=0)
    axes.axhline(1.0, color="#888888", lw=0.8)
    axes.set_xscale("log", base=2)
    counts = sorted({int(str(record.meta["tokens"])) for records in groups.values() for record in records})
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set(xlabel="tokens", ylabel="best dense time / best 2:4 time")
    axes.set_title(f"Linear, 1 thread, weights {state}: geometric mean, range of shapes shaded", fontsize=9)
    axes.legend(frameon=False)
    return _save(figure, f"linear-{state}-{machine}", groups[next(iter(groups))])


def _models(records: Sequence[Record], dtype: str, machine: str) -> Path:
    """Milliseconds per call of each runtime, one thread: one group of bars per model and batch."""
    from matplotlib import pyplot

    single = [record for record in records if record.threads == 1]
    figure, rows = pyplot.subplots(1, len(single), figsize=(1.6 * len(single) + 1.2, 3.4), layout="constrained")
    for axes, record in zip([rows] if len(single) == 1 else list(rows), single, strict=True):
        for index, (name, colour) in enumerate(zip(BARS, COLOURS, strict=True)):
            if name in record.timings:
                timing = record.timing(name)
                quartiles = [[(timing.median - timing.lower) * 1e3], [(timing.upper - timing.median) * 1e3]]
                axes.bar(index, timing.median * 1e3, color=colour, yerr=quartiles, label=name)
        axes.set_title(f"{record.meta['model']}\nbatch {record.meta['batch']}", fontsize=8)
        axes.set_xticks([])
    (rows if len(single) == 1 else rows[0]).set_ylabel("ms per call")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS]
    figure.legend(handles, BARS, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"{dtype}, 1 thread; bars: medians, lines: quartiles", fontsize=9)
    return _save(figure, f"models-{dtype}-{machine}", single)


def _training(records: Sequence[Record], machine: str) -> Path:
    """Milliseconds of a training step by part, dense products and 2:4 ones: one group of bars per type."""
    from matplotlib import pyplot

    width = max(6.4, 3.4 * len(records) + 0.6)  # the legend wants as much
    figure, rows = pyplot.subplots(1, len(records), figsize=(width, 3.6), layout="constrained")
    for axes, record in zip([rows] if len(records) == 1 else list(rows), records, strict=True):
        profiles = cast(Mapping[str, Mapping[str, float]], record.meta["parts"])
        names = [name for name in (CONTROL, SDGP, BOTH, KEPT, ALL) if name in profiles]
        below = [0.0] * len(names)
        for part, colour in zip(profiles[names[0]], PART_COLOURS, strict=True):
            heights = [profiles[name][part] * 1e3 for name in names]
            axes.bar(names, heights, bottom=below, color=colour, label=part)
            below = [a + b for a, b in zip(below, heights, strict=True)]
        axes.set_title(str(record.meta["dtype"]), fontsize=8)
        axes.tick_params(axis="x", labelsize=7)
    first = rows if len(records) == 1 else rows[0]
    first.set_ylabel("ms per step, median of three profiled")
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(f"training step, 1 thread: {records[0].meta['geometry']}", fontsize=8)
    return _save(figure, f"training-{machine}", records)


def _save(figure: Any, name: str, records: Sequence[Record]) -> Path:
    from matplotlib import pyplot

    path = FOLDER / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None, "Description": machine_line(records[-1])})
    pyplot.close(figure)
    return path
