"""`twofour export`: a sparse model to plain safetensors, ONNX, a folder of Hugging Face, or a file for libtwofour."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from twofour import compiler as compiling
from twofour import export as exporting
from twofour import masks, quantization
from twofour.cli import data as calibration
from twofour.cli import source as sources
from twofour.cli import sparse
from twofour.cli.console import JsonFile, progress, remedies_of_options, say, write
from twofour.cli.options import Embeddings, SampleShape, Smooth
from twofour.errors import SourceError
from twofour.export.onnx import OPSET, Exported
from twofour.export.onnx.write import OLDEST, OPSETS, require_packages
from twofour.export.plain import write_plain
from twofour.files import read_json
from twofour.recipe import Recipe

FORMATS = ("safetensors", "onnx", "huggingface", "runtime")
TRACED = ("onnx", "runtime")
ONLY = {
    **dict.fromkeys(("given", "length", "data", "dtype"), TRACED),
    **dict.fromkeys(("matmul", "opset", "fixed"), ("onnx",)),
    **dict.fromkeys(("recipe", "accuracy"), ("huggingface",)),
    **dict.fromkeys(("embeddings", "smooth"), ("runtime",)),
}
"""Arguments that mean something for some formats alone, and for which."""
REMEDIES = {
    "dtype='float32'": "--dtype float32",
    "matmul='matmul'": "--matmul matmul",
    "`embeddings`": "leave --embeddings out",
    'dtype="int8" and data=': "--dtype int8 with --data, or no --smooth",
    "dynamic=False": "--fixed-batch, if the model is for one batch only",
    "on it yourself": "--input takes another shape, --length fewer tokens, --data inputs of yours",
    "`tolerance`": "is the model random in evaluation mode? in Python to_onnx takes a larger `tolerance`",
}
LENGTH = 16
"""Tokens of the example that a model of texts is exported with, where none are asked for."""

To = Annotated[str, typer.Option("--to", metavar="FORMAT", help=f"One of {', '.join(FORMATS)}.")]
Out = Annotated[Path, typer.Option(metavar="PATH", help="File to write; for huggingface a folder. Must not exist.")]
Model = Annotated[
    str | None, typer.Option("--model", metavar="SOURCE", help="The model that a file of weights belongs to.")
]
PatternText = Annotated[
    str | None,
    typer.Option("--pattern", metavar="PATTERN", help="What the weights obey, where SOURCE does not say so."),
]
Length = Annotated[
    int, typer.Option(min=1, help="Tokens of a sample, where the model takes token ids (onnx, runtime).")
]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="DATA", help="Inputs as for `twofour prune`: the example, and ranges for int8 (onnx, runtime)."
    ),
]
Dtype = Annotated[
    str, typer.Option(help="float32, or int8: with Q/DQ, which needs --data (onnx); or as compile has it (runtime).")
]
Matmul = Annotated[str, typer.Option(help="matmul, or gemm for TensorRT 8 (onnx).")]
Opset = Annotated[
    int, typer.Option(min=OLDEST, max=OPSETS[1], help=f"Operator set, {OPSETS[0]} on for any model (onnx).")
]
Fixed = Annotated[bool, typer.Option("--fixed-batch", help="Only for the example's batch (onnx).")]
RecipeFile = Annotated[
    Path | None, typer.Option("--recipe", metavar="FILE", help="recipe.toml for the card (huggingface).")
]
AccuracyFile = Annotated[
    Path | None,
    typer.Option("--accuracy", metavar="FILE", help="JSON with what was measured, for the card (huggingface)."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace a file.")]


def export(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A sparse model, its folder, or its weights.")],
    to: To,
    out: Out,
    model: Model = None,
    pattern: PatternText = None,
    given: SampleShape = None,
    length: Length = LENGTH,
    data: Data = None,
    dtype: Dtype = "float32",
    embeddings: Embeddings = None,
    smooth: Smooth = False,
    matmul: Matmul = "matmul",
    opset: Opset = OPSET,
    fixed: Fixed = False,
    recipe: RecipeFile = None,
    accuracy: AccuracyFile = None,
    force: Force = False,
    json: JsonFile = None,
) -> None:
    """Write a sparse model in a form that other tools read, its zeros where they look for them.

    ONNX and libtwofour take a model of low bits too, dense or sparse.
    """
    _require_meant(context, to)
    _require_data(to, given, data, dtype)
    _require_free(out, force)
    if to == "onnx":
        require_packages()
    found, inputs = sources.resolve(source), (given, length, data)
    with progress(f"exporting {source}"):
        if to == "safetensors":
            said = _to_safetensors(found, model, pattern, out)
        elif to == "runtime":
            options = {"dtype": dtype, "embeddings": embeddings, "smooth": smooth}
            said = _to_runtime(found, sparse.model(found, model, pattern, low_bits=True), out, inputs, options)
        elif to == "huggingface":
            said = _to_huggingface(found, sparse.model(found, model, pattern), out, recipe, accuracy)
        else:
            options = {"dtype": dtype, "matmul": matmul, "opset": opset, "dynamic": not fixed}
            said = _to_onnx(found, sparse.model(found, model, pattern, low_bits=True), out, inputs, options)
    say(f"wrote {out}: {_counted(said)}")
    write(json, {"source": source, "to": to, "out": str(out), **said})


def _require_meant(context: typer.Context, to: str) -> None:
    """Refuse options that mean nothing for the format."""
    if to not in FORMATS:
        raise typer.BadParameter(f"{to!r} is none of {', '.join(FORMATS)}", param_hint="--to")
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        given = source is not None and source.name == "COMMANDLINE"
        forms = ONLY.get(parameter.name or "", FORMATS)
        if given and to not in forms:
            raise SourceError(
                f"{parameter.opts[0]} means nothing for --to {to}",
                got=f"{parameter.opts[0]}, which is for --to {' and '.join(forms)}",
                wanted=f"the options of --to {to}",
                remedy=f"leave {parameter.opts[0]} out, or --to {' or '.join(forms)}",
            )


def _require_data(to: str, given: str | None, data: str | None, dtype: str) -> None:
    if given is not None and data is not None:
        raise SourceError(
            "the example is of one shape or of the data",
            got="--input and --data",
            wanted="one of them",
            remedy="leave --input out: --data has inputs of its own",
        )
    if to == "onnx" and dtype == "int8" and data is None:
        raise SourceError(
            "--dtype int8 takes data",
            got="no --data",
            wanted="inputs whose ranges become scales: TensorRT runs int8 kernels where both operands have one",
            remedy=f"--data DATA, {calibration.FORMS}; or leave --dtype out",
        )


def _to_onnx(
    found: sources.Source,
    model: nn.Module,
    out: Path,
    inputs: tuple[str | None, int, str | None],
    options: dict[str, Any],
) -> dict[str, Any]:
    example, batches = calibration.traced(model, found, *inputs, what="ONNX is made by running the model")
    with remedies_of_options(REMEDIES):
        done = exporting.to_onnx(model, out, example, **options, data=batches if options["dtype"] == "int8" else None)
    _show(done)
    return {"sparse": [weight.initializer for weight in done.weights], **_widths(model), **done.to_dict()}


def _to_safetensors(found: sources.Source, model: str | None, pattern: str | None, out: Path) -> dict[str, Any]:
    if found.kind != "file" or model is not None:
        return {"sparse": exporting.to_safetensors(sparse.model(found, model, pattern), out)}
    weights = sparse.weights(found, pattern)
    write_plain(out, weights.tensors, weights.patterns, weights.axes)
    return {"sparse": list(weights.patterns)}


def _to_runtime(
    found: sources.Source,
    model: nn.Module,
    out: Path,
    inputs: tuple[str | None, int, str | None],
    options: dict[str, Any],
) -> dict[str, Any]:
    what = "a program for libtwofour is recorded by running the model"
    example, batches = calibration.traced(model, found, *inputs, what=what, batch=1)
    sparse_weights = list(masks.of(model))
    data = batches if options["dtype"] == "int8" else None
    with remedies_of_options(REMEDIES):
        fast = compiling.compile(model.eval(), example, **options, data=data, graph="native")
    done = exporting.to_runtime(fast, out, example)
    for shapes, answers, calls in zip(done.inputs, done.outputs, done.calls, strict=True):
        say(f"{calls} calls: {shapes} -> {answers}; {done.file_bytes / 1e6:.1f} MB")
    return {"sparse": sparse_weights, **_widths(model), **done.to_dict()}


def _counted(said: dict[str, Any]) -> str:
    """Return how many weights are sparse and layers of low bits."""
    bits = len(said.get("low_bits", ()))
    return f"{len(said['sparse'])} sparse weights" + (f", {bits} layers of low bits" if bits else "")


def _widths(model: nn.Module) -> dict[str, Any]:
    """Return the widths of layers of low bits by name, where there are some."""
    found = {name: low.widths.name for name, low in quantization.of(model).items()}
    return {"low_bits": found} if found else {}


def _to_huggingface(
    found: sources.Source, model: nn.Module, out: Path, recipe: Path | None, accuracy: Path | None
) -> dict[str, Any]:
    folder = found.path if found.kind == "folder" else None
    if recipe is None and folder is not None and (folder / "recipe.toml").is_file():
        recipe = folder / "recipe.toml"  # `twofour prune` left it there
    plan, card = Recipe.load(recipe) if recipe else None, _accuracy(accuracy)
    return {"sparse": exporting.to_huggingface(model, out, source=folder, recipe=plan, accuracy=card)}


def _show(done: Exported) -> None:
    say(
        f"opset {done.opset}, {done.dtype}; within {done.error:.1e} of the model in ONNX Runtime, "
        f"batches {', '.join(map(str, done.batches))}"
    )
    if done.lost:
        say(f"not in the graph as in the model, so not promised: {', '.join(done.lost)}")


def _require_free(out: Path, force: bool) -> None:
    if (out.is_dir() and any(out.iterdir())) or (out.exists() and not out.is_dir() and not force):
        raise SourceError(
            f"{out} exists already and is not overwritten",
            got="a folder with entries" if out.is_dir() else "a file",
            wanted="a new path",
            remedy="choose another --out" + ("" if out.is_dir() else ", or pass --force to replace the file"),
        )


def _accuracy(path: Path | None) -> exporting.Accuracy | None:
    if path is None:
        return None
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise SourceError(
            f"--accuracy {path} cannot be read",
            got=f"{type(error).__name__}: {error}",
            wanted="a JSON file",
            remedy="see docs/export.md for what it holds",
        ) from error
    return exporting.Accuracy.of(content)
