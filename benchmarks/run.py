"""The benchmark suite: `python benchmarks/run.py --help` lists its parts; --record keeps what they find."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import engine
from cases import bits as bits_case
from cases import bits_lm, bits_nets, models_table, shapes, table
from cases import block as block_case
from cases import calibrated as calibrated_case
from cases import check as check_case
from cases import conv as conv_case
from cases import files as files_case
from cases import grid as grid_case
from cases import linear as linear_case
from cases import mask as mask_case
from cases import memory as memory_case
from cases import permutation as permutation_case
from cases import recurrent as recurrent_case
from cases import serving as serving_case
from cases import threads as threads_case
from options import (
    DtypeOption,
    JsonOption,
    RecordOption,
    ResumeOption,
    SecondsOption,
    ShapesOption,
    ThreadsOption,
    console,
    dtypes,
    measured,
    numbers,
    place,
)
from twofour.errors import DataError, TwofourError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

for command in engine.COMMANDS:
    app.command(command.__name__)(command)


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
    for kind in dtypes(dtype, json):
        cells = linear_case.cells(shapes.read(shape_list), numbers(tokens), numbers(threads), states, cold_tokens, kind)
        path = place(json, f"linear-{kind}", record)
        measured(cells, linear_case.Bench(seconds), path, resume, table.show_linear)


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
    for kind in dtypes(dtype, json):
        cells = grid_case.cells(shapes.read_all(), numbers(tokens), numbers(threads), example, kind)
        path = place(json, f"grid-{kind}", record)
        measured(cells, grid_case.Bench(seconds), path, resume, grid_case.show)


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
    for kind in dtypes(dtype, json):
        cells = conv_case.cells(shapes.read_convolutions(shape_list), numbers(batch), numbers(threads), kind)
        path = place(json, f"conv-{kind}", record)
        measured(cells, conv_case.Bench(seconds), path, resume, conv_case.show)


@app.command()
def block(
    dtype: DtypeOption = "float32",
    sizes: Annotated[str, typer.Option(help="Sides of the square weights, comma separated.")] = "1024,2048",
    blocks: Annotated[str, typer.Option(help="Block sizes, comma separated.")] = ",".join(block_case.BLOCKS),
    sparsity: Annotated[
        str, typer.Option(help="Per cent of the blocks that are zero, comma separated.")
    ] = "50,70,80,90",
    tokens: Annotated[str, typer.Option(help="Token counts, comma separated.")] = "1,64",
    cold: Annotated[bool, typer.Option("--cold", help="Only weights that come from memory.")] = False,
    hot: Annotated[bool, typer.Option("--hot", help="Only weights that stay in the caches.")] = False,
    seconds: SecondsOption = 1.0,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Products with weights of blocks against the best dense ones and the sparse ones of others, on one thread."""
    states = [state for state, asked in (("hot", hot), ("cold", cold)) if asked] or ["hot", "cold"]
    shares = [number / 100 for number in numbers(sparsity)]
    for kind in dtypes(dtype, json):
        cells = block_case.cells(kind, numbers(sizes), blocks.split(","), shares, numbers(tokens), states)
        measured(cells, block_case.Bench(seconds), place(json, f"block-{kind}", record), resume, block_case.show)


