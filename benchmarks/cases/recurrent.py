"""Recurrent layers of batch 1: LSTM and GRU of torch, ONNX Runtime, OpenVINO and ours, one step and many.

Every candidate gets the state of the step before, as in streaming, and answers with the next one. All run in this
process on one thread, in turns; processor time of the process counts, as OpenVINO computes on a thread of its own.
Weights are hot: each call is repeated until a sample takes a millisecond, so that they stand where the caches have
room for them; from 1024 units on they have none, and come from memory at every step. What answers wrongly is not timed.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import twofour
from cases.columns import headed
from cases.records import machine_line
from twofour import masks
from twofour.errors import TwofourError
from twofour.layers import walk
from twofour.measure import Record, compare
from twofour.measure.distance import distance
from twofour.patterns import parse

Call = Callable[[], object]

HIDDEN = (256, 512, 1024, 2048)
STEPS = (1, 128)
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnnoise": nn.GRU}
TORCH, TORCH_INT8, ORT, ORT_INT8, OPENVINO = "torch", "torch int8", "ONNX Runtime", "ONNX Runtime int8", "OpenVINO"
TORCH_BF16, OPENVINO_BF16 = "torch bfloat16", "OpenVINO bfloat16"
FLOATS = (TORCH, ORT, OPENVINO)
"""What every layer of ours is compared with."""

OF_TYPE = {"int8": (TORCH_INT8, ORT_INT8), "bfloat16": (TORCH_BF16, OPENVINO_BF16)}
"""What layers of ours that compute in a coarser type are compared with besides."""

WRONG = {"float32": 1e-3, "bfloat16": 0.05, "int8": 0.2}
"""Relative error beyond which an answer is wrong, by computing type: coarser ones round weights and states."""

OURS = {
    "ours dense": (None, "float32"),
    "ours dense bfloat16": (None, "bfloat16"),
    "ours dense int8": (None, "int8"),
    "ours 2:4": ("2:4", "float32"),
    "ours 2:4 int8": ("2:4", "int8"),
}
RNNOISE, GATES = "block:8x4 by gates", (0.3, 0.2, 0.5)
"""RNNoise's GRU: the shares of 8 x 4 blocks that the gates r, z and n keep, of both weights, and what all gates do.

Source: xiph's rnnoise, the layers of its model in torch, where those of 384 units are pruned so while they train.
"""

OF_RNNOISE = {"ours blocks": (RNNOISE, "float32"), "ours blocks int8": (RNNOISE, "int8")}
PRODUCTS = "torch int8, products alone"
"""The two products of a step in torch's dynamic int8, without gates: what a dense int8 layer cannot be faster than."""

BLOCKS = {"ours block:16x16@0.9": ("block:16x16@0.9", "float32"), "ours block:8x1@0.9": ("block:8x1@0.9", "float32")}
"""Candidate -> the pattern of both weights, and the computing type."""


class Streaming(nn.Module):
    """One layer that is called with its state and answers with the next one.

    Args:
        kind: A key of `KINDS`.
        hidden: Units, and inputs.
    """

    def __init__(self, kind: str, hidden: int) -> None:
        super().__init__()
        self.kind = kind
        self.layer = KINDS[kind](hidden, hidden)

    def forward(self, x: Tensor, h: Tensor, c: Tensor | None = None) -> tuple[Tensor, ...]:
        """(steps, 1, in), (1, 1, hidden) each -> states of all steps, and the last ones."""
        y, last = self.layer(x, h if c is None else (h, c))
        return (y, last) if c is None else (y, *last)


def cells(layers: Sequence[str], hidden: Sequence[int], steps: Sequence[int]) -> list[dict[str, object]]:
    """Return every combination, the small ones first; RNNoise's layer has 384 units and runs a frame at a time."""
    case = {"case": "recurrent", "threads": 1, "weights": "hot", "dtype": "float32"}
    return [
        {**case, "model": kind, "shape": f"{units}", "tokens": count}
        for units in hidden
        for count in steps
        for kind in layers
        if kind != "rnnoise"
    ] + [{**case, "model": "rnnoise", "shape": "384", "tokens": 1} for _ in range("rnnoise" in layers)]


