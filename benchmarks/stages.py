"""Commands of the suite that measure stages beside kernels: checks, searches, calibration, files, memory, serving."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from cases import calibrated as calibrated_case
from cases import check as check_case
from cases import files as files_case
from cases import memory as memory_case
from cases import permutation as permutation_case
from cases import serving as serving_case
from options import (
    DtypeOption,
    JsonOption,
    RecordOption,
    ResumeOption,
    SecondsOption,
    ThreadsOption,
    console,
    dtypes,
    measured,
    numbers,
    place,
)
from twofour.errors import DataError


def check(
    dtype: Annotated[str, typer.Option(help=f"{', '.join(check_case.DTYPES)}; several, comma separated.")] = ",".join(
        check_case.DTYPES
    ),
    threads: ThreadsOption = "1",
    seconds: SecondsOption = 1.5,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """`twofour check` of a safetensors file, in bytes a second, against copying them and counting in torch."""
    if unknown := [name for name in dtype.split(",") if name not in check_case.DTYPES]:
        raise DataError(f"the dtype {unknown[0]!r} is not known", got=dtype, wanted=", ".join(check_case.DTYPES))
    path = place(json, "check", record)
    measured(
        check_case.cells(dtype.split(","), numbers(threads)), check_case.Bench(seconds), path, resume, check_case.show
    )


def permutation(
    threads: ThreadsOption = "1",
    sizes: Annotated[str, typer.Option(help="Rows x channels, comma separated.")] = permutation_case.SHAPES,
    seconds: SecondsOption = 2.0,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """The search for an order of the channels: seconds, and how much of the loss it wins back."""
    path = place(json, "permutation", record)
    cells = permutation_case.cells(sizes.split(","), numbers(threads))
    measured(cells, permutation_case.Bench(seconds), path, resume, permutation_case.show)


def calibrated(
    model: Annotated[str, typer.Option(help=" or ".join(calibrated_case.MODELS))] = "minilm",
    criterion: Annotated[str, typer.Option(help="A criterion that looks at data.")] = "sparsegpt",
    pattern: Annotated[str, typer.Option(help="The pattern.")] = "2:4",
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 2,
    samples: Annotated[int, typer.Option(help="Sequences: of 128 tokens for minilm, of 256 for llama-1b.")] = 128,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """One-shot pruning with calibration: seconds, memory and the outputs' error, in a process of its own."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    path = place(json, f"calibrated-{model}-{criterion.partition(':')[0]}-{threads}", record)
    calibrated_case.show(calibrated_case.run(model, criterion, pattern, threads, samples, path), console())
    console().print(f"record: {path}", highlight=False)


def files(
    layers: Annotated[int, typer.Option(help="Layers of the checkpoint, 0.12 GB each.")] = files_case.LAYERS,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """`twofour prune` on a sharded checkpoint of 3 GB, whole, and killed half-way and resumed: seconds and memory."""
    path = place(json, "files", record)
    files_case.show(files_case.run(layers, path), console())
    console().print(f"record: {path}", highlight=False)


def memory(
    dtype: DtypeOption = "float32",
    keep: Annotated[str, typer.Option("--memory", help="fast or small.")] = "small",
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Memory while a model of 1.1 GB is compiled and afterwards, in a process of its own."""
    for kind in dtypes(dtype, json):
        path = place(json, f"memory-{kind}-{keep}", record)
        memory_case.show(memory_case.run(kind, keep, path), console())
        console().print(f"record: {path}", highlight=False)


def serving(
    starts: Annotated[int, typer.Option(help="Starts of each server, idle and busy.")] = 5,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Two uvicorn workers of a saved MiniLM: seconds until both answer, against eager, with busy neighbours too."""
    path = place(json, "serving-float32", record)
    serving_case.show(serving_case.run(starts, path), console())
    console().print(f"record: {path}", highlight=False)


COMMANDS = (check, permutation, calibrated, files, memory, serving)
