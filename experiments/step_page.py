"""The tables of training steps in docs/hardware.md: projections by the package, beside the steps that were measured.

`python experiments/step_page.py` writes them between the page's two marks. Nothing runs but shapes on the meta device.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from step_nets import NETS, StepNet
from twofour.hardware import MACHINES, VARIANTS, TrainingEstimate
from twofour.hardware.step_shapes import trace_step
from twofour.hardware.training_estimate import PRODUCTS
from twofour.hardware.training_step import estimate_step

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "hardware.md"
MEASURED = Path(__file__).resolve().parent / "records" / "hardware" / "step-h100-sxm.json"
"""What `gpu_step.py` wrote on that machine."""

START, END = "<!-- drawn by experiments/step_page.py -->", "<!-- end of what is drawn -->"
SHOWN = ("a100-sxm", "h100-sxm", "rtx-5080")
"""Machines whose steps are shown by part: of the paper's time, of the measurement, where sparse operands pay most."""

PROMISE = (0.15, 0.25)
"""What the paper projects: the least and the most of the training time."""

IDLE = {
    "view",
    "t",
    "detach",
    "empty",
    "transpose",
    "expand",
    "select",
    "slice",
    "squeeze",
    "as_strided",
    "as_strided_",
}
IDLE |= {"profiler._record_function_enter_new", "profiler._record_function_exit"}
"""Operators that launch no kernel: what two events measure around nothing."""

PUBLISHED = ("resnet50", 256, "a100-sxm", 2470)
"""Net, batch, machine, images a second of one GPU: NVIDIA/DeepLearningExamples at 291f0d02, the readme of
PyTorch/Classification/ConvNets/resnet50v1.5, DGX A100 (80 GB), mixed precision, container pytorch-21.03."""


def estimates(nets: Mapping[str, StepNet] = NETS) -> dict[str, dict[str, TrainingEstimate]]:
    """Project each net's step on every machine, in bfloat16."""
    return {name: dict(_projected(net, net.batch)) for name, net in nets.items()}


def _projected(net: StepNet, batch: int, machines: tuple[str, ...] = tuple(MACHINES)) -> Iterator[tuple[str, Any]]:
    with torch.device("meta"):
        model, example = net.model(), net.example(batch=batch)
    model = model.to_empty(device="cpu")  # no value is read
    traced, optimizer = trace_step(model, example), "adamw" if net.adam else "sgd"
    for name in machines:
        yield name, estimate_step(model, example, MACHINES[name], "bfloat16", optimizer, traced=traced)


def verdict(found: Mapping[str, Mapping[str, TrainingEstimate]]) -> str:
    """Say in one sentence whether the paper's saving comes out."""
    every = [(net, machine, step) for net, steps in found.items() for machine, step in steps.items()]
    net, machine, best = max(every, key=lambda row: row[2].variant("sdgp").saved)
    free = max(every, key=lambda row: row[2].paper_saved)
    met = [f"{NETS[n].title} on {m}" for n, m, step in every if step.variant("sdgp").saved >= PROMISE[0]]
    where = f"On {', '.join(met)}" if met else f"On none of these {len(MACHINES)} machines for any of these nets"
    return (
        f"**Does the paper's saving of 15 to 25 % come out? {where}: choosing and packing included, SDGP saves "
        f"{best.variant('sdgp').saved:.1%} of a step at most ({NETS[net].title}, {machine}), and by the paper's own "
        f"arithmetic, half of each input gradient at no cost, {free[2].paper_saved:.1%} at most "
        f"({NETS[free[0]].title}, {free[1]}).**"
    )


def text(found: Mapping[str, Mapping[str, TrainingEstimate]] | None = None) -> str:
    """Return what stands between the marks."""
    found = found or estimates()
    return "\n".join([verdict(found), "", *_promise(found), "", *_parts(found), "", *_measured(found)])


def _promise(found: Mapping[str, Mapping[str, TrainingEstimate]]) -> Iterator[str]:
    yield "SDGP saves of the dense step: sparse where that is said to win, everywhere, and by the paper's arithmetic."
    yield ""
    yield f"| machine | {' | '.join(f'{NETS[name].title}, {NETS[name].batch}' for name in found)} |"
    yield f"| --- {'| --- ' * len(found)}|"
    for machine in MACHINES:
        steps = [steps[machine] for steps in found.values()]
        cells = [(step.variant("sdgp"), step.paper_saved) for step in steps]
        said = (f"{sdgp.saved:.1%}, {sdgp.every_saved:.1%}, {free:.1%}" for sdgp, free in cells)
        yield f"| {machine} | {' | '.join(said)} |"