@app.command()
def bits(
    widths: Annotated[str, typer.Option(help="Pairs of widths, comma separated.")] = ",".join(
        (*bits_case.WIDTHS, *bits_case.KEPT, *bits_case.GROUPED)
    ),
    sizes: Annotated[
        str, typer.Option(help="Tokens x outputs x inputs, with :cold for weights from memory; comma separated.")
    ] = ",".join(bits_case.SIZES),
    seconds: SecondsOption = 2.0,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Products of 1 to 8 bits against dots of bytes (w8a8) and torch._int_mm, on one thread."""
    cells = bits_case.cells(sizes.split(","), widths.split(","))
    measured(cells, bits_case.Bench(seconds), place(json, "bits", record), resume, bits_case.show)


@app.command("bits-nets")
def low_bit_nets(
    nets: Annotated[str, typer.Option(help="Of vgg, resnet18, half-resnet18.")] = "vgg,resnet18",
    widths: Annotated[str, typer.Option(help="Pairs of widths, comma separated.")] = ",".join(bits_nets.WIDTHS),
    batch: Annotated[str, typer.Option(help="Images of a call, comma separated.")] = "1,8",
    states: Annotated[
        Path | None, typer.Option(help="Trained nets, of experiments/gpu_low_bits.py; default: random weights.")
    ] = None,
    seconds: SecondsOption = 2.0,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Whole nets of 1 and 2 bits against OpenVINO int8 and float32, on one thread."""
    cells = bits_nets.cells(nets.split(","), widths.split(","), list(map(int, batch.split(","))), states)
    measured(cells, bits_nets.Bench(seconds), place(json, "bits-nets", record), resume, bits_nets.show)


@app.command("bits-lm")
def low_bit_language_models(
    nets: Annotated[str, typer.Option(help=f"Comma separated: {', '.join(bits_lm.NETS)}.")] = ",".join(bits_lm.NETS),
    seconds: SecondsOption = 2.0,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Language models of ternary weights in tokens a second, against compiled int8 and float32 and torch's float32."""
    cells = bits_lm.cells(nets.split(","))
    measured(cells, bits_lm.Bench(seconds), place(json, "bits-lm", record), resume, bits_lm.show)


@app.command("shrunk")
def shrunk_models(
    only: Annotated[str, typer.Option(help="Models, comma separated.")] = "minilm,resnet50",
    budgets: Annotated[str, typer.Option(help="Shares of the compiled time, comma separated.")] = "0.6",
    without: Annotated[list[str] | None, typer.Option(help="A runtime to leave out, by its name in the table.")] = None,
    seconds: SecondsOption = 8.0,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Models shrunk to a share of their time, then 2:4, against OpenVINO with the whole model, on one thread."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from cases import shrunk as shrunk_case

    cells = shrunk_case.cells(only.split(","), list(map(float, budgets.split(","))))
    bench = shrunk_case.Bench(seconds, without or ())
    measured(cells, bench, place(json, "shrunk-float32", record), resume, shrunk_case.show)


@app.command()
def embeddings(
    sentences: Annotated[str, typer.Option(help="stsb, mixed; comma separated.")] = "stsb,mixed",
    threads: ThreadsOption = "2",
    batch: Annotated[int, typer.Option(help="Sentences of a call of the encoder.")] = 32,
    without: Annotated[list[str] | None, typer.Option(help="An engine to leave out, by its name in the table.")] = None,
    seconds: SecondsOption = 60.0,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """MiniLM in sentence-transformers, sentences a second and Spearman on STS-B, in every runtime."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from cases import embeddings as embeddings_case

    cells = embeddings_case.cells(sentences.split(","), numbers(threads), batch)
    bench = embeddings_case.Bench(seconds, without or ())
    measured(cells, bench, place(json, "embeddings", record), resume, embeddings_case.show)


@app.command()
def recurrent(
    layers: Annotated[str, typer.Option(help="lstm, gru, rnnoise; comma separated.")] = "lstm,gru,rnnoise",
    hidden: Annotated[str, typer.Option(help="Units, comma separated.")] = "256,512,1024,2048",
    steps: Annotated[str, typer.Option(help="Steps of a call, comma separated.")] = "1,128",
    seconds: SecondsOption = 4.0,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """LSTM and GRU of batch 1 on one thread: torch, ONNX Runtime, OpenVINO and ours, float32 and int8."""
    kinds = layers.split(",")
    if unknown := [name for name in kinds if name not in recurrent_case.KINDS]:
        raise typer.BadParameter(f"{', '.join(unknown)}; there are {', '.join(recurrent_case.KINDS)}")
    cells = recurrent_case.cells(kinds, numbers(hidden), numbers(steps))
    measured(cells, recurrent_case.Bench(seconds), place(json, "recurrent", record), resume, recurrent_case.show)


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
    path = place(json, "mask-float32", record)
    cells = mask_case.cells(shapes.read(shape_list), numbers(threads))
    measured(cells, mask_case.Bench(seconds), path, resume, table.show_mask)


@app.command("threads")
def _threads(
    threads: ThreadsOption = "2",
    seconds: SecondsOption = 3.0,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Products by the threads of torch's OpenMP runtime, of torch's own loop, and of a pool of ours."""
    path = place(json, "threads", record)
    measured(threads_case.cells(numbers(threads)), threads_case.Bench(seconds), path, resume, threads_case.show)


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
    path = place(json, "check", record)
    measured(
        check_case.cells(dtype.split(","), numbers(threads)), check_case.Bench(seconds), path, resume, check_case.show
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
    path = place(json, "permutation", record)
    cells = permutation_case.cells(sizes.split(","), numbers(threads))
    measured(cells, permutation_case.Bench(seconds), path, resume, permutation_case.show)


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

    for kind in dtypes(dtype, json):
        cells = models_case.cells(only.split(","), kind, numbers(batch), numbers(threads))
        path = place(json, f"models-{kind}", record)
        measured(cells, models_case.Bench(seconds, without or ()), path, resume, models_table.show_models)


@app.command()
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


@app.command()
def files(
    layers: Annotated[int, typer.Option(help="Layers of the checkpoint, 0.12 GB each.")] = files_case.LAYERS,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """`twofour prune` on a sharded checkpoint of 3 GB, whole, and killed half-way and resumed: seconds and memory."""
    path = place(json, "files", record)
    files_case.show(files_case.run(layers, path), console())
    console().print(f"record: {path}", highlight=False)


@app.command()
def serving(
    starts: Annotated[int, typer.Option(help="Starts of each server, idle and busy.")] = 5,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Two uvicorn workers of a saved MiniLM: seconds until both answer, against eager, with busy neighbours too."""
    path = place(json, "serving-float32", record)
    serving_case.show(serving_case.run(starts, path), console())
    console().print(f"record: {path}", highlight=False)


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
    path = place(json, f"calibrated-{model}-{criterion.partition(':')[0]}-{threads}", record)
    calibrated_case.show(calibrated_case.run(model, criterion, pattern, threads, samples, path), console())
    console().print(f"record: {path}", highlight=False)


@app.command()
def training(
    dtype: Annotated[str, typer.Option(help="float32, bfloat16; several, comma separated.")] = "float32,bfloat16",
    schedule: Annotated[str, typer.Option(help='Of the masks: "fixed" or "every=K".')] = "fixed",
    sequences: Annotated[int, typer.Option(help="Of 128 tokens, in a step of blocks.")] = 16,
    net: Annotated[
        str, typer.Option(help='"blocks" of a transformer, or "resnet9", a net of convolutions.')
    ] = "blocks",
    images: Annotated[int, typer.Option(help="In a step of resnet9.")] = 32,
    threads: ThreadsOption = "1",
    without: Annotated[list[str] | None, typer.Option(help="A step to leave out, by its name in the table.")] = None,
    seconds: SecondsOption = 30.0,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """A training step of a stack of blocks, or of a net of convolutions: the best dense one, and sparse ones."""
    from cases import training as training_case

    if net not in ("blocks", "resnet9"):
        raise DataError(f"the net {net!r} is not known", got=net, wanted="blocks, resnet9")
    for kind in dtype.split(","):
        if kind not in training_case.TYPES:
            raise DataError(f"the dtype {kind!r} is not known", got=dtype, wanted="float32, bfloat16")
        of_blocks = net == "blocks"
        path = place(json, f"training-{kind}" if of_blocks else f"training-{net}-{kind}", record)
        counts = numbers(threads)
        cells = (
            training_case.cells([kind], schedule, sequences, counts)
            if of_blocks
            else training_case.image_cells([kind], images, counts)
        )
        measured(cells, training_case.Bench(seconds, without or ()), path, resume, training_case.show)


@app.command()
def repetition(
    only: Annotated[str, typer.Option(help="cifar10, stsb; comma separated.")] = "cifar10,stsb",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16; several, comma separated.")] = "float32",
    epochs: Annotated[int, typer.Option(min=1, help="Of each training.")] = 1,
    images: Annotated[int, typer.Option(help="Of an epoch of cifar10, the first of 50,000.")] = 50_000,
    pairs: Annotated[int, typer.Option(help="Of an epoch of stsb, the first of 5,749.")] = 5_749,
    without: Annotated[
        list[str] | None, typer.Option(help="An arm to leave out, or a way of them, by its name in the table.")
    ] = None,
    criterion: Annotated[str, typer.Option(help="That sparse arms are pruned by; auto: as `prune` chooses.")] = "auto",
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """A converged net trained again on its data, dense and sparse: seconds an epoch, and the metric of each."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from cases import repetition as repetition_case

    for task in only.split(","):
        for kind in dtype.split(","):
            cells = repetition_case.cells([task], [kind], epochs, {"cifar10": images, "stsb": pairs})
            path = place(json, f"repetition-{task}-{kind}", record)
            measured(cells, repetition_case.Bench(without or (), criterion), path, resume, repetition_case.show)


@app.command()
def figures() -> None:
    """Draw docs/figures and write the tables made from records; needs matplotlib (requirements/figures.txt)."""
    import figures as drawing
    import readme

    for path in (*drawing.draw_all(), drawing.predicted(), readme.draw(), readme.write()):
        console().print(str(path), highlight=False)


def main() -> None:
    """Run the suite; an error of twofour is printed in its own form, exit code 2."""
    try:
        app()
    except TwofourError as error:
        Console(stderr=True).print(f"{type(error).__name__}: {error}", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
