"""Commands of the suite that measure whole nets in every runtime, and their training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from cases import bits_lm as bits_lm_case
from cases import bits_nets as bits_nets_case
from cases import models_table
from options import (
    DtypeOption,
    JsonOption,
    RecordOption,
    ResumeOption,
    SecondsOption,
    ThreadsOption,
    dtypes,
    measured,
    numbers,
    place,
)
from twofour.errors import DataError


def bits_nets(
    nets: Annotated[str, typer.Option(help="Of vgg, resnet18, half-resnet18.")] = "vgg,resnet18",
    widths: Annotated[str, typer.Option(help="Pairs of widths, comma separated.")] = ",".join(bits_nets_case.WIDTHS),
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
    cells = bits_nets_case.cells(nets.split(","), widths.split(","), list(map(int, batch.split(","))), states)
    measured(cells, bits_nets_case.Bench(seconds), place(json, "bits-nets", record), resume, bits_nets_case.show)


def bits_lm(
    nets: Annotated[str, typer.Option(help=f"Comma separated: {', '.join(bits_lm_case.NETS)}.")] = ",".join(
        bits_lm_case.NETS
    ),
    seconds: SecondsOption = 2.0,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Language models of ternary weights in tokens a second, against compiled int8 and float32 and torch's float32."""
    cells = bits_lm_case.cells(nets.split(","))
    measured(cells, bits_lm_case.Bench(seconds), place(json, "bits-lm", record), resume, bits_lm_case.show)


def shrunk(
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


COMMANDS = (bits_nets, bits_lm, shrunk, embeddings, models, training, repetition)
