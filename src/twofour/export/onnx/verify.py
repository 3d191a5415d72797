"""Does the exported graph compute what the model does: both run, on the example and on other batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from twofour import calls
from twofour.errors import ExportError, cut


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


def difference(runner: Any, model: nn.Module, example: Any, batch: int | None) -> float:
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
    want = [leaf for leaf in output_leaves(call(model, calls.fresh(inputs))) if isinstance(leaf, Tensor)]
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    names = [entry.name for entry in runner.get_inputs()]
    feed = dict(zip(names, tensors, strict=False))
    if isinstance(inputs, dict) and set(names) <= {key for key, leaf in inputs.items() if isinstance(leaf, Tensor)}:
        feed = {name: inputs[name] for name in names}
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
    return max((_distance(y, other) for y, other in zip(got, want, strict=True)), default=0.0)


def call(model: nn.Module, example: Any) -> Any:
    """Run a model on an example."""
    if isinstance(example, dict):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def output_leaves(output: Any) -> list[Any]:
    """Return the values of an output in their order, those of dataclasses and of nested structures included."""
    leaves = tree_leaves(output, is_leaf=is_dataclass)
    return [
        leaf
        for found in leaves
        for leaf in (output_leaves([getattr(found, f.name) for f in fields(found)]) if is_dataclass(found) else [found])
    ]


def resized(example: Any, batch: int) -> Any:
    """Return the example with `batch` samples: its own, again and again."""
    size = batch_of(example)
    order = torch.arange(batch, device="cpu") % max(size or 1, 1)
    return tree_map(lambda leaf: leaf[order] if is_batched(leaf, size) else leaf, example)


def batch_of(example: Any) -> int | None:
    """Return the length of the first axis of the first tensor that has axes."""
    return next((len(leaf) for leaf in tree_leaves(example) if isinstance(leaf, Tensor) and leaf.ndim), None)


def is_batched(leaf: Any, size: int | None) -> bool:
    """Whether a value's first axis counts samples."""
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == size


def _distance(got: Tensor, want: Tensor) -> float:
    if not want.numel():
        return 0.0
    if not want.is_floating_point():
        return float(not torch.equal(got.to(want.dtype), want))
    got, want = got.double(), want.double()
    same = (got == want) | (got.isnan() & want.isnan())  # infinities of a mask
    off = torch.where(same, torch.zeros_like(want), (got - want).abs())
    size = (
        want[want.isfinite()].abs().max()
        if want.isfinite().any()
        else torch.ones((), dtype=torch.float32, device="cpu")
    )
    worst = float(off.max() / size.clamp(min=1.0))
    return worst if worst == worst else float("inf")


def _shapes(tensors: Sequence[Tensor] | Any) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
