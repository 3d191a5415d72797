"""engines: the other runtimes that are installed, each as one call of a model on fixed inputs."""

from twofour.engines.candidates import LARGEST_ERROR, Candidates, compare, reason_of, values_of
from twofour.engines.quantized import GROUP, int4_of_torch, quantize_onnx, quantize_openvino, quantize_torch
from twofour.engines.runtimes import (
    Answer,
    NotBuilt,
    Session,
    Subject,
    arrays_of,
    eager,
    eager_session,
    export,
    first_output,
    inductor,
    onnxruntime,
    onnxruntime_session,
    openvino,
    openvino_session,
)

EAGER, INDUCTOR, ORT, OPENVINO = "torch eager", "torch.compile", "ONNX Runtime", "OpenVINO"
"""Their names in records and tables."""

__all__ = [
    "EAGER",
    "GROUP",
    "INDUCTOR",
    "LARGEST_ERROR",
    "OPENVINO",
    "ORT",
    "Answer",
    "Candidates",
    "NotBuilt",
    "Session",
    "Subject",
    "arrays_of",
    "compare",
    "eager",
    "eager_session",
    "export",
    "first_output",
    "inductor",
    "int4_of_torch",
    "onnxruntime",
    "onnxruntime_session",
    "openvino",
    "openvino_session",
    "quantize_onnx",
    "quantize_openvino",
    "quantize_torch",
    "reason_of",
    "values_of",
]
