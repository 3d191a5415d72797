"""The runtimes that a compiled model is compared with, each as a callable on fixed inputs, in this process.

Every builder takes a subject, a dtype and a thread count and returns a callable whose answer is the model's first
output, or raises `NotBuilt` with the reason. What a builder makes is kept alive by the callable.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from twofour.engines.quantized import quantize_onnx, quantize_openvino, quantize_torch

Array = np.ndarray[Any, Any]
Answer = Callable[[], "Tensor | Array"]
Session = Callable[[Sequence[Array]], Array]
"""A runtime's model, called with one array for each input."""
P = ParamSpec("P")
HINTS = {"float32": "f32", "bfloat16": "bf16", "int8": "f32", "int4": "f32"}


class Subject(Protocol):
    """A model and the inputs of one call; it answers with a tensor, or a tuple whose first entry is compared."""

    @property
    def model(self) -> nn.Module:
        """In evaluation mode, float32."""
        ...

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Its positional arguments."""
        ...


class NotBuilt(Exception):
    """This runtime has no such model in this precision; the message says why."""


def eager(subject: Subject, dtype: str, threads: int) -> Answer:
    """Torch as it is: float32, bfloat16, or its own weight-quantised Linear layers."""
    model, inputs = _in_torch(subject, dtype)
    return partial(first_output, model, inputs)


def eager_session(subject: Subject, dtype: str, threads: int) -> Callable[[tuple[Tensor, ...]], Tensor]:
    """As `eager`, for inputs that are given with each call, floats among them in that type."""
    return partial(first_output, _in_torch(subject, dtype)[0])


def inductor(subject: Subject, dtype: str, threads: int, *, freezing: bool = True) -> Answer:
    """torch.compile with freezing, which prepacks weights for oneDNN, or without."""
    if dtype not in ("float32", "bfloat16"):
        raise NotBuilt(f"torch.compile is not built for {dtype}: its quantisation moved to torchao")
    import torch._inductor.config as settings

    model, inputs = _in_torch(subject, dtype)
    torch._dynamo.reset()  # else the limit on recompilations counts the models before
    with settings.patch(freezing=freezing), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model)
        answer = partial(first_output, compiled, inputs)
        answer()
    return answer


def openvino_session(
    subject: Subject,
    dtype: str,
    threads: int,
    *,
    sparse_rate: float | None = None,
    weights: bool = False,
    free: tuple[int, ...] = (),
) -> Session:
    """OpenVINO with the precision hint of `dtype`; it would default to bfloat16 on this hardware.

    Args:
        subject: Model and inputs.
        dtype: int8 and int4 are quantised with nncf.
        threads: Its own threads, in one stream.
        sparse_rate: Share of zeros from which it keeps weights compressed and decompresses them while computing.
        weights: int8 of the weights alone, without calibration.
        free: Axes of every input whose sizes may differ from the example's; the others are static.
    """
    import openvino as ov  # pyright: ignore[reportMissingImports]

    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        model = ov.convert_model(subject.model, example_input=subject.inputs)
    model.reshape({index: _sizes(tensor, free) for index, tensor in enumerate(subject.inputs)})
    model = quantize_openvino(model, [subject.inputs], dtype, weights)
    settings: dict[str, object] = {
        "INFERENCE_PRECISION_HINT": HINTS[dtype],
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
    }
    if sparse_rate is not None:
        settings["CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE"] = sparse_rate
    request = ov.Core().compile_model(model, "CPU", settings).create_infer_request()
    return lambda arrays: request.infer(list(arrays), share_inputs=True, share_outputs=True)[0]


def onnxruntime_session(
    subject: Subject, dtype: str, threads: int, *, optimised: Path | None = None, free: tuple[int, ...] = ()
) -> Session:
    """ONNX Runtime's CPU provider on a graph exported by torch; int8 with its dynamic quantisation.

    Args:
        subject: Model and inputs.
        dtype: float32, int8 or int4.
        threads: Its own threads.
        optimised: Where to write the graph that it runs.
        free: Axes of every input, and of the output, whose sizes may differ from the example's.
    """
    import onnxruntime as ort

    if dtype == "bfloat16":
        raise NotBuilt("the CPU provider of ONNX Runtime has no bfloat16 MatMul")
    weights = sum(parameter.nbytes for parameter in subject.model.parameters())
    if weights > 1_900_000_000:
        raise NotBuilt(f"{weights / 1e9:.1f} GB of weights: a single ONNX file holds 2 GB")
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    if optimised is not None:
        options.optimized_model_filepath = str(optimised)
    with tempfile.TemporaryDirectory() as folder:
        path = quantize_onnx(export(subject, Path(folder) / "model.onnx", free), dtype)
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    places = {entry.name: int(entry.name.removeprefix("input")) for entry in session.get_inputs()}
    answer = session.get_outputs()[0].name
    return lambda arrays: np.asarray(session.run([answer], {name: arrays[at] for name, at in places.items()})[0])


def _on_inputs(session: Callable[Concatenate[Subject, P], Session]) -> Callable[Concatenate[Subject, P], Answer]:
    """Return the builder of a call on the subject's own inputs, from that of a session and with its arguments."""

    @wraps(session)
    def build(subject: Subject, /, *args: P.args, **options: P.kwargs) -> Answer:
        return partial(session(subject, *args, **options), arrays_of(subject.inputs))

    return build


openvino = _on_inputs(openvino_session)
"""As `openvino_session`, called on the subject's inputs."""

onnxruntime = _on_inputs(onnxruntime_session)
"""As `onnxruntime_session`, called on the subject's inputs."""


def arrays_of(inputs: Sequence[Tensor]) -> list[Array]:
    """Return tensors as the arrays that runtimes are called with."""
    return [tensor.contiguous().numpy() for tensor in inputs]


def _sizes(tensor: Tensor, free: tuple[int, ...]) -> list[int]:
    return [-1 if axis in free else size for axis, size in enumerate(tensor.shape)]


def export(subject: Subject, path: Path, free: tuple[int, ...] = ()) -> Path:
    """Write a subject as ONNX, its inputs named input0 and on, and return the path.

    Args:
        subject: Model and inputs.
        path: File to write.
        free: Axes of every input, and of the output, whose sizes may differ from the example's.
    """
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        names = [f"input{index}" for index in range(len(subject.inputs))]
        axes = {name: {axis: f"size{axis}" for axis in free} for name in (*names, "output")}
        options = {"input_names": names, "output_names": ["output"], "dynamic_axes": axes if free else None}
        torch.onnx.export(
            subject.model, subject.inputs, str(path), dynamo=False, opset_version=17, verbose=False, **options
        )
    return path


def _in_torch(subject: Subject, dtype: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    if dtype == "bfloat16":
        model = copy.deepcopy(subject.model).bfloat16()
        return model, tuple(t.bfloat16() if t.is_floating_point() else t for t in subject.inputs)
    return (subject.model if dtype == "float32" else quantize_torch(subject.model, dtype)), subject.inputs


def first_output(model: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Tensor:
    """Call a model of torch without gradients and return its answer, or the first entry of it."""
    with torch.inference_mode():
        output = model(*inputs)
    return output[0] if isinstance(output, tuple) else output
