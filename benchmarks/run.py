"""The benchmark suite: `python benchmarks/run.py --help` lists its parts; --record keeps what they find."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cases import blocks as blocks_case
from cases import calibrated as calibrated_case
from cases import check as check_case
from cases import conv as conv_case
from cases import executor as executor_case
from cases import files as files_case
from cases import grid as grid_case
from cases import linear as linear_case
from cases import mask as mask_case
from cases import memory as memory_case
from cases import models_table, records, shapes, table
from cases import permutation as permutation_case
from cases import serving as serving_case
from cases import threads as threads_case
from models.algebra import ALGEBRA
from models.fusion import FUSION
from twofour.errors import DataError, TwofourError
from twofour.measure import Record

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

DTYPES = tuple(linear_case.BYTES)
DtypeOption = Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}; several, comma separated.")]
ShapesOption = Annotated[str, typer.Option("--shapes", help="A file in benchmarks/shapes, or a path.")]
ThreadsOption = Annotated[str, typer.Option(help="Thread counts, comma separated.")]
JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Where the records go: a file or a folder.")
]
RecordOption = Annotated[bool, typer.Option("--record", help="Keep the records in benchmarks/records, in git.")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Keep the cells that FILE has already.")]
SecondsOption = Annotated[float, typer.Option(help="Time box of one cell, in seconds.")]


@app.callback()
def _root() -> None:
    """Interleaved benchmarks against the best dense code, with the machine in every record."""


@app.command()
def linear(
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = "1,2",
    tokens: Annotated[str, typer.Option(help="Token counts, comma separated.")] = "1,8,32,128,512",
    shape_list: ShapesOption = "kernels.txt",
    cold: Annotated[bool, typer.Option("--cold", help="Only weights that come from memory.")] = False,
    hot: Annotated[bool, typer.Option("--hot", help="Only weights that stay in the caches.")] = False,
    cold_tokens: Annotated[int, typer.Option(help="Largest token count measured cold.")] = 32,
    seconds: SecondsOption = 1.5,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Best dense kernel against the best 2:4 kernel, per shape and token count."""
    states = [state for state, asked in (("hot", hot), ("cold", cold)) if asked] or ["hot", "cold"]
    for kind in _dtypes(dtype, json):
        cells = linear_case.cells(
            shapes.read(shape_list), _numbers(tokens), _numbers(threads), states, cold_tokens, kind
        )
        path = _path(json, f"linear-{kind}", record)
        _run(cells, linear_case.Bench(seconds), path, resume, table.show_linear)


