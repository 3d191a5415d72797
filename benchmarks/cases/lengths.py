"""Lengths: MiniLM's embeddings at eleven sizes of batch and sequence and over sixty random ones, compiled once.

Ours is compiled by the call that README shows, with one sequence of 128 tokens as the example, and serves all sizes.
At a fixed size the runtimes get a model built for that size, the best that they have; over the random ones they have
free sizes too, as a server would use them.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

import twofour
from cases.models import DENSE, EAGER, OPENVINO, ORT, SPARSE
from cases.ragged import Embedder
from cases.records import listed
from cases.table import show_lines
from models import Subject
from models.encoder import SEQUENCE, minilm
from twofour import engines
from twofour.engines import values_of
from twofour.measure import Record

SHAPES = ("1x8", "1x16", "1x32", "1x64", "1x128", "1x256", "8x16", "8x64", "8x128", "32x16", "32x64")
"""Sequences x tokens."""
RANDOM = "60 random"
SIZES = (*SHAPES, RANDOM)
PEERS = (EAGER, ORT, OPENVINO)
OURS = (DENSE, SPARSE)
HEADS = ("sequences x tokens", "best peer", "its ms", "dense / it", "2:4 / it", "A/A")

Inputs = tuple[Tensor, ...]


def cells(names: Sequence[str], dtypes: Sequence[str], threads: Sequence[int]) -> list[dict[str, object]]:
    """List the cells.

    Raises:
        DataError: There is no such size.
    """
    return listed({"case": "lengths", "model": "minilm"}, SIZES, size=names, dtype=dtypes, threads=threads)


def sizes(name: str) -> list[tuple[int, int]]:
    """Return the sequences and tokens of the calls of a cell: 1 to 8 sequences of 8 to 128 tokens where random."""
    if name != RANDOM:
        batch, tokens = map(int, name.split("x"))
        return [(batch, tokens)]
    chosen = random.Random(0)
    return [(chosen.randint(1, 8), chosen.randint(8, 128)) for _ in range(int(RANDOM.split()[0]))]


class Bench:
    """Measures cells.

    Args:
        seconds: Time box of a cell.
        without: Candidates to leave out.
    """

    def __init__(self, seconds: float, without: Sequence[str] = ()) -> None:
        self.seconds, self.without = seconds, without
        self.subject: Callable[[int], Subject] = minilm
        self.models: dict[str, nn.Module] = {}
        self.compiled: dict[tuple[str, str], Any] = {}

    def __call__(self, cell: dict[str, object]) -> Record:
        """Measure one cell."""
        dtype, threads = str(cell["dtype"]), int(str(cell["threads"]))
        torch.set_num_threads(threads)
        if not self.models:
            encoder: Any = self.subject(1).model
            self.models[DENSE] = Embedder(encoder.encoder).eval().requires_grad_(False)
            sparse = twofour.prune(copy.deepcopy(self.models[DENSE]), "2:4")
            self.models[SPARSE] = sparse.eval().requires_grad_(False)
        calls = [_inputs(*size) for size in sizes(str(cell["size"]))]
        side = engines.Candidates()
        for name in (*PEERS, *OURS):
            if name in self.without:
                side.missing[name] = "left out by --without"
                continue
            model = self.models[name if name in OURS else DENSE]
            wanted = values_of(_each(partial(engines.first_output, model), calls))
            side.add(name, partial(self.candidate, name, model, calls, dtype, threads), wanted, dtype)
        tokens = sum(ids.numel() for ids, _ in calls)
        facts = {**cell, "calls": len(calls), "tokens": tokens, "missing": side.missing, "errors": side.errors}
        baseline = [name for name in side.calls if name in PEERS]
        return engines.compare(side.calls, baseline, threads, self.seconds, facts)

    def candidate(
        self, name: str, model: nn.Module, calls: Sequence[Inputs], dtype: str, threads: int
    ) -> Callable[[], Any]:
        """Build a candidate: a call of it answers all calls of the cell."""
        if name in OURS:
            return partial(_each, partial(engines.first_output, self.ours(name, model, dtype)), calls)
        subject = Subject("minilm", "", model, calls[0], len(calls[0][0]), calls[0][0].numel())
        if name == EAGER:
            return partial(_each, engines.eager_session(subject, dtype, threads), calls)
        build = {ORT: engines.onnxruntime_session, OPENVINO: engines.openvino_session}[name]
        session = build(subject, dtype, threads, free=(0, 1) if len(calls) > 1 else ())
        return partial(_each, session, [engines.arrays_of(inputs) for inputs in calls])

    def ours(self, name: str, model: nn.Module, dtype: str) -> Any:
        """Compile as README does, once for all sizes; a type where it is another one."""
        if (name, dtype) not in self.compiled:
            example = _inputs(1, SEQUENCE)
            given: dict[str, Any] = {} if dtype == "float32" else {"dtype": dtype}
            if dtype == "int8":
                given["data"] = [example]
            self.compiled[name, dtype] = twofour.compile(model, example, **given)
        return self.compiled[name, dtype]


def _inputs(batch: int, tokens: int) -> Inputs:
    generator = torch.Generator().manual_seed(batch * 1000 + tokens)
    ids = torch.randint(1000, 20_000, (batch, tokens), generator=generator)
    return ids, torch.ones_like(ids)


def _each(call: Callable[[Any], Any], calls: Sequence[Any]) -> Any:
    """Return the answers of all calls, one below the other; of a single one, its own."""
    if len(calls) == 1:
        return call(calls[0])
    return np.concatenate([values_of(call(inputs)) for inputs in calls])


def line(record: Record) -> list[str]:
    """Return what stands under `HEADS`."""
    best = record.fastest(record.baseline)
    ratios = {name: f"{record.median(name) / record.median(best):.2f}" for name in OURS if name in record.timings}
    told = (ratios.get(name, "-") for name in OURS)
    return [str(record.meta["size"]), best, f"{1e3 * record.median(best):.2f}", *told, f"{record.noise or 0.0:.0%}"]


def show(records: Sequence[Record], console: Console) -> None:
    """Print a line per cell, then what was not built and why."""
    show_lines(records, HEADS, line, console)
