"""What a run of a model is made of: kernels, bytes of intermediates and their peak; of ours, Inductor, ONNX Runtime."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

from torch.profiler import ProfilerActivity, profile

from models import Subject
from twofour import engines
from twofour.compiler.graph_report import GraphReport

MOVES = {
    "Reshape",
    "Transpose",
    "ReorderInput",
    "ReorderOutput",
    "Squeeze",
    "Unsqueeze",
    "Flatten",
    "Identity",
    "Shape",
}
"""Nodes of ONNX Runtime that compute nothing."""

VIEWS = {
    "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "select", "slice", "narrow", "size",
    "split", "split_with_sizes", "chunk", "unbind", "getitem", "sym_size", "detach", "alias", "t",
}  # fmt: skip
"""Operators of torch that compute nothing where no copy is needed."""

KERNEL = re.compile(r"^\s+(?:\w+ = )?(?:cpp_fused\w*|cpp_\w*)\(")
EXTERN = re.compile(r"^\s+(?:\w+ = )?(?:extern_kernels\.\w+|torch\.ops\.(?!inductor\.)[\w.]+|aten\.[\w.]+)\(")
"""Calls in the text that Inductor writes: its own kernels, and those of others."""


def inductor_kernels(subject: Subject, *, freezing: bool) -> tuple[dict[str, int], engines.Answer]:
    """Compile with Inductor, once more; return its own kernels and those of others that one run calls, and the call."""
    from torch._inductor.graph import GraphLowering

    texts: list[str] = []
    with mock.patch.object(GraphLowering, "save_output_code", texts.append):
        call = engines.inductor(subject, "float32", 1, freezing=freezing)
    lines = [line for text in texts for line in text.partition("def call(")[2].splitlines()]
    own, others = (sum(bool(kind.match(line)) for line in lines) for kind in (KERNEL, EXTERN))
    return {"own": own, "others": others, "all": own + others}, call


def onnxruntime_kernels(subject: Subject) -> dict[str, int]:
    """Return the nodes of the graph that ONNX Runtime runs: all, and those that compute something."""
    import onnx

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "optimised.onnx"
        engines.onnxruntime(subject, "float32", 1, optimised=path)
        nodes = [node.op_type for node in onnx.load(str(path), load_external_data=False).graph.node]
    return {"nodes": len(nodes), "all": sum(name not in MOVES for name in nodes)}


def our_kernels(account: GraphReport) -> dict[str, int]:
    """Return the calls of a run, those of torch that make nothing left out, and the bytes between them."""
    calls = account.calls
    if calls is None or calls.reason:  # a Python program
        found = {entry.operator: entry.calls for entry in account.after}
        return {"all": sum(count for name, count in found.items() if name not in VIEWS)}
    return {
        "all": calls.native + calls.torch,
        "native": calls.native,
        "intermediate_bytes": calls.intermediate_bytes,
        "arena_bytes": calls.arena_bytes,
        "allocated_bytes": calls.allocated_bytes,
    }


def allocated(call: Callable[[], Any]) -> dict[str, int]:
    """Return the bytes that torch's allocator hands out during a call, and the most that is held at once."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    assert found.profiler is not None and found.profiler.kineto_results is not None
    sizes = [event.nbytes() for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    return {"bytes": sum(size for size in sizes if size > 0), "peak": max(accumulate(sizes), default=0)}
