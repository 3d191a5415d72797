"""The passes over the data: block by block, or the whole model for as many weights as a budget of memory allows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from twofour import calls
from twofour.calibration import blocks
from twofour.calibration.batches import Batch, to_device
from twofour.calibration.blocks import Chain, Stop, Survey
from twofour.calibration.collector import Collector, Unshared
from twofour.calibration.finite import not_finite
from twofour.calibration.inputs import caller, groups, unsupported
from twofour.calibration.statistics import PER_INPUT, Need, Statistics
from twofour.errors import DataError
from twofour.layers import PrunableWeight
from twofour.progress import Progress, Work

_log = logging.getLogger("twofour.calibration")

BUDGET = 2 << 30
"""Bytes of statistics that one pass over a model without blocks may collect."""

_SOLVED = 50
"""Products with X^T X that solving a weight is taken to cost, until it has been measured: for the time left alone."""

Visit = Callable[[PrunableWeight, Statistics], None]


@torch.no_grad()
def calibrate(
    model: nn.Module,
    weights: Sequence[PrunableWeight],
    batches: Sequence[Batch],
    need: Need,
    visit: Visit,
    *,
    display: Progress | None = None,
    budget: int = BUDGET,
) -> dict[str, str]:
    """Collect the statistics of each weight's inputs and hand them to `visit`, in the order the layers are called.

    `visit` may change the weight: the weights of later blocks (without blocks: of later passes) are calibrated on what
    the changed model puts out. The model runs in evaluation mode, without gradients, and its own modes come back.

    Args:
        model: The model, on any device.
        weights: The weights to visit.
        batches: What `take` returned.
        need: "sample", "norms" or "hessian".
        visit: Called once for each weight that was reached.
        display: Shows progress.
        budget: Bytes of statistics per pass over a model without blocks.

    Returns:
        The weights that were not visited, by name, each with its reason.

    Raises:
        DataError: The model does not run on the data, or an input of a layer holds NaN or infinity.
    """
    display = display or Progress(shown=False)
    refused = {weight.name: reason for weight in weights if (reason := unsupported(weight))}
    weights = [weight for weight in weights if weight.name not in refused]
    if not weights:
        return refused
    with calibrating(model):
        device = weights[0].parameter.device
        display.say("looking at the order of the layers")
        with explained():
            found = blocks.survey(model, weights, batches, device)
        if found.reason:
            _log.info("the whole model is run for each pass, not its blocks: %s", found.reason)
        order = {name: number for number, name in enumerate(found.order)}
        refused |= {w.name: "the calibration data never reach it" for w in weights if w.name not in order}
        weights = sorted((w for w in weights if w.name in order), key=lambda w: order[w.name])
        chain = found.chain
        run = _Run(model, batches, need, visit, display, device, found, _work(weights, need, chain))
        display.move(left=run.work.left)
        if chain is None:
            run.whole_model(weights, budget)
        else:
            owners = {weight.name: chain.owner(weight) for weight in weights}
            outside = [weight for weight in weights if owners[weight.name] is None]
            run.whole_model([weight for weight in outside if weight.name in found.before], budget)
            run.blocks(chain, [[w for w in weights if owners[w.name] == n] for n in range(len(chain.blocks))])
            run.whole_model([weight for weight in outside if weight.name not in found.before], budget)
    return refused


@dataclass(eq=False)
class _Run:
    """One calibration: what each pass needs to know."""

    model: nn.Module
    batches: Sequence[Batch]
    need: Need
    visit: Visit
    display: Progress
    device: torch.device
    found: Survey
    work: Work

    def whole_model(self, weights: Sequence[PrunableWeight], budget: int) -> None:
        """Visit weights in passes over the whole model, each as large as the budget allows."""
        for number, part in enumerate(_parts(weights, self.need, budget), 1):
            last = caller(self.model, part[-1]) if self.found.once(part) else None
            self._collect(part, f"pass {number}", partial(self._run_model, last))

    def blocks(self, chain: Chain, parts: Sequence[Sequence[PrunableWeight]]) -> None:
        """Visit the weights block by block; only the inputs of the current block are held."""
        self.display.say("inputs of the first block")
        with explained():
            held = [
                blocks.inputs_of(self.model, chain.blocks[0], to_device(batch.inputs, self.device))
                for batch in self.batches
            ]
        for number, (block, part) in enumerate(zip(chain.blocks, parts, strict=True), 1):
            where = f"block {number} of {len(chain.blocks)}"
            if part:
                self._collect(part, where, lambda index, block=block: block(*held[index][0], **held[index][1]))
            if not any(parts[number:]):
                return
            amount = _of_a_pass(part, self.need) / len(held)
            for index, (args, kwargs) in enumerate(held):
                self.display.say(f"{where}, outputs of batch {index + 1} of {len(held)}")
                with explained(), self.work.doing("outputs", amount):
                    held[index] = blocks.handed_on(chain, (args, kwargs), block(*args, **kwargs))

    def _run_model(self, last: nn.Module | None, index: int) -> None:
        """Run a batch; `last` is the layer after whose call nothing wanted comes."""

        def stop(*_: Any) -> None:
            raise Stop

        with suppress(Stop), calls.observing([] if last is None else [(None, last)], after=stop):
            calls.call(self.model, to_device(self.batches[index].inputs, self.device))

    def _collect(self, part: Sequence[PrunableWeight], where: str, run: Callable[[int], None]) -> None:
        """Run every batch with hooks on the layers of `part`, then visit its weights."""
        try:
            collector = self._pass(part, where, run, share=True)
        except Unshared:
            collector = self._pass(part, where, run, share=False)
        for weight in part:
            self.display.say(f"solving {weight.name}")
            statistics = collector.release(weight)
            try:
                statistics.require_finite()
            except DataError as error:
                raise (not_finite(self.batches) or error).for_layer(weight.name) from None
            with self.work.doing("solving", _of_solving(weight, self.need)):
                self.visit(weight, statistics)
            self.display.advance()

    def _pass(
        self, part: Sequence[PrunableWeight], where: str, run: Callable[[int], None], *, share: bool
    ) -> Collector:
        collector, amount = Collector(self.model, part, self.need, share=share), _of_a_pass(part, self.need)
        with collector.hooked(), explained():
            for index, batch in enumerate(self.batches):
                self.display.say(f"{where}, batch {index + 1} of {len(self.batches)}")
                collector.tokens = batch.tokens
                with self.work.doing("passes", amount / len(self.batches)):
                    run(index)
        return collector


def _parts(weights: Sequence[PrunableWeight], need: Need, budget: int) -> Iterator[list[PrunableWeight]]:
    part: list[PrunableWeight] = []
    used = 0
    for weight in weights:
        size = _bytes(weight, need)
        if part and used + size > budget:
            yield part
            part, used = [], 0
        part.append(weight)
        used += size
    if part:
        yield part


def _bytes(weight: PrunableWeight, need: Need) -> int:
    return groups(weight) * _width(weight) * (4 * _width(weight) if need == "hessian" else 4 * 512)


def _width(weight: PrunableWeight) -> int:
    return weight.parameter.numel() // weight.of.rows(weight.module, weight.parameter.shape)


def _work(weights: Sequence[PrunableWeight], need: Need, chain: Chain | None) -> Work:
    """Return what there is to do: a value of a weight, or of X^T X, for each of as many rows as weights mostly get."""
    inside = (
        []
        if chain is None
        else [weight for weight in weights if chain.owner(weight) not in (None, len(chain.blocks) - 1)]
    )
    solving = sum(_of_solving(weight, need) for weight in weights)
    return Work({"passes": _of_a_pass(weights, need), "outputs": _of_a_pass(inside, need), "solving": solving})


def _of_a_pass(weights: Sequence[PrunableWeight], need: Need) -> float:
    return sum(PER_INPUT * _width(weight) * _values(weight, need) for weight in weights)


def _of_solving(weight: PrunableWeight, need: Need) -> float:
    return _values(weight, need) * (_SOLVED * _width(weight) if need == "hessian" else 1)


def _values(weight: PrunableWeight, need: Need) -> int:
    return weight.parameter.numel() + (groups(weight) * _width(weight) ** 2 if need == "hessian" else 0)


@contextmanager
def calibrating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode, without caches and fused paths that pass the layers by; then put all back."""
    with calls.without_fast_paths(), calls.without_cache(model), calls.evaluating(model):
        yield


def explained() -> AbstractContextManager[None]:
    """Say of an error inside the model that it does not run on the data.

    Raises:
        DataError: In its place.
    """
    return calls.explaining(
        DataError,
        "the calibration data",
        wanted=calls.PAIRS,
        remedy="call the model on one batch yourself: `data` must hold what it takes",
    )
