"""`twofour optimize`: a dense model and data in, the fastest model whose quality holds out, with a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from twofour import measure, optimizing
from twofour.cli import data as inputs
from twofour.cli import huggingface
from twofour.cli import source as sources
from twofour.cli.console import JsonFile, print_table, progress, remedies_of_options, say, write
from twofour.cli.options import DenseModel, Embeddings, Skip, Smooth
from twofour.cli.prune import CriterionText, PatternText, Samples
from twofour.criteria import AUTO
from twofour.errors import SourceError
from twofour.optimizing import Outcome
from twofour.optimizing.folder import PAGE
from twofour.optimizing.samples import MOST_HELD
from twofour.optimizing.timing import NAMES, SECONDS
from twofour.shrinking import Budget
from twofour.streaming import result_folder
from twofour.streaming.companions import companions

EVALUATES = "package.module:function, called as function(model), that returns a number, the higher the better"
REMEDIES = {
    "batch=1": "--batch 1, or larger batches of the function",
    "evaluate": "--evaluate module:function",
    "dtype='int8'": "--dtype int8 with --data (bench), --within POINTS (optimize), or no --smooth",
    "`embeddings`": "leave --embeddings out",
}


def _needed(data: str | None) -> str:
    if data is None:
        raise SourceError(
            "a model is optimized on data: some calibrate, the others judge what it lost",
            got="no --data",
            wanted=f"a few hundred inputs as the model sees them: {inputs.FORMS}",
            remedy=f"--data FILE; {inputs.MADE}. `twofour bench SOURCE` times a model as it is and needs none",
        )
    return data


Data = Annotated[
    str,
    typer.Option(
        callback=_needed,
        metavar="DATA",
        help="A few hundred inputs, always needed: .txt (a text a line), .jsonl, .npz, .npy, .safetensors or "
        "module:function.",
    ),
]
Evaluate = Annotated[
    str | None,
    typer.Option(metavar="MODULE:FUNCTION", help="Judge by function(model) -> number, the higher the better."),
]
PairsFile = Annotated[
    str | None,
    typer.Option(
        "--pairs", metavar="FILE", help=f"Judge an embedder by rank correlation on labelled pairs: {inputs.PAIRS}."
    ),
]
Within = Annotated[
    float | None,
    typer.Option(min=0, metavar="POINTS", help="Points of quality that may be lost: bfloat16 and int8 are tried too."),
]
Out = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Folder to write; new, or left by the same command: it goes on.")
]
Shrink = Annotated[
    float | None, typer.Option(metavar="FRACTION", help="Shrink it first to this fraction of its measured time.")
]
Width = Annotated[list[str] | None, typer.Option(help="Low bits to try too, such as w4a8; may be given several times.")]
Batch = Annotated[int, typer.Option(min=1, help="Samples of one call that is timed.")]
Length = Annotated[int, typer.Option(min=1, help="Tokens at most of a text of the data.")]
Without = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help=f"Leave a runtime out: {', '.join(NAMES[1:])}. May be given several times."),
]
Seconds = Annotated[float, typer.Option(min=0.01, help="Time box of the comparison.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads; torch's default when left out.")]


def optimize(
    source: DenseModel,
    out: Out,
    data: Data = None,  # pyright: ignore[reportArgumentType]  # _needed refuses it
    evaluate: Evaluate = None,
    pairs: PairsFile = None,
    within: Within = None,
    pattern: PatternText = "2:4",
    criterion: CriterionText = AUTO,
    skip: Skip = None,
    samples: Samples = None,
    length: Length = 128,
    batch: Batch = 1,
    shrink: Shrink = None,
    width: Width = None,
    embeddings: Embeddings = None,
    smooth: Smooth = False,
    without: Without = None,
    seconds: Seconds = SECONDS,
    threads: Threads = None,
    json: JsonFile = None,
) -> None:
    """Make a model faster here: prune, compile, judge on data held back, time beside other runtimes, keep the best.

    A run that was stopped goes on with the same command. DIR gets the model, plan.json, results.json and report.html.
    """
    use_threads(threads)
    found = sources.resolve(source)
    result_folder.require_apart(out, found.path)
    judge = _judge(evaluate, pairs)
    folder, pooling, beside = _of_folder(found)  # refuses what cannot be copied before any long work
    with progress(f"reading {source}"):
        model = found.model() if folder is None else huggingface.as_served(found.model(), folder)
        count = (samples or inputs.MOST_TEXTS) + MOST_HELD
        judge = judge if pairs is None else inputs.pairs(pairs, found, length, pooling)
        given = inputs.fitted(inputs.read(data, found, count, length, max(batch, inputs.BATCH)), model, count)
    options: dict[str, Any] = {"evaluate": judge, "within": within, "pattern": pattern, "criterion": criterion}
    options |= {"skip": skip or (), "samples": samples, "batch": batch, "widths": width or (), "seconds": seconds}
    options |= {"budget": None if shrink is None else Budget(time=shrink), "without": without or (), "name": source}
    options |= {"pooling": pooling, "beside": beside, "embeddings": embeddings, "smooth": smooth}
    with remedies_of_options(REMEDIES):
        outcome = optimizing.optimize(model, given, out, loading=_loading(found, model, out, shrink), **options)
    show(outcome)
    write(json, outcome.to_dict())


def _of_folder(found: sources.Source) -> tuple[Path | None, str, dict[str, Path]]:
    """Return the folder of a source, how it makes an embedding, and what is copied with it; no folder of others."""
    if found.kind != "folder" or found.path is None:
        return None, "mean", {}
    return found.path, huggingface.pooling(found.path), dict(companions(found.path))


def _judge(evaluate: str | None, pairs: str | None) -> Any:
    """Return the function that judges, None where there is none or a file of pairs, which needs the tokenizer."""
    if evaluate is not None and pairs is not None:
        raise SourceError("a model is judged in one way", got="--evaluate and --pairs", wanted="one of them")
    return None if evaluate is None else sources.function(evaluate, EVALUATES)


def use_threads(threads: int | None) -> None:
    """Give torch so many threads; None leaves its own number."""
    if threads is not None:
        measure.require_threads(threads)
        torch.set_num_threads(threads)


def _loading(found: sources.Source, model: nn.Module, out: Path, shrink: float | None) -> str:
    """Return Python that loads the result, where {file} stands for its path."""
    if found.kind == "function":
        module, _, name = found.text.partition(":")
        return f'import twofour\nfrom {module} import {name}\nfast = twofour.load("{{file}}", {name}())'
    name = type(model).__name__
    if shrink is not None:  # config.json is the large model's, which `load` cuts
        made = f'{name}(AutoConfig.from_pretrained("{out}"))'
        return f'import twofour\nfrom transformers import AutoConfig, {name}\nfast = twofour.load("{{file}}", {made})'
    package, made = "transformers", f'{name}.from_pretrained("{out}", quantization_config=TwoFourConfig())'
    if found.path is not None and (outer := huggingface.sentence_class(found.path)):
        package, name = "sentence_transformers", outer
        made = f'{outer}("{out}", model_kwargs={{"quantization_config": TwoFourConfig()}})'
    return f"from {package} import {name}\nfrom twofour.integrations import TwoFourConfig\nmodel = {made}"


def show(outcome: Outcome) -> None:
    """Print the one table, what was won, where the files are and how the model is loaded."""
    head = ("model", "ms", "times as fast", "quality", "")
    title = "one call each, interleaved; times as fast as the fastest dense runtime"
    print_table(title, head, outcome.rows(), (1, 2, 3))
    say(f"quality: {outcome.measured}")
    files = ", ".join(sorted(path.name for path in outcome.folder.iterdir()))
    say(f"\n{outcome.verdict}\n\nwrote {outcome.folder}: {files}")
    say(f"the report: {outcome.folder / PAGE}\n\n{outcome.loading}")
