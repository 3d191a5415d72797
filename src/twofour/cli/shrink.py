"""`twofour shrink`: a dense model in, a folder with a smaller one out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from twofour import calls, shrinking
from twofour.cli import data as calibration
from twofour.cli import source as sources
from twofour.cli.console import JsonFile, print_table, progress, remedies_of_options, say, warn, write
from twofour.cli.options import DenseModel, Folder, SampleShape
from twofour.cli.prune import Data, Samples
from twofour.drawing import require_drawn
from twofour.errors import ShrinkError, cut, one_of
from twofour.export import save
from twofour.shrinking import Budget, Report
from twofour.shrinking.budget import KINDS, UnmetError
from twofour.shrinking.report import merged
from twofour.shrinking.shrink import LEAST, SAMPLES
from twofour.streaming import result_folder
from twofour.streaming.companions import companions, copy_companions
from twofour.structure.coupling.group import some
from twofour.structure.shrink import cuts_of

WEIGHTS = "model.safetensors"

REMEDIES = {
    "quiet machine": "measure on a quiet machine, or ask for more; --drop auto lets whole layers go too, --streams "
    "every residual stream",
    "streams=True": "--drop auto lets whole layers go too, --streams every residual stream; or ask for more",
    "budget=": "--budget 0.5, and --count for what it counts",
    "data=loader": "--data inputs of yours, or --drop encoder.layer.3",
    "on it yourself": "--length takes fewer tokens, --input another shape, --data inputs of yours",
}
"""What stands in the remedy of an error, and what to say of options instead."""

Fraction = Annotated[str, typer.Option("--budget", metavar="FRACTION", help="What may stay, above 0 and below 1.")]
Count = Annotated[str, typer.Option(help=f"What the budget counts: one of {', '.join(KINDS)}.")]
Length = Annotated[int, typer.Option(help="Tokens of a sample, where the model takes token ids.", min=1)]
Streams = Annotated[
    bool,
    typer.Option(
        "--streams", help="Cut residual streams and widths of embeddings too, whether the budget asks for it or not."
    ),
]
Uniform = Annotated[
    bool | None,
    typer.Option(
        "--uniform/--free",
        help="All layers get the same widths, which a config.json can say.",
        show_default="uniform for a folder",
    ),
]
Drop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LAYER", help="Drop this layer, such as encoder.layer.3; auto: what the data and the budget say."
    ),
]
Multiple = Annotated[
    int | None, typer.Option(min=1, help="Widths are multiples of it; narrower groups stay.", show_default="16, 8 or 1")
]
Least = Annotated[float, typer.Option(metavar="SHARE", help="Least share of each group that stays.")]
Checkpoint = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Keep what was found there: the same command goes on after a stop.")
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the widths (.svg, .png, .pdf); matplotlib.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the result of an earlier run.")]


def shrink(
    source: DenseModel,
    out: Folder,
    budget: Fraction = "0.5",
    count: Count = "parameters",
    data: Data = None,
    samples: Samples = None,
    length: Length = 128,
    given: SampleShape = None,
    streams: Streams = False,
    uniform: Uniform = None,
    drop: Drop = None,
    multiple: Multiple = None,
    least: Least = LEAST,
    checkpoint: Checkpoint = None,
    plot: Plot = None,
    force: Force = False,
    json: JsonFile = None,
) -> None:
    """Cut channels, heads and hidden units once, within a budget; write weights, cut.json and report.json to DIR.

    Each cut is in a file of its own: cut-1.json, cut-2.json, in their order, where --drop makes one more.

    With --data the weights that read what went are solved anew; without, train the model afterwards.
    """
    limit = _limit(count, budget)
    require_drawn(plot, ShrinkError, "the file of --json")
    result_folder.require_free(out, force)
    found = sources.resolve(source)
    result_folder.require_apart(out, found.path)
    folder = found.path if found.kind == "folder" else None
    beside = {} if folder is None else companions(folder)  # refuses what cannot be copied before any long work
    with progress(f"reading {source}"):
        model = found.model()
    options: dict[str, Any] = {"streams": streams or "auto", "layers": _layers(drop), "checkpoint": checkpoint}
    options |= {"multiple": multiple, "least": least, "uniform": folder is not None if uniform is None else uniform}
    small, report = _shrunk(model, found, limit, (given, length, data), samples or SAMPLES, options)
    with result_folder.folder(out, force) as target:
        copy_companions(beside, target)
        _write(small, target, folder is not None)
        content = result_folder.write_report(target, {"source": source, "out": str(out), **report.to_dict()})
    show(report)
    _draw(report, plot)
    _say_who_loads(report, folder is not None)
    say(f"wrote {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    write(json, content)


def _draw(report: Report, plot: Path | None) -> None:
    if plot is not None:
        shrinking.plot(report, plot)


def _layers(drop: list[str] | None) -> str | tuple[str, ...]:
    return "auto" if drop == ["auto"] else tuple(drop or ())


def _limit(count: str, budget: str) -> Budget:
    one_of("the budget counts nothing of that name", count, KINDS, ShrinkError)
    try:
        share = float(budget)
    except ValueError:
        wanted, remedy = "a fraction above 0 and below 1", "--budget 0.5 for half"
        got = f"--budget {cut(budget, 40)}"
        raise ShrinkError("the budget is impossible", got=got, wanted=wanted, remedy=remedy) from None
    with remedies_of_options(REMEDIES):
        return Budget(**{count: share})


def _shrunk(
    model: nn.Module,
    found: sources.Source,
    limit: Budget,
    inputs: tuple[str | None, int, str | None],
    samples: int,
    options: dict[str, Any],
) -> tuple[nn.Module, Report]:
    """Shrink a model on the example, and by the data, that the options give: --input, --length, --data."""
    given, length, data = inputs
    what = "channels are found by running the model"
    with calls.without_cache(model), remedies_of_options(REMEDIES), _reasons_of_options():
        example, _ = calibration.traced(model, found, given, length, None if given else data, what=what)
        if data is not None:
            batches = calibration.read(data, found, samples, length)
            options |= {"data": calibration.fitted(batches, model, samples, tell=say), "samples": samples}
        small = shrinking.shrink(model, example, limit, **options)
    report = shrinking.report_of(small)
    assert report is not None
    return small, report


@contextmanager
def _reasons_of_options() -> Iterator[None]:
    """Let a budget that cannot be met name options: what stands in its way is told by the names of arguments."""
    try:
        yield
    except UnmetError as error:
        error.reasons = tuple(re.sub(r"^(multiple|least)=", r"--\1 ", reason) for reason in error.reasons)
        raise


def _say_who_loads(report: Report, hugging_face: bool) -> None:
    if hugging_face and report.config:
        say(f"from_pretrained cannot load it: {report.config}; twofour.load can")
    elif hugging_face:
        say("from_pretrained loads it: config.json says its sizes")


def _write(small: nn.Module, target: Path, hugging_face: bool) -> None:
    save(small, target / WEIGHTS)
    plans = cuts_of(small)
    for number, plan in enumerate(plans, 1):
        name = "cut.json" if len(plans) == 1 else f"cut-{number}.json"
        (target / name).write_text(plan.to_text() + "\n", encoding="utf-8")
    config: Any = getattr(small, "config", None)
    if hugging_face and config is not None:
        config.save_pretrained(target)


def show(report: Report) -> None:
    """Print widths before and after, then the sizes."""
    for name in report.layers:
        say(f"{name} went")
    rows = [(w.name, str(w.before), str(w.after), f"{w.loss:.1%}", w.source) for w in report.widths]
    print_table("channels", ("group", "before", "after", "lost", "by"), rows, right=range(1, 4))
    if report.uncut:
        found = [(some(uncut.names), uncut.size, uncut.reason) for uncut in merged(report.uncut)]
        rows = [(names, str(size), reason.replace("uniform=True", "--uniform")) for names, size, reason in found]
        print_table("", ("stays whole", "channels", "reason"), rows, right=range(1, 2))
    sizes = {"parameters": report.parameters, "MACs": report.macs, "bytes": report.bytes}
    sizes |= {f"milliseconds, {report.timing}:": report.milliseconds} if report.milliseconds else {}
    for name, (before, after) in sizes.items():
        digits = ",.3f" if isinstance(after, float) else ","
        say(f"{name} {before:{digits}} -> {after:{digits}} ({after / before if before else 1:.1%})")
    for note in report.notes:
        warn(note)
