"""Whether a loader yields what a dense model's batch norms know: one that has converged loses at once by other data.

Norms take on the mean and variance of what they meet within the first steps of a training. Where images are padded,
scaled or augmented otherwise than in the model's own training, most of those steps repair that: with a border of zeros
behind the normalisation in the place of black, ResNet-20 fell from 91.5 to 88.5 % on CIFAR-10 by its norms alone.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from twofour import calls
from twofour.training import judge, randomness
from twofour.training.batches import call, to_device
from twofour.training.judge import Held
from twofour.training.plan import Plan
from twofour.training.warm_start import Calibration

log = logging.getLogger("twofour.training")

MOST = 256
"""Samples that are looked at, but for the rest of a batch; fewer tell too little of a variance."""
WORSE, OFF = 1.5, 0.2
"""Loss in units of what it was, and change of a norm's variances by the mean of its channels, from which on both
together are told: on the data that ResNet-20 knows 1.0 and 0.03, on the others 4.0 and 0.29."""


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
        _meet(model, [norms[name] for name in known], few)
        after = judge.held_loss(model, plan.loss, few)
        off = {name: _off(variance, norms[name].running_var) for name, variance in known.items()}
    worst = max(off, key=off.__getitem__)
    if not (after > WORSE * before and off[worst] > OFF):
        return ()
    said = (
        f"the loader yields other data than the batch norms know: the variance in `{worst}` is off by "
        f"{100 * off[worst]:.0f} %, and the loss of {few.samples} samples rises from {before:.4g} to {after:.4g} once "
        "the norms have met them, as they do in the first steps; scale, pad and augment as the model's own training did"
    )
    log.warning("%s", said)
    return (said,)


def _few(plan: Plan) -> Held | None:
    """Return batches of the training itself, of a list those that are spread over it; None for too few samples."""
    batches, samples = list[tuple[Any, Any]](), 0
    with randomness.undisturbed(plan.loader):
        for batch in Calibration(plan.loader, plan.seed):
            if batch.samples > 1:  # one alone has no variance
                batches.append((batch.inputs, batch.target))
                samples += batch.samples
            if samples >= MOST:
                return Held(tuple(batches), samples, apart=False)
    return None


def _meet(model: nn.Module, norms: Collection[_BatchNorm], few: Held) -> None:
    """Give norms the statistics of these data, the mean of the batches; all else is in evaluation mode meanwhile."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    momentum = [norm.momentum for norm in norms]
    try:
        with calls.evaluating(model), torch.no_grad(), randomness.undisturbed():
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None
                norm.train()
            for inputs, _ in few.batches:
                call(model, to_device(inputs, device))
    finally:
        for norm, own in zip(norms, momentum, strict=True):
            norm.momentum = own


def _off(known: Tensor, met: Tensor | None) -> float:
    """Return by how much variances differ, relative to those known, by the mean of the channels that vary."""
    assert met is not None
    varied = known > 1e-8 * known.max()
    return float(((met - known).abs() / known)[varied].mean()) if varied.any() else 0.0
