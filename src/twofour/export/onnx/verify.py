"""Does the exported graph compute what the model does: both run, on the example and on other batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from twofour.calls import Example, output_leaves
from twofour.errors import ExportError, cut
from twofour.measure.distance import largest_difference


def session(path: Path) -> Any:
    """Open a file in ONNX Runtime, on the CPU and one thread.

    Raises:
        ExportError: ONNX Runtime refuses the graph.
    """
    import onnxruntime  # pyright: ignore[reportMissingImports]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = max(1, torch.get_num_threads())
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors have no common base
        raise ExportError(
            "ONNX Runtime does not take the exported graph",
            got=cut(str(error).partition("\n")[0], 300),
            wanted="a graph that it runs on the CPU",
            remedy="an older `opset=`, or a newer onnxruntime",
        ) from error


def difference(runner: Any, model: nn.Module, example: Example, batch: int | None) -> float:
    """Return the largest difference between the outputs of both, relative to the largest output (at least 1).

    Args:
        runner: What `session` returned.
        model: The model, in evaluation mode.
        example: Its input.
        batch: Run on that many samples instead, the example's own repeated; None: on the example.

    Raises:
        ExportError: The graph does not run on the input, or answers with something else.
    """
    inputs = example if batch is None else resized(example, batch)
    want = [leaf for leaf in output_leaves(inputs.run(model)) if isinstance(leaf, Tensor)]
    tensors = [leaf for leaf in inputs.leaves if isinstance(leaf, Tensor)]
    names = [entry.name for entry in runner.get_inputs()]
    feed = dict(zip(names, tensors, strict=False))
    if set(names) <= {key for key, leaf in inputs.kwargs.items() if isinstance(leaf, Tensor)}:
        feed = {name: inputs.kwargs[name] for name in names}
    try:
        got = [torch.from_numpy(y) for y in runner.run(None, {name: x.numpy() for name, x in feed.items()})]
    except Exception as error:
        raise ExportError(
            "the exported graph does not run",
            got=f"{cut(str(error).partition(chr(10))[0], 300)}, inputs {_shapes(feed.values())}",
            wanted="outputs in ONNX Runtime for any batch",
            remedy="dynamic=False, where the model is for one batch only",
        ) from error
    if [tuple(y.shape) for y in got] != [tuple(y.shape) for y in want]:
        raise ExportError(
            "the exported graph answers with other shapes", got=_shapes(got), wanted=_shapes(want), remedy="report it"
        )
    return largest_difference([y.to(other.dtype) for y, other in zip(got, want, strict=True)], want, least=1.0)


def resized(example: Example, batch: int) -> Example:
    """Return the example with `batch` samples: its own, again and again."""
    size = batch_of(example)
    order = torch.arange(batch, device="cpu") % max(size or 1, 1)
    return example.map(lambda leaf: leaf[order] if is_batched(leaf, size) else leaf)


def batch_of(example: Example) -> int | None:
    """Return the length of the first axis of the first tensor that has axes."""
    return next((len(leaf) for leaf in example.leaves if isinstance(leaf, Tensor) and leaf.ndim), None)


def is_batched(leaf: Any, size: int | None) -> bool:
    """Whether a value's first axis counts samples."""
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == size


def _shapes(tensors: Sequence[Tensor] | Any) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
