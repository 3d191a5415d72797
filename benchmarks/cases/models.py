"""Models: what users run, in every runtime there is, in one process and interleaved.

Three figures per cell, apart: our dense compile over a peer, our sparse compile over our dense one, the product. The
runtimes are given the dense weights and are compared with torch's answer; the 2:4 model, and OpenVINO with its own
sparse weight decompression, are compared with torch's answer for the pruned weights.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

import twofour
from models import BUILDERS, Subject
from twofour import engines
from twofour.engines import EAGER, INDUCTOR, OPENVINO, ORT, values_of
from twofour.errors import DataError, TwofourError
from twofour.measure import Record

OPENVINO_SPARSE = "OpenVINO, sparse weights"
PEERS = (EAGER, INDUCTOR, ORT, OPENVINO, OPENVINO_SPARSE)
DENSE, SPARSE = "twofour dense", "twofour 2:4"
DENSE_STATIC, SPARSE_STATIC = "twofour dense, static", "twofour 2:4, static"
"""int8 with ranges of the data: of the inputs that are timed, on which OpenVINO's are calibrated; others have one for
each token."""
SPARSE_RATE = 0.49
"""OpenVINO decompresses weights with at least this share of zeros while it computes; 2:4 has 0.5."""

Builders: TypeAlias = dict[str, tuple[Callable[[], Callable[[], Any]], np.ndarray]]
"""Candidate -> what builds it, and the answer that it must give."""


@dataclass
class Side(engines.Candidates):
    """The candidates of one cell while they are built, and of ours the plans."""

    plans: dict[str, str] = field(default_factory=dict)
    accounts: dict[str, Any] = field(default_factory=dict)


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
        threads, at = int(str(cell["threads"])), tuple(cell.get(name) for name in ("model", "batch", "tokens"))
        if self.at != at:
            self.subject = self.pruned = None
            gc.collect()
            self.subject = self.make(cell)
            self.pruned = replace(self.subject, model=self.prune(self.subject))
            self.at = at
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
        baseline = [name for name in side.calls if name in PEERS]
        return engines.compare(side.calls, baseline, threads, self.seconds, facts)

    def make(self, cell: dict[str, object]) -> Subject:
        """Build the model of a cell with its inputs."""
        return self.builders[str(cell["model"])](int(str(cell["batch"])))

    def build(self, subject: Subject, pruned: Subject, dtype: str, threads: int) -> Side:
        """Build what is timed."""
        side = Side()
        dense, sparse = (values_of(engines.eager(entry, "float32", threads)()) for entry in (subject, pruned))
        peers = self.peers(subject, pruned, dtype, threads)
        builders: Builders = {
            **{name: (build, sparse if name == OPENVINO_SPARSE else dense) for name, build in peers.items()},
            **self.ours(side, subject, dtype, dense),
            **self.ours_pruned(side, pruned, dtype, sparse),
        }
        self.add(side, builders, dtype)
        return side

    def peers(self, subject: Subject, pruned: Subject, dtype: str, threads: int) -> dict[str, Callable[[], Any]]:
        """Return what builds the other runtimes."""
        return {
            EAGER: partial(engines.eager, subject, dtype, threads),
            INDUCTOR: partial(engines.inductor, subject, dtype, threads),
            ORT: partial(engines.onnxruntime, subject, dtype, threads),
            OPENVINO: partial(engines.openvino, subject, dtype, threads),
            OPENVINO_SPARSE: partial(engines.openvino, pruned, dtype, threads, sparse_rate=SPARSE_RATE),
        }

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
        return both_ranges(side, (DENSE, DENSE_STATIC), subject, dtype, reference)

    def ours_pruned(self, side: Side, pruned: Subject, dtype: str, reference: np.ndarray) -> Builders:
        """Return what is built of the 2:4 model by us."""
        return both_ranges(side, (SPARSE, SPARSE_STATIC), pruned, dtype, reference)

    def facts(self, subject: Subject, side: Side) -> dict[str, object]:
        """Return what else the record says of a cell."""
        return {}


def both_ranges(side: Side, names: tuple[str, str], subject: Subject, dtype: str, reference: np.ndarray) -> Builders:
    """Return a model compiled by us, in int8 also with static ranges, under these names."""
    first, static = names
    found: Builders = {first: (partial(compiled, side, first, subject, dtype), reference)}
    if dtype == "int8":
        found[static] = (partial(compiled, side, static, subject, dtype, data=[subject.inputs]), reference)
    return found


def compiled(
    side: Side, name: str, subject: Subject, dtype: str, *, graph: bool | str = True, **options: Any
) -> Callable[[], Any]:
    """Compile for this number of tokens as a graph, else layer by layer with the reason beside it."""
    compiling = partial(twofour.compile, subject.model, subject.inputs, dtype, tokens=(subject.tokens,), **options)
    try:
        fast = compiling(graph=graph)
    except TwofourError as error:
        side.missing[f"{name}, graph"] = engines.reason_of(error)
        fast = compiling(graph=False)
    side.plans[name], side.accounts[name] = str(fast.plan), fast.plan.account
    return partial(engines.first_output, fast, subject.inputs)
