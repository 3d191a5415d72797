"""SDGP with its control: the same training with dL/dz whole and pruned in each mode, and how near one batch comes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from records import Nearness, Run, version
from tasks.base import Task
from twofour import training
from twofour.training import sdgp


@dataclass(frozen=True)
class Rule:
    """One row.

    Attributes:
        pattern: Of dL/dz; "" for the control.
        mode: As in `sdgp.attach`.
        published: Top-1 (%) on CIFAR-10 at full size, from the authors' repository; None where they
            have none.
    """

    pattern: str = ""
    mode: str = ""
    published: float | None = None

    @property
    def key(self) -> str:
        """As the record and the page call it: "2:4 rescaled"."""
        return f"{self.pattern} {self.mode}" if self.pattern else "dense"


CONTROL = Rule(published=95.3)
RULES = (
    CONTROL,
    Rule("2:4", "magnitude", 95.2),
    Rule("2:4", "rescaled", 95.2),
    Rule("2:4", "random", 94.5),
    Rule("2:4", "unbiased"),
    Rule("1:4", "rescaled", 95.1),
    Rule("1:8", "rescaled", 94.7),
    Rule("4:8", "rescaled", 95.2),
)


def measured(task: Task, rule: Rule, seed: int) -> Run:
    """Train one model from scratch, its gradients pruned as the rule says."""
    model = task.network(seed)
    handle = sdgp.attach(model, rule.pattern, mode=rule.mode, seed=seed) if rule.pattern else None
    begin = time.perf_counter()
    training.train(
        model,
        task.loader(seed),
        loss=task.loss,
        optimizer=task.optimizer,
        schedule=task.schedule,
        epochs=task.epochs,
        seed=seed,
        clip_norm=1.0,
        name=rule.key.replace(":", "-"),
    )
    seconds = time.perf_counter() - begin
    if handle is not None:
        handle.remove()
    model.eval()
    with torch.inference_mode():
        value = task.evaluate(model)
    return Run(rule.key, seed, value, seconds, task.epochs, version())


def nearness(task: Task, seed: int) -> list[Nearness]:
    """Compare one batch's weight gradients with the exact ones, each rule in turn, after one epoch of exact training.

    The error compounds from layer to layer, so the first layer shows all of it.
    """
    model = task.network(seed)
    loader = task.loader(seed)
    training.train(
        model,
        loader,
        loss=task.loss,
        optimizer=task.optimizer,
        schedule=task.schedule,
        epochs=1,
        seed=seed,
        clip_norm=1.0,
        name="exact, one epoch",
    )
    torch.manual_seed(seed)
    inputs, target = next(iter(loader))
    exact = _weight_gradients(task, model, inputs, target)
    found = []
    for rule in RULES:
        if rule == CONTROL:
            continue
        handle = sdgp.attach(model, rule.pattern, mode=rule.mode, seed=seed)
        near = _weight_gradients(task, model, inputs, target)
        handle.remove()
        cosines = [torch.cosine_similarity(a, b, 0).item() for a, b in zip(near, exact, strict=True)]
        size = (near[0].norm() / exact[0].norm()).item()
        found.append(Nearness(rule.key, seed, size, cosines[0], min(cosines), version()))
    return found


def _weight_gradients(task: Task, model: nn.Module, inputs: Tensor, target: Tensor) -> list[Tensor]:
    model.zero_grad()
    task.loss(model(inputs), target).backward()
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    return [weight.grad.flatten().clone() for weight in weights if weight.grad is not None]
