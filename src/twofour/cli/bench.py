"""`twofour bench`: a model, dense or sparse, compiled here and timed beside the runtimes that are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from twofour import optimizing
from twofour.calibration import take
from twofour.cli import data as inputs
from twofour.cli import source as sources
from twofour.cli.console import JsonFile, print_table, progress, remedies_of_options, say, write
from twofour.cli.optimize import REMEDIES, Batch, Length, Seconds, Threads, Without, use_threads
from twofour.cli.options import Embeddings, SampleShape, Smooth
from twofour.criteria import SAMPLES
from twofour.measure import Record
from twofour.optimizing.samples import example_of
from twofour.optimizing.timing import SECONDS
from twofour.report.facts import milliseconds

ROUNDED = (
    "the model is of low bits: every runtime but twofour computes its roundings in floats, which is slower than the "
    "float model, and that one is not here; `twofour bench` of the float model times it"
)
"""What is said of the times of a model of low bits."""


def bench(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The model, dense or sparse.")],
    data: Annotated[
        str | None, typer.Option(metavar="DATA", help="Inputs as for `twofour optimize`; the median one is timed.")
    ] = None,
    given: SampleShape = None,
    length: Length = 128,
    batch: Batch = 1,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Computing type; may be given several times.", show_default="float32")
    ] = None,
    embeddings: Embeddings = None,
    smooth: Smooth = False,
    without: Without = None,
    seconds: Seconds = SECONDS,
    threads: Threads = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the record, for `twofour report`.")] = None,
    json: JsonFile = None,
) -> None:
    """Compile a model and time it beside torch, torch.compile, ONNX Runtime and OpenVINO, with the same weights."""
    use_threads(threads)
    found = sources.resolve(source)
    with progress(f"reading {source}") as advance:
        model = found.model()
        batches: Any = None
        if data is None:
            what = "A model is timed by running it"
            example, _ = inputs.traced(model, found, given, length, None, what=what, batch=batch)
        else:
            read = inputs.read(data, found, SAMPLES, length, max(batch, inputs.BATCH))
            batches = inputs.fitted(read, model, SAMPLES)
            example = example_of(take(model, batches, SAMPLES), batch)
        options: dict[str, Any] = {"without": without or (), "seconds": seconds, "name": source, "data": batches}
        options |= {"embeddings": embeddings, "smooth": smooth, "tell": lambda what: advance(0, 0, what)}
        with remedies_of_options(REMEDIES):
            record = optimizing.bench(model, example, dtype or "float32", **options)
    show(record)
    if out is not None:
        record.save(out)
        say(f"wrote {out}; `twofour report {out}` makes a page of it")
    write(json, record.to_dict())


def show(record: Record) -> None:
    """Print times, the fastest first, and why a runtime is missing."""
    best = record.fastest(record.baseline)
    rows = [
        (name, milliseconds(record.median(name)), f"{record.median(best) / record.median(name):.2f}x")
        for name in sorted(record.timings, key=record.median)
    ]
    print_table("", ("model", "ms", f"times as fast as {best}"), rows, right=range(1, 3))
    for key in ("missing", "refused"):
        reasons = record.meta.get(key)
        for name, why in (reasons if isinstance(reasons, dict) else {}).items():
            say(f"not timed: {name}: {why}")
    if record.meta.get("rounded"):
        say(ROUNDED)
    threads = "1 thread" if record.threads == 1 else f"{record.threads} threads"
    say(f"{threads}, {record.clock} time, on {record.machine.get('cpu')}")
