"""Commands of the suite that measure single products and masks: kernels against the best dense code."""

from __future__ import annotations

from typing import Annotated

import typer

from cases import bits as bits_case
from cases import block as block_case
from cases import conv as conv_case
from cases import grid as grid_case
from cases import linear as linear_case
from cases import mask as mask_case
from cases import recurrent as recurrent_case
from cases import shapes, table
from cases import threads as threads_case
from options import (
    DtypeOption,
    JsonOption,
    RecordOption,
    ResumeOption,
    SecondsOption,
    ShapesOption,
    ThreadsOption,
    dtypes,
    measured,
    numbers,
    place,
)


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


def threads(
    threads: ThreadsOption = "2",
    seconds: SecondsOption = 3.0,
    resume: ResumeOption = False,
    record: RecordOption = False,
    json: JsonOption = None,
) -> None:
    """Products by the threads of torch's OpenMP runtime, of torch's own loop, and of a pool of ours."""
    path = place(json, "threads", record)
    measured(threads_case.cells(numbers(threads)), threads_case.Bench(seconds), path, resume, threads_case.show)


COMMANDS = (linear, grid, conv, block, bits, recurrent, mask, threads)
