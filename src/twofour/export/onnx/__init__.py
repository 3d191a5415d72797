"""Masked models to ONNX: weights where runtimes look for 2:4, proved equal in ONNX Runtime."""

from twofour.export.onnx.weights import SparseWeight
from twofour.export.onnx.write import OPSET, Exported, to_onnx

__all__ = ["OPSET", "Exported", "SparseWeight", "to_onnx"]
