"""One process of the case `peak`: a model in one runtime, and the most bytes that it holds while it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import twofour
from cases.memory import resident, trim
from models import Subject
from models.fusion import FUSION
from twofour import engines

RUNS = 3
Prepared = Callable[[], Any]


def export(model: str, folder: Path) -> int:
    """Write a model as ONNX and its inputs as arrays; return the bytes of its weights."""
    subject = FUSION[model]()
    engines.export(subject, folder / "model.onnx")
    np.savez(folder / "inputs.npz", *(tensor.contiguous().numpy() for tensor in subject.inputs))
    return sum(parameter.nbytes for parameter in subject.model.parameters())


def eager(model: str, folder: Path) -> Callable[[], Prepared]:
    """Return what builds the model in torch."""
    FUSION[model]()  # imports what it is made of

    def build() -> Prepared:
        subject = FUSION[model]()
        return partial(engines.first_output, subject.model, subject.inputs)

    return build


def onnxruntime(model: str, folder: Path) -> Callable[[], Prepared]:
    """Return what loads the file in ONNX Runtime's CPU provider."""
    import onnxruntime as ort

    arrays = _arrays(folder)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1

    def build() -> Prepared:
        session = ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
        feed = {f"input{index}": array for index, array in enumerate(arrays)}
        return partial(session.run, None, {entry.name: feed[entry.name] for entry in session.get_inputs()})

    return build


def openvino(model: str, folder: Path) -> Callable[[], Prepared]:
    """Return what loads the file in OpenVINO, float32 on one thread."""
    import openvino as ov

    arrays, core = _arrays(folder), ov.Core()
    hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}

    def build() -> Prepared:
        request = core.compile_model(core.read_model(folder / "model.onnx"), "CPU", hints).create_infer_request()
        return partial(request.infer, arrays, share_inputs=True, share_outputs=True)

    return build


def dense(model: str, folder: Path) -> Callable[[], Prepared]:
    """Return what compiles the model; what was given is freed."""
    return _compiled(model, lambda subject: None)


def sparse(model: str, folder: Path) -> Callable[[], Prepared]:
    """Return what prunes the model to 2:4 and compiles it."""
    return _compiled(model, lambda subject: twofour.prune(subject.model, "2:4", skip=subject.skip))


RUNTIMES = {
    "torch eager": eager,
    "ONNX Runtime": onnxruntime,
    "OpenVINO": openvino,
    "twofour dense": dense,
    "twofour 2:4": sparse,
}


def peak(build: Callable[[], Prepared]) -> int:
    """Return the most bytes that are held while the model runs, beyond those before it was built."""
    trim()
    empty = resident()
    call = build()
    for _ in range(RUNS):
        call()
    trim()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew: proc_pid_clear_refs(5)
    for _ in range(RUNS):
        call()
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024 - empty


def _compiled(model: str, change: Callable[[Subject], object]) -> Callable[[], Prepared]:
    FUSION[model]()  # imports what it is made of
    small = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)).eval()
    engines.first_output(twofour.compile(small, torch.randn(8, 64)), (torch.randn(8, 64),))  # code that is loaded once

    def build() -> Prepared:
        subject = FUSION[model]()
        change(subject)
        fast = twofour.compile(subject.model, subject.inputs, tokens=(subject.tokens,))
        return partial(engines.first_output, fast, subject.inputs)

    return build


def _arrays(folder: Path) -> list[np.ndarray]:
    return list(np.load(folder / "inputs.npz").values())


def main(task: str, model: str, folder: str) -> int:
    """Do what the parent asks for."""
    torch.set_num_threads(1)
    return export(model, Path(folder)) if task == "export" else peak(RUNTIMES[task](model, Path(folder)))


if __name__ == "__main__":
    print(main(*sys.argv[1:4]))
