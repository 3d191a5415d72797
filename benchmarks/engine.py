"""Commands of the suite that measure the graph engine: whole models, blocks, algebra, calls."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from cases import blocks as blocks_case
from cases import executor as executor_case
from cases import layers as layers_case
from cases import lengths as lengths_case
from cases.lengths import SIZES
from models.algebra import ALGEBRA
from models.fusion import FUSION
from models.paper import PAPER
from models.sweep import SWEEP
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
    show,
)
from twofour.errors import DataError


def executor(
    seconds: SecondsOption = 2.0,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Microseconds of a tiny call inside a graph, by the Python program and by the native executor."""
    path = place(json, "executor", record)
    measured(executor_case.cells(), executor_case.Bench(seconds), path, resume, executor_case.show)


def fusion(
    only: Annotated[str, typer.Option(help="Models, comma separated.")] = ",".join(FUSION),
    without: Annotated[list[str] | None, typer.Option(help="A runtime to leave out, by its name in the table.")] = None,
    count: Annotated[bool, typer.Option(help="Count the kernels of the runtimes.")] = True,
    seconds: SecondsOption = 12.0,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Eight models, dense and 2:4, in every runtime on one thread: times, kernels and bytes between them."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from cases import fusion as fusion_case

    path = place(json, "fusion-float32", record)
    bench = fusion_case.FusionBench(seconds, without or (), count=count)
    measured(fusion_case.cells(only.split(",")), bench, path, resume, fusion_case.show)


def sweep(
    dtype: DtypeOption = "float32",
    only: Annotated[str, typer.Option(help="Models, comma separated.")] = ",".join(SWEEP),
    batch: Annotated[str, typer.Option(help="Batch sizes, comma separated.")] = "1,8",
    tokens: Annotated[str, typer.Option(help="Tokens of a sequence, comma separated.")] = "16,128,512",
    threads: ThreadsOption = "1",
    without: Annotated[list[str] | None, typer.Option(help="A runtime to leave out, by its name in the table.")] = None,
    seconds: SecondsOption = 4.0,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Thirteen models that nothing was tuned for, by the default call, against the best dense runtime."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from cases import sweep as sweep_case

    for kind in dtypes(dtype, json):
        cells = sweep_case.cells(only.split(","), kind, numbers(batch), numbers(tokens), numbers(threads))
        bench = sweep_case.Bench(seconds, without or ())
        measured(cells, bench, place(json, f"sweep-{kind}", record), resume, sweep_case.show)


def blocks(
    only: Annotated[str, typer.Option(help="Blocks, comma separated.")] = ",".join(blocks_case.BLOCKS),
    threads: ThreadsOption = "1",
    floats: Annotated[int, typer.Option(help="Numbers of an operand.")] = blocks_case.FLOATS,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    without: Annotated[list[str] | None, typer.Option(help="A runtime to leave out, by its name in the table.")] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Fresh processes of each cell, the median of which counts; 1: none.")
    ] = blocks_case.PROCESSES,
    seconds: SecondsOption = 1.5,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Fused blocks of element-wise and reduce operators, against torch's operators and Inductor's C++."""
    if unknown := [name for name in only.split(",") if name not in blocks_case.BLOCKS]:
        raise DataError(f"the block {unknown[0]!r} is not known", got=only, wanted=", ".join(blocks_case.BLOCKS))
    if dtype not in blocks_case.TOLERANCES:
        raise DataError("blocks are not measured in that dtype", got=dtype, wanted=", ".join(blocks_case.TOLERANCES))
    cells = blocks_case.cells(only.split(","), numbers(threads), floats, dtype)
    measured(
        cells,
        blocks_case.Bench(seconds, without or (), processes),
        place(json, f"blocks-{dtype}", record),
        resume,
        blocks_case.show,
    )


def algebra(
    only: Annotated[str, typer.Option(help="Blocks, comma separated.")] = ",".join(ALGEBRA),
    without: Annotated[list[str] | None, typer.Option(help="A runtime to leave out, by its name in the table.")] = None,
    seconds: SecondsOption = 4.0,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Blocks that algebra shortens, dense, in every runtime on one thread."""
    from cases import algebra as algebra_case

    path = place(json, "algebra-float32", record)
    bench = algebra_case.AlgebraBench(seconds, without or ())
    measured(algebra_case.cells(only.split(",")), bench, path, resume, algebra_case.show)


def layers(
    only: Annotated[str, typer.Option(help="Models, comma separated.")] = ",".join(PAPER),
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Operators before and calls after fusion, beside the table of DNNFusion's evaluation; nothing is timed."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    path = place(json, "layers", record)
    show(*layers_case.table(layers_case.run(only.split(","), path)), path)


def peak(
    only: Annotated[str, typer.Option(help="Models, comma separated.")] = "minilm,vit-small,resnet50,gpt2",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or int8; several, comma separated.")] = "float32,int8",
    without: Annotated[list[str] | None, typer.Option(help="A runtime to leave out, by its name in the table.")] = None,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Memory that serving a model takes, and the most in a call, in every runtime, each in its own process."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from cases import peak as peak_case

    cells = peak_case.cells(only.split(","), dtype.split(","))
    measured(cells, peak_case.Bench(without or ()), place(json, "peak", record), resume, peak_case.show)


def generate(
    only: Annotated[str, typer.Option(help="Models, comma separated.")] = "gpt2-6x512,gpt2-small",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, int8 or int4; several, comma separated.")] = "float32",
    threads: ThreadsOption = "1",
    inductor: Annotated[bool, typer.Option(help="Compile and measure torch.compile with a static cache.")] = True,
    seconds: SecondsOption = 20.0,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Tokens a second of `generate()`: torch, torch.compile with a static cache, our layers and our graphs."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from cases import generate as generate_case

    path = place(json, "generate", record)
    cells = generate_case.cells(only.split(","), dtype.split(","), numbers(threads))
    measured(cells, generate_case.Bench(seconds, inductor), path, resume, generate_case.show)


def callers(
    seconds: SecondsOption = 2.0,
    mixed: Annotated[int, typer.Option(min=10, help="Calls of random shapes whose memory is watched.")] = 10_000,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Calls a second of 1, 2 and 4 threads that call one compiled MiniLM, and the memory that mixed calls leave."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from cases import callers as callers_case

    path = place(json, "callers-float32", record)
    callers_case.show(callers_case.run(seconds, mixed, path), console())
    console().print(f"record: {path}", highlight=False)


def ragged(
    lengths: Annotated[str, typer.Option(help="mixed, alike or full; several, comma separated.")] = "mixed,alike,full",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or int8; several, comma separated.")] = "float32",
    batch: Annotated[str, typer.Option(help="Batch sizes, comma separated.")] = "8",
    threads: ThreadsOption = "1",
    without: Annotated[list[str] | None, typer.Option(help="A candidate to leave out, by its name.")] = None,
    seconds: SecondsOption = 8.0,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Batches of sequences of many lengths: packed and padded, beside the runtimes."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from cases import ragged as ragged_case

    cells = ragged_case.cells(lengths.split(","), dtype.split(","), numbers(batch), numbers(threads))
    measured(cells, ragged_case.Bench(seconds, without or ()), place(json, "ragged", record), resume, ragged_case.show)


def lengths(
    only: Annotated[str, typer.Option(help="Sizes of calls, comma separated.")] = ",".join(SIZES),
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or int8; several, comma separated.")] = "float32",
    threads: ThreadsOption = "1",
    without: Annotated[list[str] | None, typer.Option(help="A candidate to leave out, by its name.")] = None,
    seconds: SecondsOption = 8.0,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """MiniLM compiled once, called at eleven sizes of batch and length and over sixty random ones."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    cells = lengths_case.cells(only.split(","), dtype.split(","), numbers(threads))
    path = place(json, "lengths", record)
    measured(cells, lengths_case.Bench(seconds, without or ()), path, resume, lengths_case.show)


def provider(
    exporter: Annotated[str, typer.Option(help="Who wrote the file: torch, twofour.")] = "torch,twofour",
    threads: ThreadsOption = "1",
    seconds: SecondsOption = 8.0,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """MiniLM's ONNX files in ONNX Runtime, with and without libtwofour as a provider, in Python and from C."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from cases import provider as provider_case

    cells = provider_case.cells(exporter.split(","), numbers(threads))
    path = place(json, "provider", record)
    with tempfile.TemporaryDirectory(prefix="twofour-provider-") as folder:
        measured(cells, provider_case.Bench(seconds, Path(folder)), path, resume, provider_case.show)


COMMANDS = (fusion, sweep, blocks, algebra, executor, layers, peak, generate, callers, ragged, lengths, provider)
