"""ONNX files with 2:4 zeros in ONNX Runtime, run by this package's kernels: an execution provider in libtwofour."""

from twofour.export.onnxruntime.provider import NAME, add_provider, register

__all__ = ["NAME", "add_provider", "register"]
