"""Whether a loader yields what a dense model's batch norms know: one that has converged loses at once by other data.

Norms take on the mean and variance of what they meet within the first steps of a training. Where images are padded,
scaled or augmented otherwise than in the model's own training, most of those steps repair that: with a border of zeros
behind the normalisation in the place of black, ResNet-20 fell from 91.5 to 88.5 % on CIFAR-10 by its norms alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from twofour import calls
from twofour.calibration import Batch
from twofour.calibration.batches import spread
from twofour.training import judge, listed, randomness
from twofour.training.batches import call, device_of, epoch_batches, pair, to_device
from twofour.training.judge import Held
from twofour.training.plan import Plan

log = logging.getLogger("twofour.training")

MOST = 256
"""Samples that are looked at, but for the rest of a batch; fewer tell too little of a variance."""
WORSE, OFF, LEAST = 0.5, 0.2, 0.01
"""Rise of the loss relative to what it was, change of a norm's variances relative to those that it knew, and rise of
the loss itself, from which on, all together, the data are told. Of 256 crops of CIFAR-10 ResNet-20 has 0.9, 0.05 and
0.009 with the border that it knows, and 3.9, 0.33 and 0.12 with the other."""


def told(model: nn.Module, plan: Plan) -> tuple[str, ...]:
    """Return, and log, what is to be said of a dense model's batch norms and the data of its training; () for nothing.

    The model is as it was at the end. Three passes of `MOST` samples are run, where it has norms that keep statistics.
    """
    norms = {name: norm for name, norm in model.named_modules() if isinstance(norm, _BatchNorm)}
    known = {name: norm.running_var.clone() for name, norm in norms.items() if norm.running_var is not None}
    few = _few(plan) if known else None
    if few is None:
        return ()
    before = judge.held_loss(model, plan.loss, few)
    with calls.keeping_buffers(model):
        met = _met(model, {name: norms[name] for name in known}, few)
        after = judge.held_loss(model, plan.loss, few)
        off = {name: _off(known[name], variance) for name, variance in met.items()}
    worst = max(off, key=off.__getitem__, default="")
    if not off or off[worst] <= OFF or after - before <= max(WORSE * abs(before), LEAST):
        return ()
    list_ = ", or shuffle: batches of a list that is sorted are of one kind" if listed.is_list(plan.loader) else ""
    said = (
        f"the loader yields other data than the batch norms know: the variance in `{worst}` is off by "
        f"{100 * off[worst]:.0f} %, and the loss of {few.samples} samples rises from {before:.4g} to {after:.4g} once "
        "the norms have met them, as they do in the first steps; scale, pad and augment as the model's own training "
        f"did{list_}"
    )
    log.warning("%s", said)
    return (said,)


def _few(plan: Plan) -> Held | None:
    """Return batches of the training itself as they are, of a list those that are spread over it.

    None for too few samples: of batches of one, which have no variance, or of a short loader.
    """
    with randomness.undisturbed(plan.loader):
        found, seen = list[tuple[Any, Any]](), 0
        for inputs, target in _batches(plan):
            samples = Batch(inputs).samples
            seen += samples
            found += [(inputs, target)] if samples > 1 else []
            if seen >= MOST:
                break
    samples = sum(Batch(inputs).samples for inputs, _ in found)
    return Held(tuple(found), samples, apart=False) if 2 * samples > MOST else None


def _batches(plan: Plan) -> Iterator[tuple[Any, Any]]:
    """Yield the batches of an epoch, those of a list in the order in which places are spread over it."""
    if not listed.is_list(plan.loader):
        yield from epoch_batches(plan.loader, plan.seed, 0)
        return
    loader: Any = plan.loader
    randomness.seed_loader(loader, plan.seed, 0)
    for place in spread(len(loader)):
        yield pair(loader[place])


def _met(model: nn.Module, norms: Mapping[str, _BatchNorm], few: Held) -> dict[str, Tensor]:
    """Give norms the statistics of these data, the mean of the batches; returns the variances of those that were run.

    All else is in evaluation mode meanwhile.
    """
    momentum = {name: norm.momentum for name, norm in norms.items()}
    try:
        with calls.evaluating(model), torch.no_grad(), randomness.undisturbed():
            for norm in norms.values():
                norm.reset_running_stats()
                norm.momentum = None
                norm.train()
            for inputs, _ in few.batches:
                call(model, to_device(inputs, device_of(model)))
    finally:
        for name, norm in norms.items():
            norm.momentum = momentum[name]
    buffers = {name: dict(norm.named_buffers(recurse=False)) for name, norm in norms.items()}
    return {name: found["running_var"] for name, found in buffers.items() if found["num_batches_tracked"]}


def _off(known: Tensor, met: Tensor) -> float:
    """Return by how much variances differ, relative to their sum: channels that hardly vary count as little."""
    return float((met - known).abs().sum() / known.sum().clamp_min(torch.finfo(known.dtype).tiny))
