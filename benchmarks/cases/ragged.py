"""Ragged: MiniLM's embeddings of batches whose sequences differ in length, packed and padded, beside the runtimes.

Every candidate is given the same padded batch and its mask; the runtimes compute on all of it. Ours is timed as it is
called, which packs the real tokens, and once with packing off. A batch without padding shows what deciding costs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import twofour
from cases.columns import headed
from cases.records import listed, machine_line
from models import Subject
from models.encoder import minilm
from twofour import engines
from twofour.calls import without_fast_paths
from twofour.engines import EAGER, OPENVINO, ORT, values_of
from twofour.measure import Record

LENGTHS = {
    "mixed": (8, 16, 24, 32, 48, 64, 96, 128),
    "alike": (112, 128, 116, 124, 120, 128, 114, 126),
    "full": (128,) * 8,
}
"""Tokens of a batch's sequences, in turns: 41 %, 95 % and 100 % of the padded batch."""

PEERS = (EAGER, ORT, OPENVINO)
OURS = {
    "twofour dense": (False, True),
    "twofour dense, padded": (False, False),
    "twofour 2:4": (True, True),
    "twofour 2:4, padded": (True, False),
}
"""Candidate -> whether it is pruned, and whether it packs."""


class Embedder(nn.Module):
    """An encoder and the mean of its answers over the real tokens."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return float32 (batch, width)."""
        real = mask[..., None].to(torch.float32)
        found = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state * real
        return found.sum(1) / real.sum(1)


def cells(sets: Sequence[str], dtypes: Sequence[str], batches: Sequence[int], threads: Sequence[int]) -> list[dict]:
    """List the cells.

    Raises:
        DataError: There are no such lengths.
    """
    case = {"case": "ragged", "model": "minilm"}
    return listed(case, LENGTHS, lengths=sets, dtype=dtypes, batch=batches, threads=threads)


class Bench:
    """Measures cells.

    Args:
        seconds: Time box of a cell.
        without: Candidates to leave out.
    """

    def __init__(self, seconds: float, without: Sequence[str] = ()) -> None:
        self.seconds, self.without = seconds, without
        self.subject: Callable[[int], Subject] = minilm
        self.compiled: dict[object, Any] = {}

    def __call__(self, cell: dict[str, object]) -> Record:
        """Measure one cell."""
        dtype, batch, threads = str(cell["dtype"]), int(str(cell["batch"])), int(str(cell["threads"]))
        torch.set_num_threads(threads)
        lengths = (LENGTHS[str(cell["lengths"])] * batch)[:batch]
        found = self.subject(batch)
        encoder: Any = found.model
        ids, mask = found.inputs[0], torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        subject = replace(found, model=Embedder(encoder.encoder).eval(), inputs=(ids, mask.long()))
        sparse = twofour.prune(copy.deepcopy(subject.model), "2:4").eval().requires_grad_(False)
        side, plans = engines.Candidates(), dict[str, str]()
        builders: dict[str, tuple[Callable[[], Any], nn.Module]] = {
            EAGER: (partial(engines.eager, subject, dtype, threads), subject.model),
            ORT: (partial(engines.onnxruntime, subject, dtype, threads), subject.model),
            OPENVINO: (partial(engines.openvino, subject, dtype, threads), subject.model),
        }
        for name, (pruned, packs) in OURS.items():
            model = sparse if pruned else subject.model
            builders[name] = (partial(self.ours, plans, name, model, subject, cell, pruned, packs), model)
        for name, (build, model) in builders.items():
            if name in self.without:
                side.missing[name] = "left out by --without"
            else:
                wanted = values_of(engines.eager(replace(subject, model=model), "float32", threads)())
                side.add(name, build, wanted, dtype)
        real = int(mask.sum())
        facts = {**cell, "tokens": real, "places": mask.numel(), "missing": side.missing, "errors": side.errors}
        facts |= {"plans": plans, "note": found.note}
        baseline = [name for name in side.calls if name in PEERS]
        return engines.compare(side.calls, baseline, threads, self.seconds, facts)

    def ours(
        self,
        plans: dict[str, str],
        name: str,
        model: nn.Module,
        subject: Subject,
        cell: dict[str, object],
        pruned: bool,
        packs: bool,
    ) -> Callable[[], Any]:
        """Compile for batches of this size, once for all lengths; without padding in the example."""
        key = pruned, *(cell[name] for name in ("dtype", "batch", "threads"))
        if key not in self.compiled:
            self.compiled = {k: one for k, one in self.compiled.items() if k[1:] == key[1:]}  # type: ignore[index]
            example = subject.inputs[0], torch.ones_like(subject.inputs[1])
            self.compiled[key] = twofour.compile(model, example, str(cell["dtype"]))
        fast = self.compiled[key]
        plans[name] = fast.plan.account.ragged
        call = partial(engines.first_output, fast, subject.inputs)
        return call if packs else partial(_padded, call)


def _padded(call: Callable[[], Any]) -> Any:
    """Call with padding, as a compilation compares it."""
    with without_fast_paths():
        return call()


def show(records: Sequence[Record], console: Console) -> None:
    """Print milliseconds, packed over padded, and over the fastest runtime."""
    names = ("lengths", "dtype", "batch", "threads", "real", "candidate", "ms", "over its padded", "over the best peer")
    table = headed(names, words=6)
    for record in records:
        best = min((record.undisturbed(name) for name in record.baseline), default=None)
        share = f"{int(str(record.meta['tokens'])) / int(str(record.meta['places'])):.0%}"
        keys = [str(record.meta[key]) for key in ("lengths", "dtype", "batch", "threads")]
        for name in record.timings:
            seconds = record.undisturbed(name)
            padded = f"{name}, padded"
            against = f"{seconds / record.undisturbed(padded):.2f}" if padded in record.timings else ""
            peers = f"{seconds / best:.2f}" if best else ""
            table.add_row(*keys, share, name, f"{1e3 * seconds:.2f}", against, peers)
        for name, why in dict(record.meta["missing"]).items():  # type: ignore[call-overload]
            table.add_row(*keys, share, name, "-", "", why[:80])
    console.print(table)
    console.print(machine_line(records[-1]), highlight=False, markup=False, soft_wrap=True)