class Bench:
    """Measures cells.

    Args:
        seconds: Time box of a cell.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, cell: dict[str, object]) -> Record:
        """Measure one cell on one thread."""
        torch.manual_seed(0)
        kind, hidden, steps = str(cell["model"]), int(str(cell["shape"])), int(str(cell["tokens"]))
        model, h = Streaming(kind, hidden).eval(), 0.1 * torch.randn(1, 1, hidden)
        inputs = torch.randn(steps, 1, hidden), *([h, h.clone()] if kind == "lstm" else [h])
        errors, missing = dict[str, float](), dict[str, str]()
        calls = dict(_candidates(model, inputs, missing, errors))
        present = [name for name in FLOATS if name in calls]
        options = {"clock": "process", "repeats": 9, "seconds": self.seconds}
        with torch.inference_mode():
            return compare(calls, baseline=present, meta={**cell, "missing": missing, "errors": errors}, **options)


def _candidates(
    model: Streaming, inputs: tuple[Tensor, ...], missing: dict[str, str], errors: dict[str, float]
) -> Iterator[tuple[str, Call]]:
    """Yield each candidate, its answer held against torch's; what is not there gets a reason in `missing`."""
    yield TORCH, partial(model, *inputs)
    makers: dict[str, Callable[[], Call]] = {
        TORCH_INT8: partial(_torch_int8, model, inputs),
        ORT: partial(_onnx, model, inputs, False),
        ORT_INT8: partial(_onnx, model, inputs, True),
        OPENVINO: partial(_openvino, model, inputs),
        TORCH_BF16: partial(_torch_bf16, model, inputs),
        OPENVINO_BF16: partial(_openvino, model, inputs, "bf16"),
    }
    with torch.inference_mode():
        want = model(*inputs)[0]
    for name, make in makers.items():
        try:
            call = make()
            errors[name] = distance([_first(call())], [want])
        except Exception as error:  # whatever a library says that it cannot
            missing[name] = f"{type(error).__name__}: {str(error)[:120]}"
            continue
        if errors[name] > WRONG[type_of(name)]:
            missing[name] = f"its answer is wrong, off by {errors[name]:.1e}"
        else:
            yield name, call
    of_rnnoise = model.kind == "rnnoise"
    if of_rnnoise:
        yield PRODUCTS, _products(inputs[0])
    for name, (pattern, dtype) in (OURS | (OF_RNNOISE if of_rnnoise else BLOCKS)).items():
        try:
            call, errors[name], alone = _ours(model, inputs, pattern, dtype)
        except TwofourError as error:
            missing[name] = str(error).splitlines()[0]
            continue
        if alone:
            missing[name] = f"torch's layer stays: {alone}"
        elif errors[name] > WRONG[dtype]:
            missing[name] = f"its answer is wrong, off by {errors[name]:.1e}"
        else:
            yield name, call


def type_of(name: str) -> str:
    """Return the computing type of a candidate, which its name ends in where it is coarser than float32."""
    return next((dtype for dtype in OF_TYPE if dtype in name), "float32")


def text_of(record: Record, name: str) -> str:
    """Return microseconds a step, and in brackets the time of the best float32 peer over it, then of its own type's."""
    if name not in record.timings:
        return "-"
    seconds, found = record.median(name), [record.baseline]
    if name.startswith("ours") and type_of(name) in OF_TYPE:
        found.append(tuple(peer for peer in OF_TYPE[type_of(name)] if peer in record.timings))
    ratios = (f"{min(map(record.median, peers)) / seconds:.2f}" for peers in found if peers)
    return f"{seconds * 1e6 / int(str(record.meta['tokens'])):.1f} ({', '.join(ratios)})"


def _first(answer: Any) -> Tensor:
    """Return the states of all steps, of whatever a runtime answers with."""
    return torch.as_tensor(answer[0]).float()


