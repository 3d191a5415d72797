"""Where weights to check come from: modules, safetensors files, Hugging Face folders, ONNX files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from twofour.checker.sources.files import checkpoint_weights
from twofour.checker.sources.models import weights_of
from twofour.checker.sources.onnx import onnx_weights
from twofour.checker.weights import Expectation, Skipped, Weight
from twofour.checkpoints.checkpoint import remedy_for
from twofour.errors import FormatError, LayerError
from twofour.files import kind_of

__all__ = ["weights_in", "weights_of"]


def weights_in(
    path: Path, expectation: Expectation, include: Sequence[str], axes: Mapping[str, int]
) -> tuple[list[Weight], Skipped]:
    """Collect the weights of a file or folder to check, and the other tensors with their reasons.

    Raises:
        FormatError: It is of no kind that can be read, or malformed.
        LayerError: A glob or a promise names what is not there.
        SourceError: A package is missing, or the folder's model cannot be made.
    """
    if path.suffix == ".onnx" and not path.is_dir():
        if axes:
            raise LayerError(
                "`axes` is for bare files of weights", got=str(path), wanted="no `axes`: its nodes tell the axes"
            )
        return onnx_weights(path, expectation, include)
    if not path.is_dir() and path.suffix != ".safetensors":
        raise FormatError(
            f"{path} is not a kind of file that can be checked",
            got=kind_of(path) if path.exists() else "no such file or folder",
            wanted="a .safetensors or .onnx file, or a folder with config.json and .safetensors files",
            remedy=remedy_for(path, "a .safetensors or .onnx file, or a Hugging Face folder"),
        )
    return checkpoint_weights(path, expectation, include, axes)
