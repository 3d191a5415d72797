"""Plain dense safetensors: every tensor under its own name, zeros included, as any tool reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch import Tensor, nn

from twofour import masks
from twofour.checkpoints import describe, write_tensors
from twofour.compiler.replaceable import require_plain
from twofour.errors import FormatError
from twofour.export.kept import require_kept, warn_dense
from twofour.files import named, replacing, writing


def to_safetensors(model: nn.Module, path: str | os.PathLike[str]) -> list[str]:
    """Write a masked model's state dict; tied tensors stand under each of their names.

    The metadata says which weights are sparse (`twofour.patterns`), for `twofour check` and `twofour.load`; every
    other reader sees a usual file. A model without masks is written too, and a warning says that nothing is sparse.

    Returns:
        The names of the sparse weights.

    Raises:
        CompileError: The model is compiled already.
        ExportError: A weight does not keep its mask's pattern.
        FormatError: The file cannot be written.
    """
    path = named(path, FormatError)
    require_plain(model)
    require_kept(model)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    found = masks.of(model)
    patterns = {name: mask.pattern.name for name, mask in found.items()}
    if not patterns:
        warn_dense(path)
    write_plain(path, tensors, patterns, {name: mask.axis.axis for name, mask in found.items()})
    return list(patterns)


def write_plain(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    patterns: Mapping[str, str],
    axes: Mapping[str, int],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write named tensors, and which of them are sparse along which axis.

    Raises:
        FormatError: The file cannot be written.
    """
    with writing(path, FormatError), replacing(path) as temporary:
        write_tensors(temporary, tensors, {"format": "pt", **(metadata or {}), **describe(patterns, axes)})