def _ours(model: nn.Module, inputs: tuple[Tensor, ...], pattern: str | None, dtype: str) -> tuple[Call, float, str]:
    """Return the compiled layer's call, how far off its own weights' answer it is, and why torch's stays, else ""."""
    given = copy.deepcopy(model)
    if pattern == RNNOISE:
        _prune_gates(given)
    elif pattern is not None:
        twofour.prune(given, pattern, skip=(), eligibility="any")
    fast = twofour.compile(given, inputs, dtype=dtype, graph=False, tokens=(1,))
    alone = next((layer.reason for layer in fast.plan.layers if layer.kernel == "torch"), "")
    with torch.inference_mode():
        off = distance([fast(*inputs)[0]], [given(*inputs)[0]])
    return partial(fast, *inputs), off, alone


def _prune_gates(model: nn.Module) -> None:
    """Keep the largest blocks of each gate, `GATES` of them."""
    plan = []
    for weight in walk(model, eligibility="any").weights:
        gates = weight.parameter.detach().chunk(len(GATES))
        kept = [
            parse(f"block:8x4@{1 - share:g}").project(gate, absolute=True)
            for gate, share in zip(gates, GATES, strict=True)
        ]
        keep = torch.cat(kept)
        plan.append((weight, keep, parse(f"block:8x4@{1 - keep.double().mean():g}")))
    masks.attach_all(plan)


def _products(x: Tensor) -> Call:
    """Return the call of two dense int8 products of a GRU's step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao.quantization import quantize_dynamic

        units = x.shape[-1]
        pair = nn.ModuleList([nn.Linear(units, 3 * units), nn.Linear(units, 3 * units)])
        first, second = quantize_dynamic(pair, {nn.Linear}, dtype=torch.qint8)
    row = x[0]
    return lambda: (first(row), second(row))


def _torch_int8(model: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao.quantization import quantize_dynamic

        return partial(quantize_dynamic(model, {nn.LSTM, nn.GRU}, dtype=torch.qint8), *inputs)


def _torch_bf16(model: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    return partial(copy.deepcopy(model).bfloat16(), *(x.bfloat16() for x in inputs))


def _onnx(model: nn.Module, inputs: tuple[Tensor, ...], int8: bool) -> Call:
    import onnxruntime as ort
    from onnxruntime.quantization import QuantType, quantize_dynamic

    names = [f"input{index}" for index in range(len(inputs))]
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "layer.onnx"
        torch.onnx.export(model, inputs, str(path), dynamo=False, input_names=names, opset_version=17, verbose=False)
        if int8:
            if len(inputs) == 2:
                raise NotImplementedError("dynamic quantisation takes LSTM and no GRU")
            quantize_dynamic(path, path.with_stem("int8"), weight_type=QuantType.QInt8, op_types_to_quantize=["LSTM"])
            path = path.with_stem("int8")
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {entry.name: tensor.numpy() for entry, tensor in zip(session.get_inputs(), inputs, strict=True)}
    return partial(session.run, None, feed)


def _openvino(model: nn.Module, inputs: tuple[Tensor, ...], precision: str = "f32") -> Call:
    import openvino as ov

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = ov.convert_model(model, example_input=inputs)
    made.reshape({index: list(tensor.shape) for index, tensor in enumerate(inputs)})
    settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}
    request = ov.Core().compile_model(made, "CPU", settings).create_infer_request()
    arrays: list[Any] = [tensor.numpy() for tensor in inputs]
    return partial(request.infer, arrays, share_inputs=True, share_outputs=True)


def show(records: Sequence[Record], console: Console) -> None:
    """Print a line per layer: microseconds a step of each candidate, and ours against the best float32 peer."""
    names = list(dict.fromkeys(name for record in records for name in record.timings))
    names = [name for name in names if not name.endswith("(again)")]
    table = headed(("layer", "units", "steps", *names))
    for record in records:
        facts = [str(record.meta[key]) for key in ("model", "shape", "tokens")]
        table.add_row(*facts, *(text_of(record, name) for name in names))
    console.print(
        "microseconds a step; the best float32 peer's time over it, then that of its own type", highlight=False
    )
    console.print(table)
    console.print(machine_line(records[-1]), highlight=False, markup=False, soft_wrap=True)
