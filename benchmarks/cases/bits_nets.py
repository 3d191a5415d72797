"""Whole nets of 1 and 2 bits on one thread, images of 28 x 28, against OpenVINO int8 (nncf) and OpenVINO float32.

A VGG-like net of six 3x3 convolutions and ResNet-18 without its first pool; random weights, as time does not ask for
trained ones, or those that `experiments/gpu_low_bits.py` trained on Fashion-MNIST. First and last layer have 8 bits.
Processor time of the process counts, as OpenVINO computes on a thread of its own. The compiled answer is held to that
of 64-bit whole numbers before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import twofour
from cases.bits import widths_of
from cases.columns import headed
from cases.records import machine_line
from models import Subject
from twofour import measure, quantization
from twofour.demo.convnets import NETS
from twofour.engines import openvino
from twofour.errors import DataError, MeasureError
from twofour.measure import Record
from twofour.measure.distance import distance

WIDTHS = ("w1a1", "w1a2", "w2a2")
INT8, FLOAT, OURS = "OpenVINO int8", "OpenVINO", "twofour"
SIDE = 28
"""Height and width of an image."""


def cells(
    nets: Sequence[str], widths: Sequence[str], batches: Sequence[int], states: Path | None = None
) -> list[dict[str, object]]:
    """List the cells; with `states`, a folder of trained nets, those whose state is there.

    Raises:
        DataError: A net or a pair of widths is not known, or the folder has no state of one.
    """
    if unknown := [name for name in nets if name not in NETS]:
        raise DataError(f"the net {unknown[0]!r} is not known", got=unknown[0], wanted=", ".join(NETS))
    for text in widths:
        widths_of(text)
    facts = {"case": "bits-nets", "threads": 1}
    return [
        {**facts, "model": name, "dtype": text, "batch": batch, **_trained(states, name, text)}
        for name in nets
        for batch in batches
        for text in widths
    ]


def _trained(states: Path | None, name: str, widths: str) -> dict[str, object]:
    """Return where the state of a trained net is, the first seed's; nothing without a folder."""
    if states is None:
        return {}
    if not (found := sorted(states.glob(f"fashion-{name}-{widths}-*.safetensors"))):
        raise DataError(
            f"there is no trained {name} of {widths}",
            got=str(states),
            wanted=f"fashion-{name}-{widths}-0.safetensors or another seed",
            remedy="python experiments/gpu_low_bits.py FOLDER, or leave --states out",
        )
    return {"weights": str(found[0])}


class Bench:
    """Measures cells, keeping OpenVINO's models of the net and batch it is at."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.at: tuple[object, ...] = ()
        self.peers: dict[str, Callable[[], Any]] = {}

    def __call__(self, cell: dict[str, object]) -> Record:
        """Measure one cell."""
        name, batch, text = str(cell["model"]), int(str(cell["batch"])), str(cell["dtype"])
        x = torch.randn(batch, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
        if self.at != (name, batch):
            subject = Subject(name, "random weights", _net(name), (x,), batch, batch)
            self.peers = {INT8: openvino(subject, "int8", 1), FLOAT: openvino(subject, "float32", 1)}
            self.at = name, batch
        with torch.inference_mode():
            return measure.compare(
                {OURS: partial(_compiled(name, text, x, cell.get("weights")), x), **self.peers},
                baseline=(INT8, FLOAT),
                seconds=self.seconds,
                threads=1,
                clock="process",
                noise=True,
                meta=cell,
            )


def _net(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETS[name](1).eval()


def _compiled(name: str, widths: str, x: Tensor, state: object) -> nn.Module:
    """Return a net of low bits, compiled, after comparing its answer with that of whole numbers."""
    found, model = widths_of(widths), _net(name)
    assert found.inputs is not None
    if state is None:
        twofour.quantize(model, found.weights.name, found.inputs.name, data=[torch.randn(16, 1, SIDE, SIDE)])
    else:
        model = twofour.load(str(state), model, masked=True).eval()
    fast = twofour.compile(model, x)
    with quantization.in_whole_numbers(model):
        want = model(x)
    with torch.inference_mode():
        if (error := distance([fast(x)], [want])) > 1e-6:
            raise MeasureError(f"{name} is wrong and is not timed", got=f"an error of {error:.1e}, {widths}")
    return fast


def show(records: Sequence[Record], console: Console) -> None:
    """Print a line per net, batch and pair of widths: milliseconds, and the ratio to each peer."""
    table = headed(("net", "widths", "batch", f"{OURS} ms", f"{INT8} ms", "ratio", f"{FLOAT} ms", "ratio"), words=2)
    for record in records:
        ours = record.median(OURS)
        against = [cell for name in (INT8, FLOAT) for cell in (1e3 * record.median(name), record.median(name) / ours)]
        table.add_row(
            *(str(record.meta[key]) for key in ("model", "dtype", "batch")),
            f"{1e3 * ours:.3f}",
            *(f"{number:.3f}" if index % 2 == 0 else f"{number:.2f}x" for index, number in enumerate(against)),
        )
    console.print(table)
    console.print(machine_line(records[-1]), highlight=False, markup=False, soft_wrap=True)
