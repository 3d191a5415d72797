"""One process of the case `peak`: a model in one runtime, what it holds after calls, and the most in a call."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import twofour
from cases.memory import resident, trim
from models.memory import MEMORY
from twofour import engines
from twofour.engines import NotBuilt, quantized, runtimes

RUNS = 20
EXPORT, CONVERT = "export", "convert"
TYPES = ("float32", "bfloat16", "int8")
Prepared = Callable[[], Any]


def export(model: str, dtype: str, folder: Path) -> int:
    """Write a model as ONNX has it, in its type, and its inputs; return the bytes of its weights."""
    subject = MEMORY[model]()
    whole = engines.export(subject, folder / "model.onnx")
    np.savez(folder / "inputs.npz", *(tensor.contiguous().numpy() for tensor in subject.inputs))
    if dtype == "int8":
        quantized.quantize_onnx(whole, dtype).replace(_onnx(folder))
    else:
        whole.replace(_onnx(folder))
    return sum({id(one): one.nbytes for one in subject.model.parameters()}.values())


def convert(model: str, dtype: str, folder: Path) -> None:
    """Write a model as OpenVINO's own file, static in its sizes, whose weights it maps when it reads it."""
    import openvino as ov

    subject = MEMORY[model]()
    with torch.inference_mode():
        converted = ov.convert_model(subject.model, example_input=subject.inputs)
    converted.reshape({index: list(tensor.shape) for index, tensor in enumerate(subject.inputs)})
    converted = quantized.quantize_openvino(converted, [subject.inputs], dtype)
    ov.save_model(converted, folder / "model.xml", compress_to_fp16=False)


def _onnx(folder: Path) -> Path:
    return folder / "served.onnx"


def eager(model: str, dtype: str, folder: Path) -> Callable[[], Prepared]:
    """Return what builds the model in torch; of int8 it has its dynamic Linears."""
    MEMORY[model]()  # imports what it is made of

    def build() -> Prepared:
        return runtimes.eager(MEMORY[model](), dtype, 1)

    return build


def onnxruntime(model: str, dtype: str, folder: Path) -> Callable[[], Prepared]:
    """Return what loads the file in ONNX Runtime's CPU provider."""
    import onnxruntime as ort

    if dtype == "bfloat16":
        raise NotBuilt("the CPU provider of ONNX Runtime has no bfloat16 MatMul")
    arrays = _arrays(folder)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1

    def build() -> Prepared:
        session = ort.InferenceSession(str(_onnx(folder)), options, providers=["CPUExecutionProvider"])
        feed = {f"input{index}": array for index, array in enumerate(arrays)}
        return partial(session.run, None, {entry.name: feed[entry.name] for entry in session.get_inputs()})

    return build


def openvino(model: str, dtype: str, folder: Path) -> Callable[[], Prepared]:
    """Return what loads its own file in OpenVINO, on one thread."""
    import openvino as ov

    arrays, core = _arrays(folder), ov.Core()
    hint = runtimes.HINTS[dtype]
    hints = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}

    def build() -> Prepared:
        request = core.compile_model(core.read_model(folder / "model.xml"), "CPU", hints).create_infer_request()
        return partial(request.infer, arrays, share_inputs=True, share_outputs=True)

    return build


def compiled(model: str, dtype: str, folder: Path, *, sparse: bool) -> Callable[[], Prepared]:
    """Return what compiles the model, dense or pruned to 2:4; what was given is freed."""
    _warm(model, dtype)

    def build() -> Prepared:
        subject = MEMORY[model]()
        if sparse:
            twofour.prune(subject.model, "2:4", criterion="magnitude", skip=subject.skip)
        fast = twofour.compile(subject.model, subject.inputs, dtype, progress=False)
        return _Served(fast, subject.inputs)

    return build


def loaded(model: str, dtype: str, folder: Path, *, sparse: bool) -> Callable[[], Prepared]:
    """Return what loads the file that `save` wrote of the compiled model."""
    _warm(model, dtype)

    def build() -> Prepared:
        subject = MEMORY[model]()
        return _Served(twofour.load(_file(folder, sparse), subject.model), subject.inputs)

    return build


def _file(folder: Path, sparse: bool) -> Path:
    return folder / f"{'sparse' if sparse else 'dense'}.safetensors"


class _Served:
    """A model of ours and its inputs, without gradients, as a server calls it."""

    def __init__(self, model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self.model, self.inputs = model, inputs

    def __call__(self) -> torch.Tensor:
        with torch.inference_mode():
            return engines.first_output(self.model, self.inputs)


RUNTIMES: dict[str, Callable[[str, str, Path], Callable[[], Prepared]]] = {
    "torch eager": eager,
    "ONNX Runtime": onnxruntime,
    "OpenVINO": openvino,
    "twofour dense": partial(compiled, sparse=False),
    "twofour 2:4": partial(compiled, sparse=True),
    "twofour dense, loaded": partial(loaded, sparse=False),
    "twofour 2:4, loaded": partial(loaded, sparse=True),
}


def grown(build: Callable[[], Prepared]) -> tuple[int, int, list[float], Prepared]:
    """Return what is held once calls were served, the most in a further one, beyond what was held before, and times."""
    trim()
    empty = resident()
    call = build()
    seconds: list[float] = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    held = resident() - empty
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew: proc_pid_clear_refs(5)
    call()
    most = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024 - empty
    return held, most, seconds, call


def _warm(model: str, dtype: str) -> None:
    """Load once what is loaded once: the model's own code and ours, of compiling and of files."""
    MEMORY[model]()
    small, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)).eval(), torch.randn(8, 64)
    with tempfile.TemporaryDirectory() as folder:
        twofour.save(twofour.compile(small, x, dtype, progress=False), Path(folder) / "m.safetensors")
        engines.first_output(twofour.load(Path(folder) / "m.safetensors", small), (x,))


def _arrays(folder: Path) -> list[np.ndarray]:
    return list(np.load(folder / "inputs.npz").values())


def main(task: str, model: str, dtype: str, folder: str) -> object:
    """Do what the parent asks for; nothing where a runtime has no such model."""
    torch.set_num_threads(1)
    if task in (EXPORT, CONVERT):
        return (export if task == EXPORT else convert)(model, dtype, Path(folder))
    try:
        build = RUNTIMES[task](model, dtype, Path(folder))
    except NotBuilt:
        return None
    held, most, seconds, call = grown(build)
    if isinstance(call, _Served):
        path = _file(Path(folder), "2:4" in task)
        if not path.exists():
            twofour.save(call.model, path)
    return held, most, seconds


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:5])))
