"""SDGP with its control: the same training with dL/dz whole, and pruned in each mode."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from records import Run, version
from tasks.base import Task
from twofour import training
from twofour.training import sdgp


@dataclass(frozen=True)
class Rule:
    """One row.

    Attributes:
        pattern: Of dL/dz; "" for the control.
        mode: As in `sdgp.attach`.
        published: Top-1 (%) on CIFAR-10 at full size, from the authors' repository (PAPERS.md 2.3); None where they
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
