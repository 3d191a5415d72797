"""The benchmark suite: `python benchmarks/run.py linear|mask`; records go to benchmarks/records/."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cases import linear as linear_case
from cases import mask as mask_case
from cases import records, shapes, table
from twofour.errors import DataError, TwofourError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

ShapesOption = Annotated[str, typer.Option("--shapes", help="A file in benchmarks/shapes, or a path.")]
ThreadsOption = Annotated[str, typer.Option(help="Thread counts, comma separated.")]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Records; default benchmarks/records.")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Keep the cells that FILE has already.")]
SecondsOption = Annotated[float, typer.Option(help="Time box of one cell, in seconds.")]


@app.callback()
def _root() -> None:
    """Interleaved benchmarks against the best dense code, with the machine in every record."""


@app.command()
def linear(
    dtype: Annotated[str, typer.Option(help="float32.")] = "float32",
    threads: ThreadsOption = "1,2",
    tokens: Annotated[str, typer.Option(help="Token counts, comma separated.")] = "1,8,32,128,512",
    shape_list: ShapesOption = "kernels.txt",
    cold: Annotated[bool, typer.Option("--cold", help="Only weights that come from memory.")] = False,
    hot: Annotated[bool, typer.Option("--hot", help="Only weights that stay in the caches.")] = False,
    cold_tokens: Annotated[int, typer.Option(help="Largest token count measured cold.")] = 32,
    seconds: SecondsOption = 1.5,
    resume: ResumeOption = False,
    json: JsonOption = None,
) -> None:
    """Best dense kernel against the best 2:4 kernel, per shape and token count."""
    if dtype != "float32":
        raise DataError(f"the dtype {dtype!r} is planned, not built yet", got=dtype, wanted="float32")
    states = [state for state, asked in (("hot", hot), ("cold", cold)) if asked] or ["hot", "cold"]
    cells = linear_case.cells(shapes.read(shape_list), _numbers(tokens), _numbers(threads), states, cold_tokens)
    path = json or records.default_path(f"linear-{dtype}")
    done = records.run(cells, linear_case.Bench(seconds), path, resume)
    table.show_linear(done, _console())
    _console().print(f"records: {path}", highlight=False)


@app.command()
def mask(
    threads: ThreadsOption = "1,2",
    shape_list: ShapesOption = "kernels.txt",
    seconds: SecondsOption = 1.5,
    resume: ResumeOption = False,
    json: JsonOption = None,
) -> None:
    """The 2:4 mask of fp32 weights, alone and with packing, against copying them and against torch.topk."""
    path = json or records.default_path("mask-float32")
    cells = mask_case.cells(shapes.read(shape_list), _numbers(threads))
    done = records.run(cells, mask_case.Bench(seconds), path, resume)
    table.show_mask(done, _console())
    _console().print(f"records: {path}", highlight=False)


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