def _parts(found: Mapping[str, Mapping[str, TrainingEstimate]]) -> Iterator[str]:
    names = list(next(iter(next(iter(found.values())).values())).parts)
    yield "The dense step by part, and what each way saves of it where it is said to win:"
    yield ""
    saves = " | ".join(f"{name} saves" for name in VARIANTS)
    yield f"| machine | net, batch | dense step | {' | '.join(names)} | {saves} |"
    yield f"| --- {'| --- ' * (2 + len(names) + len(VARIANTS))}|"
    for machine in SHOWN:
        for name, steps in found.items():
            step = steps[machine]
            shares = " | ".join(f"{share:.0%}" if share else "-" for share in step.shares.values())
            saved = " | ".join(f"{variant.saved:.1%}" for variant in step.variants)
            net = f"{NETS[name].title}, {NETS[name].batch}"
            yield f"| {machine} | {net} | {step.dense_ms:.1f} ms | {shares} | {saved} |"


def measured() -> dict[str, dict[str, float]]:
    """Read the milliseconds of each part of the measured steps, named as the package names them."""
    found: dict[str, dict[str, float]] = {}
    for net in json.loads(MEASURED.read_text())["nets"]:
        parts = found.setdefault(net["net"], {})
        for row in net["rows"]:
            if row["operator"] not in IDLE:
                part = row["part"].partition(",")[0]
                parts[part] = parts.get(part, 0) + row["ms"]
    return found


def _measured(found: Mapping[str, Mapping[str, TrainingEstimate]]) -> Iterator[str]:
    record = json.loads(MEASURED.read_text())
    yield (
        f"Measured on one {record['gpu']['name']} (driver {record['gpu']['driver_version']}, torch {record['torch']}, "
        "bfloat16 autocast, channels last, fused optimisers; `experiments/gpu_step.py`, the median of three steps, "
        "each operator where it stands), then what is told for `h100-sxm`, and told over measured:"
    )
    yield ""
    names = list(found[next(iter(found))]["h100-sxm"].parts)
    yield f"| net, batch | whole | {' | '.join(names)} | half of the input gradient |"
    yield f"| --- {'| --- ' * (2 + len(names))}|"
    for name, parts in measured().items():
        step = found[name]["h100-sxm"]
        pairs = [(parts.get(part, 0.0), step.parts[part]) for part in names]
        whole = sum(parts.values())
        cells = [_beside(whole, step.dense_ms), *(_beside(*pair) for pair in pairs)]
        half = parts["input gradient"] / 2 / whole
        yield f"| {NETS[name].title}, {NETS[name].batch} | {' | '.join(cells)} | {half:.1%} |"
    yield ""
    stems = [said for net in record["nets"] if (said := _without_stem(net, found[net["net"]]["h100-sxm"]))]
    yield f"Products without the first convolution, whose three channels fill no unit: {'; '.join(stems)}."
    yield ""
    net, batch, machine, rate = PUBLISHED
    (_, step), *_ = _projected(NETS[net], batch, (machine,))
    took = batch / rate * 1e3
    yield (
        f"Published: {NETS[net].title} trains {rate} images a second on one A100 of 80 GB in mixed precision, {batch} "
        f"at a time (NVIDIA/DeepLearningExamples, resnet50v1.5, DGX A100, container 21.03): {took:.1f} ms a step. Told "
        f"for `{machine}`: {step.dense_ms:.1f} ms, {step.dense_ms / took:.2f} of it."
    )


def _without_stem(net: Mapping[str, Any], step: TrainingEstimate) -> str:
    """Say what all products but those of a layer of three channels take, measured and told; "" without such a layer."""
    rows = [row for row in net["rows"] if row["part"] in PRODUCTS]
    stem = sum(row["ms"] for row in rows if any(shape.split("x")[1:2] == ["3"] for shape in row["shapes"].split()))
    told = sum(row.dense_ms for row in step.rows if row.layer == step.rows[0].layer)
    ms = sum(row["ms"] for row in rows) - stem
    return f"{NETS[net['net']].title} {_beside(ms, sum(row.dense_ms for row in step.rows) - told)}" if stem else ""


def _beside(ms: float, told: float) -> str:
    return f"{ms:.2f} ms, {told:.2f}: {told / ms:.2f}" if ms else "-"


def write() -> Path:
    """Write the tables into the page."""
    head, rest = PAGE.read_text().split(START)
    PAGE.write_text(f"{head}{START}\n{text()}\n{END}{rest.split(END)[1]}")
    return PAGE


if __name__ == "__main__":
    print(write())
