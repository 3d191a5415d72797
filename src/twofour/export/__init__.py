"""Models to files and back, and to other tools' formats."""

from twofour.export.card import Accuracy
from twofour.export.file import Contents, read
from twofour.export.huggingface import to_huggingface
from twofour.export.onnx import to_onnx
from twofour.export.plain import to_safetensors
from twofour.export.runtime import to_runtime
from twofour.export.save_load import load, save

__all__ = ["Accuracy", "Contents", "load", "read", "save", "to_huggingface", "to_onnx", "to_runtime", "to_safetensors"]