@app.command()
def grid(
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = "1",
    tokens: Annotated[str, typer.Option(help="Token counts, comma separated.")] = "1,4,16,64,256,1024",
    example: Annotated[int, typer.Option(help="Token count that compile is given.")] = 16,
    seconds: SecondsOption = 0.6,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """`compile` on every Linear shape of the text files: slower than dense anywhere, beyond 5 % and the noise?"""
    for kind in _dtypes(dtype, json):
        cells = grid_case.cells(shapes.read_all(), _numbers(tokens), _numbers(threads), example, kind)
        path = _path(json, f"grid-{kind}", record)
        _run(cells, grid_case.Bench(seconds), path, resume, grid_case.show)


@app.command()
def conv(
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = "1,2",
    batch: Annotated[str, typer.Option(help="Batch sizes, comma separated.")] = "1",
    shape_list: ShapesOption = "resnet50.txt",
    seconds: SecondsOption = 1.0,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Best dense convolution against the best 2:4 one, per geometry."""
    for kind in _dtypes(dtype, json):
        cells = conv_case.cells(shapes.read_convolutions(shape_list), _numbers(batch), _numbers(threads), kind)
        path = _path(json, f"conv-{kind}", record)
        _run(cells, conv_case.Bench(seconds), path, resume, conv_case.show)


@app.command()
def mask(
    threads: ThreadsOption = "1,2",
    shape_list: ShapesOption = "kernels.txt",
    seconds: SecondsOption = 1.5,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """The 2:4 mask of fp32 weights, alone and with packing, against copying them and against torch.topk."""
    path = _path(json, "mask-float32", record)
    cells = mask_case.cells(shapes.read(shape_list), _numbers(threads))
    _run(cells, mask_case.Bench(seconds), path, resume, table.show_mask)


@app.command("threads")
def _threads(
    threads: ThreadsOption = "2",
    seconds: SecondsOption = 3.0,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Products by the threads of torch's OpenMP runtime, of torch's own loop, and of a pool of ours."""
    path = _path(json, "threads", record)
    _run(threads_case.cells(_numbers(threads)), threads_case.Bench(seconds), path, resume, threads_case.show)


@app.command("executor")
def _executor(
    seconds: SecondsOption = 2.0,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Microseconds of a tiny call inside a graph, by the Python program and by the native executor."""
    path = _path(json, "executor", record)
    _run(executor_case.cells(), executor_case.Bench(seconds), path, resume, executor_case.show)


@app.command()
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
    path = _path(json, "check", record)
    _run(
        check_case.cells(dtype.split(","), _numbers(threads)), check_case.Bench(seconds), path, resume, check_case.show
    )


@app.command()
def permutation(
    threads: ThreadsOption = "1",
    sizes: Annotated[str, typer.Option(help="Rows x channels, comma separated.")] = permutation_case.SHAPES,
    seconds: SecondsOption = 2.0,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """The search for an order of the channels: seconds, and how much of the loss it wins back."""
    path = _path(json, "permutation", record)
    cells = permutation_case.cells(sizes.split(","), _numbers(threads))
    _run(cells, permutation_case.Bench(seconds), path, resume, permutation_case.show)


@app.command()
def models(
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = "1,2",
    batch: Annotated[str, typer.Option(help="Batch sizes of the encoders, comma separated.")] = "1,8",
    only: Annotated[str, typer.Option(help="Models, comma separated.")] = "minilm,bert-base,resnet50,gpt2-decode",
    without: Annotated[list[str] | None, typer.Option(help="A runtime to leave out, by its name in the table.")] = None,
    seconds: SecondsOption = 4.0,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Whole models in every runtime, against compile of the dense and of the 2:4 model."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from cases import models as models_case

    for kind in _dtypes(dtype, json):
        cells = models_case.cells(only.split(","), kind, _numbers(batch), _numbers(threads))
        path = _path(json, f"models-{kind}", record)
        _run(cells, models_case.Bench(seconds, without or ()), path, resume, models_table.show_models)


@app.command()
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

    path = _path(json, "fusion-float32", record)
    bench = fusion_case.FusionBench(seconds, without or (), count=count)
    _run(fusion_case.cells(only.split(",")), bench, path, resume, fusion_case.show)


@app.command()
def blocks(
    only: Annotated[str, typer.Option(help="Blocks, comma separated.")] = ",".join(blocks_case.BLOCKS),
    threads: ThreadsOption = "1",
    floats: Annotated[int, typer.Option(help="Numbers of an operand.")] = blocks_case.FLOATS,
    without: Annotated[list[str] | None, typer.Option(help="A runtime to leave out, by its name in the table.")] = None,
    seconds: SecondsOption = 1.5,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Fused blocks of element-wise and reduce operators, against torch's operators and Inductor's C++."""
    if unknown := [name for name in only.split(",") if name not in blocks_case.BLOCKS]:
        raise DataError(f"the block {unknown[0]!r} is not known", got=only, wanted=", ".join(blocks_case.BLOCKS))
    cells = blocks_case.cells(only.split(","), _numbers(threads), floats)
    _run(
        cells,
        blocks_case.Bench(seconds, without or ()),
        _path(json, "blocks-float32", record),
        resume,
        blocks_case.show,
    )


@app.command()
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

    path = _path(json, "algebra-float32", record)
    bench = algebra_case.AlgebraBench(seconds, without or ())
    _run(algebra_case.cells(only.split(",")), bench, path, resume, algebra_case.show)


@app.command()
def memory(
    dtype: DtypeOption = "float32",
    keep: Annotated[str, typer.Option("--memory", help="fast or small.")] = "small",
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Memory while a model of 1.1 GB is compiled and afterwards, in a process of its own."""
    for kind in _dtypes(dtype, json):
        path = _path(json, f"memory-{kind}-{keep}", record)
        memory_case.show(memory_case.run(kind, keep, path), _console())
        _console().print(f"record: {path}", highlight=False)


@app.command()
def files(
    layers: Annotated[int, typer.Option(help="Layers of the checkpoint, 0.12 GB each.")] = files_case.LAYERS,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """`twofour prune` on a sharded checkpoint of 3 GB, whole, and killed half-way and resumed: seconds and memory."""
    path = _path(json, "files", record)
    files_case.show(files_case.run(layers, path), _console())
    _console().print(f"record: {path}", highlight=False)


@app.command()
def serving(
    starts: Annotated[int, typer.Option(help="Starts of each server, idle and busy.")] = 5,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Two uvicorn workers of a saved MiniLM: seconds until both answer, against eager, with busy neighbours too."""
    path = _path(json, "serving-float32", record)
    serving_case.show(serving_case.run(starts, path), _console())
    _console().print(f"record: {path}", highlight=False)


@app.command()
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
    path = _path(json, f"calibrated-{model}-{criterion.partition(':')[0]}-{threads}", record)
    calibrated_case.show(calibrated_case.run(model, criterion, pattern, threads, samples, path), _console())
    _console().print(f"record: {path}", highlight=False)


@app.command()
def training(
    dtype: Annotated[str, typer.Option(help="float32, bfloat16; several, comma separated.")] = "float32,bfloat16",
    schedule: Annotated[str, typer.Option(help='Of the masks: "fixed" or "every=K".')] = "fixed",
    without: Annotated[list[str] | None, typer.Option(help="A step to leave out, by its name in the table.")] = None,
    seconds: SecondsOption = 30.0,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """A training step of a transformer block stack: the best dense one, SDGP, 2:4 both ways, all three products."""
    from cases import training as training_case

    for kind in dtype.split(","):
        if kind not in training_case.TYPES:
            raise DataError(f"the dtype {kind!r} is not known", got=dtype, wanted="float32, bfloat16")
        path = _path(json, f"training-{kind}", record)
        cells = training_case.cells([kind], schedule)
        _run(cells, training_case.Bench(seconds, without or ()), path, resume, training_case.show)


@app.command()
def figures() -> None:
    """Draw docs/figures and write the tables made from records; needs matplotlib (requirements/figures.txt)."""
    import figures as drawing
    import readme

    for path in (*drawing.draw_all(), drawing.predicted(), readme.draw(), readme.write()):
        _console().print(str(path), highlight=False)


def _run(
    cells: list[dict[str, object]],
    bench: Callable[[dict[str, object]], Record],
    path: Path,
    resume: bool,
    show: Callable[[Sequence[Record], Console], None],
) -> None:
    show(records.run(cells, bench, path, resume), _console())
    _console().print(f"records: {path}", highlight=False)


def _path(given: Path | None, name: str, tracked: bool) -> Path:
    """Return where records go: a directory that was given, a file, or the default."""
    path = records.default_path(name, tracked)
    return path if given is None else given / path.name if given.is_dir() else given


def _dtypes(text: str, path: Path | None) -> list[str]:
    found = text.split(",")
    if len(found) > 1 and path is not None and not path.is_dir():
        raise DataError("several dtypes do not go into one file", got=str(path), wanted="a folder, or one dtype")
    for name in found:
        if name not in DTYPES:
            raise DataError(f"the dtype {name!r} is not known", got=text, wanted=f"some of {', '.join(DTYPES)}")
    return found


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r} is no list of positive whole numbers")
    return [int(part) for part in parts]


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 200)


def main() -> None:
    """Run the suite; an error of twofour is printed in its own form, exit code 2."""
    try:
        app()
    except TwofourError as error:
        Console(stderr=True).print(f"{type(error).__name__}: {error}", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
