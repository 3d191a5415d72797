"""Models: what users run, in every runtime there is, in one process and interleaved.

Three figures per cell, apart: our dense compile over a peer, our sparse compile over our dense one, the product. The
runtimes are given the dense weights and are compared with torch's answer; the 2:4 model, and OpenVINO with its own
sparse weight decompression, are compared with torch's answer for the pruned weights.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

import twofour
from cases import peers
from models import BUILDERS, Subject
from twofour import measure
from twofour.errors import DataError, TwofourError
from twofour.measure import Record

EAGER, INDUCTOR, ORT, OPENVINO = "torch eager", "torch.compile", "ONNX Runtime", "OpenVINO"
OPENVINO_SPARSE = "OpenVINO, sparse weights"
PEERS = (EAGER, INDUCTOR, ORT, OPENVINO, OPENVINO_SPARSE)
DENSE, SPARSE = "twofour dense", "twofour 2:4"
SPARSE_RATE = 0.49
"""OpenVINO decompresses weights with at least this share of zeros while it computes; 2:4 has 0.5."""
LARGEST_ERROR = {"float32": 1e-3, "bfloat16": 0.1}
"""Relative to torch in float32, in norm; int8 and int4 differ by what their quantisation costs, which is recorded."""


Builders: TypeAlias = dict[str, tuple[Callable[[], Callable[[], Any]], np.ndarray]]
"""Candidate -> what builds it, and the answer that it must give."""


@dataclass
class Side:
    """The candidates of one cell while they are built."""

    calls: dict[str, Callable[[], Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    plans: dict[str, str] = field(default_factory=dict)
    accounts: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, build: Callable[[], Callable[[], Any]], reference: np.ndarray, dtype: str) -> None:
        """Build a candidate and compare its answer; a failure becomes a reason."""
        try:
            call = build()
            error = _distance(call(), reference)
        except (peers.NotBuilt, TwofourError, ImportError) as error:
            self.missing[name] = _reason(error)
            return
        except Exception as error:  # a peer's own failure is a finding about the peer, not an end of the run
            self.missing[name] = f"{type(error).__name__}: {_reason(error)}"
            return
        if error > LARGEST_ERROR.get(dtype, float("inf")) or error != error:
            self.missing[name] = f"wrong: relative error {error:.1e}"
            return
        self.calls[name], self.errors[name] = call, error


def cells(models: Sequence[str], dtype: str, batches: Sequence[int], threads: Sequence[int]) -> list[dict[str, object]]:
    """List the cells; decoding and images are measured at batch 1 alone.

    Raises:
        DataError: There is no such model.
    """
    for name in models:
        if name not in BUILDERS:
            raise DataError(f"there is no model {name!r}", got=name, wanted=f"one of {', '.join(BUILDERS)}")
    return [
        {"case": "models", "model": name, "dtype": dtype, "batch": batch, "threads": count}
        for name in models
        for batch in batches
        for count in threads
        if batch == 1 or BUILDERS[name].__module__.endswith("encoder")
    ]


class Bench:
    """Measures cells, keeping the model it is at."""

    def __init__(self, seconds: float, without: Sequence[str] = ()) -> None:
        self.seconds, self.without = seconds, without
        self.builders: Mapping[str, Callable[[int], Subject]] = BUILDERS
        self.at: tuple[object, ...] = ()
        self.subject: Subject | None = None
        self.pruned: Subject | None = None

    def __call__(self, cell: dict[str, object]) -> Record:
        """Measure one cell."""
        name, batch, threads = str(cell["model"]), int(str(cell["batch"])), int(str(cell["threads"]))
        if self.at != (name, batch):
            self.subject = self.pruned = None
            gc.collect()
            self.subject = self.builders[name](batch)
            self.pruned = replace(self.subject, model=self.prune(self.subject))
            self.at = (name, batch)
        assert self.subject and self.pruned
        torch.set_num_threads(threads)
        side = self.build(self.subject, self.pruned, str(cell["dtype"]), threads)
        facts = {
            **cell,
            **self.facts(self.subject, side),
            "note": self.subject.note,
            "tokens_per_call": self.subject.tokens,
            "missing": side.missing,
            "errors": side.errors,
            "plans": side.plans,
        }
        alone = threads == 1 and all(_on_this_thread(call) for call in side.calls.values())
        return measure.compare(
            side.calls,
            baseline=tuple(name for name in side.calls if name in PEERS),
            seconds=self.seconds,
            repeats=40,
            threads=threads,
            clock="thread" if alone else "wall",
            pin=threads == 1,
            noise=True,
            meta=facts,
        )

    def build(self, subject: Subject, pruned: Subject, dtype: str, threads: int) -> Side:
        """Build what is timed."""
        side = Side()
        dense, sparse = (numpy_of(peers.eager(entry, "float32", threads)()) for entry in (subject, pruned))
        builders: Builders = {
            EAGER: (partial(peers.eager, subject, dtype, threads), dense),
            INDUCTOR: (partial(peers.inductor, subject, dtype, threads), dense),
            ORT: (partial(peers.onnxruntime, subject, dtype, threads), dense),
            OPENVINO: (partial(peers.openvino, subject, dtype, threads), dense),
            OPENVINO_SPARSE: (partial(peers.openvino, pruned, dtype, threads, sparse_rate=SPARSE_RATE), sparse),
            **self.ours(side, subject, dtype, dense),
            **self.ours_pruned(side, pruned, dtype, sparse),
        }
        self.add(side, builders, dtype)
        return side

    def add(self, side: Side, builders: Builders, dtype: str) -> None:
        """Build all candidates but those that are left out."""
        for name, (build, reference) in builders.items():
            if name in self.without:
                side.missing[name] = "left out by --without"
            else:
                side.add(name, build, reference, dtype)

    def prune(self, subject: Subject) -> torch.nn.Module:
        """Return the 2:4 model."""
        return twofour.prune(copy.deepcopy(subject.model), "2:4", skip=subject.skip).eval().requires_grad_(False)

    def ours(self, side: Side, subject: Subject, dtype: str, reference: np.ndarray) -> Builders:
        """Return what is built of the dense model by us."""
        return {DENSE: (partial(compiled, side, DENSE, subject, dtype), reference)}

    def ours_pruned(self, side: Side, pruned: Subject, dtype: str, reference: np.ndarray) -> Builders:
        """Return what is built of the 2:4 model by us."""
        return {SPARSE: (partial(compiled, side, SPARSE, pruned, dtype), reference)}

    def facts(self, subject: Subject, side: Side) -> dict[str, object]:
        """Return what else the record says of a cell."""
        return {}


def compiled(
    side: Side, name: str, subject: Subject, dtype: str, *, graph: bool | str = True, **options: Any
) -> Callable[[], Any]:
    """Compile for this number of tokens as a graph, else layer by layer with the reason beside it."""
    compiling = partial(twofour.compile, subject.model, subject.inputs, dtype, tokens=(subject.tokens,), **options)
    try:
        fast = compiling(graph=graph)
    except TwofourError as error:
        side.missing[f"{name}, graph"] = _reason(error)
        fast = compiling(graph=False)
    side.plans[name], side.accounts[name] = str(fast.plan), fast.plan.account
    return partial(peers.first_output, fast, subject.inputs)


def _on_this_thread(call: Callable[[], Any]) -> bool:
    """Whether a runtime computes on the calling thread, so that this thread's clock sees all of it."""
    call()
    thread, process = time.thread_time(), time.process_time()
    call()
    return time.thread_time() - thread >= 0.9 * (time.process_time() - process)


def numpy_of(answer: Any) -> np.ndarray:
    """Return an answer as an array of float32."""
    return answer.float().numpy() if isinstance(answer, torch.Tensor) else np.array(answer, dtype=np.float32)


def _distance(answer: Any, reference: np.ndarray) -> float:
    found = numpy_of(answer)
    if found.shape != reference.shape:
        return float("nan")
    return float(np.linalg.norm((found - reference).ravel()) / np.linalg.norm(reference.ravel()))


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:300] or type(error).__name__
