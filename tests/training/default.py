"""A trained dense model and short runs of `finetune` on it, for the tests of what it does by itself."""

import copy
import functools

import torch
from torch import nn
from torch.nn import functional as F

from tests.training.small import dense_model, noisy_loader, recipe
from twofour import pruning
from twofour.training import finetune, train

QUICK = {"reconstruct": False, "permute": False}
"""What keeps a test of something else short."""


@functools.cache
def converged(seed: int) -> nn.Module:
    model = dense_model(seed, dropout=0.0)
    train(model, noisy_loader(), **recipe(epochs=6))
    return model


def trained(seed: int = 0) -> nn.Module:
    return copy.deepcopy(converged(seed))


def optimizer(params):
    return torch.optim.SGD(params, lr=0.05)


def quick(model, loader=None, **changes):
    given = {"loss": F.cross_entropy, "optimizer": optimizer, "epochs": 2, "progress": False, "prune": QUICK}
    given["control"] = None
    return finetune(model, noisy_loader() if loader is None else loader, **{**given, **changes})


def data_of_prune(monkeypatch):
    """Return a list that gets what each call of `prune` is given as data, until the patch is taken back."""
    seen, real = [], pruning.prune

    @functools.wraps(real)
    def prune(model, *given, data, **options):
        seen.append(list(data))
        return real(model, *given, data=seen[-1], **options)

    monkeypatch.setattr(pruning, "prune", prune)
    return seen


def stopping(at):
    """A loss that interrupts the training at a step."""
    steps = []

    def loss(output, target):
        steps.append(output.requires_grad)
        if sum(steps) == at:
            raise KeyboardInterrupt
        return F.cross_entropy(output, target)

    return loss
