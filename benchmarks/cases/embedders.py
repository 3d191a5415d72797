"""A SentenceTransformer in every runtime: the encoder inside it is exchanged, tokenising and pooling stay its own.

sentence-transformers' own ONNX and OpenVINO backends go through optimum, which wants transformers 4; here the same
graphs are exported by torch, quantised by the runtimes' own tools, and called as those backends do.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models import Subject
from models.encoder import LastHidden
from twofour.engines import export, quantize_onnx, quantize_openvino

Run = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Token ids and mask (batch, length), int64 -> hidden states (batch, length, width)."""

CALIBRATION = 300
"""Sentences that OpenVINO's int8 is calibrated on: as many as sentence-transformers takes."""


class Exchanged(nn.Module):
    """A runtime in the place of the encoder of a SentenceTransformer.

    Args:
        encoder: The model of transformers; its configuration is kept, its weights are not.
        run: Calls the runtime.
    """

    def __init__(self, encoder: Any, run: Run) -> None:
        super().__init__()
        self.config, self.run = encoder.config, run

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        """Return the last hidden states, float32."""
        from transformers.modeling_outputs import BaseModelOutput

        found = self.run(input_ids.numpy(), attention_mask.numpy())
        return BaseModelOutput(last_hidden_state=torch.from_numpy(found))  # pyright: ignore[reportArgumentType]


def loaded(folder: Path, config: Any = None) -> Any:
    """Return the SentenceTransformer of a folder, on the CPU; `config` is a TwoFourConfig."""
    from sentence_transformers import SentenceTransformer

    given = {} if config is None else {"model_kwargs": {"quantization_config": config}}
    return SentenceTransformer(str(folder), device="cpu", local_files_only=True, **given)


@dataclass(frozen=True)
class Setting:
    """What every engine is built from.

    Attributes:
        folder: The dense sentence-transformers folder.
        threads: Threads of the runtime.
        sentences: Of the training split, for static int8.
    """

    folder: Path
    threads: int
    sentences: Sequence[str]


def eager(setting: Setting, dtype: str) -> Any:
    """Return it in torch as it is."""
    return loaded(setting.folder).to(getattr(torch, dtype))


def onnxruntime(setting: Setting, dtype: str) -> Any:
    """Return it with ONNX Runtime's CPU provider inside; int8 is its dynamic quantisation."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = setting.threads, 1
    made = loaded(setting.folder)
    with tempfile.TemporaryDirectory() as place:
        path = export(_subject(made), Path(place) / "model.onnx", free=(0, 1))
        session = ort.InferenceSession(quantize_onnx(path, dtype), options, providers=["CPUExecutionProvider"])

    def run(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return session.run(["output"], {"input0": ids, "input1": mask})[0]

    return _exchanged(made, run)


def openvino(setting: Setting, dtype: str) -> Any:
    """Return it with OpenVINO inside; int8 is static, by nncf, from sentences of the training split."""
    import openvino as ov

    made = loaded(setting.folder)
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        subject = _subject(made)
        model = ov.convert_model(subject.model, example_input=subject.inputs)
    samples = [_tokens(made, [text]) for text in setting.sentences[:CALIBRATION]]
    model = quantize_openvino(model, samples, dtype)
    hint = "bf16" if dtype == "bfloat16" else "f32"
    settings = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": setting.threads, "NUM_STREAMS": 1}
    request = ov.Core().compile_model(model, "CPU", settings).create_infer_request()

    def run(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return np.array(request.infer([ids, mask], share_inputs=True)[0], dtype=np.float32)

    return _exchanged(made, run)


def _place(made: Any) -> str:
    """Return the name under which sentence-transformers holds the encoder, 6 as `model`, 5 as `auto_model`."""
    return "model" if "model" in made[0]._modules else "auto_model"


def _exchanged(made: Any, run: Run) -> Any:
    """Put the runtime there; return it."""
    setattr(made[0], _place(made), Exchanged(getattr(made[0], _place(made)), run))
    return made


def _subject(made: Any) -> Subject:
    inputs = _tokens(made, ["a short sentence", "a sentence that is longer than the first one"])
    model = LastHidden(getattr(made[0], _place(made))).eval().requires_grad_(False)
    return Subject("embedder", "", model, inputs, len(inputs[0]), inputs[0].numel())


def _tokens(made: Any, sentences: Sequence[str]) -> tuple[Tensor, Tensor]:
    found = made.tokenizer(list(sentences), padding=True, truncation=True, return_tensors="pt")
    return found["input_ids"], found["attention_mask"]
