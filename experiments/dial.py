"""The dial: models pruned once to 2:4, to 2:4 with dense groups, and to recipes that a budget of milliseconds chose.

A row says what a task loses there; `dial_times` says what the same model takes. Each model is kept in runs/, so that
accuracy can be measured beside other work and times later, on a quiet machine.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import records
import twofour
from arms import DENSE, SAMPLES
from records import Turned, version
from tasks import Task
from tasks.minilm import encode
from twofour import allocation, masks
from twofour.allocation import Budget, Sensitivities, allocate, uniform
from twofour.criteria import AUTO
from twofour.layers import walk

TWO_FOUR = "2:4"
PATTERNS = (TWO_FOUR, "2:4+12.5%", "2:4+25%", "2:4+50%")
SHARES = (25, 50, 75)
"""Of the milliseconds between 2:4 and dense everywhere, in per cent: the budgets of the mixed recipes."""
MOST = 1 << 28
"""Numbers of the answers beyond which they are no longer held against the dense model's."""
BATCHES = 4
"""Training batches on which the loss of each layer and pattern is taken."""


@dataclass(frozen=True)
class Dial:
    """One network and its curves.

    Attributes:
        task: Its name among the tasks.
        example: What the compiled models are timed on, real data of the task.
        timed_on: The same in words.
        criteria: One curve each: "auto" is what `twofour.prune` does with data by itself. A weaker one stands beside it
            where auto's 2:4 is where dense is, so that there is nothing to win.
        remark: What else the page says of it.
    """

    task: str
    example: Callable[[Any], Any]
    timed_on: str
    criteria: tuple[str, ...] = (AUTO,)
    remark: str = ""


def _sentences(task: Any) -> Any:
    said = (text for pair in task.test[0] for text in pair if len(text.split()) == 14)
    return encode([next(said) for _ in range(8)])


def _images(task: Any) -> Tensor:
    return task.test[0][:16].contiguous(memory_format=torch.channels_last)


NARROW = (
    "Its products are narrow (64 inputs, 64 outputs in the attention): each gives up more for its first dense groups "
    "than the task regains."
)

DIALS = {
    dial.task: dial
    for dial in (
        Dial("stsb", _sentences, "8 sentences of 18 tokens", (AUTO, "wanda")),
        Dial("cifar10", _images, "16 images", (AUTO, "sparsegpt")),
        Dial("wikitext", lambda task: task.test[:4, :-1], "4 windows of 64 words", (AUTO, "wanda")),
        Dial("stories", lambda task: task.stories[:4, :-1], "4 stories of 127 tokens", remark=NARROW),
    )
}


def mixed(share: int) -> str:
    """Name the recipe that so many per cent of the milliseconds between 2:4 and dense paid for."""
    return f"mixed {share} %"


def key(criterion: str, pattern: str) -> str:
    """What tells one row from another."""
    return pattern if pattern == DENSE else f"{criterion}: {pattern}"


class Beside(nn.Module):
    """A model beside the dense one: answers as the model does, and adds up how far that is from the dense answers.

    Args:
        model: The model.
        dense: The dense one.
    """

    def __init__(self, model: nn.Module, dense: nn.Module) -> None:
        super().__init__()
        self.model, self.dense = model, dense
        self.apart = self.size = 0.0
        self.seen = 0

    def forward(self, *inputs: Tensor) -> Tensor:
        """Whatever the model takes and answers: one float tensor."""
        answer = self.model(*inputs)
        if self.seen < MOST:
            wanted = self.dense(*inputs)
            self.apart += float(torch.linalg.vector_norm(answer - wanted)) ** 2
            self.size += float(torch.linalg.vector_norm(wanted)) ** 2
            self.seen += wanted.numel()
        return answer

    @property
    def away(self) -> float:
        """Norm of the difference of the answers so far, of the first `MOST` numbers, relative to the dense ones'."""
        return math.sqrt(self.apart / self.size)


def pruned(task: Task, model: nn.Module, criterion: str, pattern: str | dict[str, str]) -> nn.Module:
    """Prune a dense model in place, as a row of `task` with the same pattern is; "dense" leaves it as it is."""
    if pattern == DENSE:
        return model
    given: dict[str, Any] = {"data": task.calibration(), "samples": SAMPLES, "progress": False}
    return twofour.prune(model, pattern, criterion=criterion, skip=task.skip, eligibility=task.eligibility, **given)


def measured(task: Task, fresh: Callable[[], nn.Module], criterion: str, pattern: str, chosen: Any = None) -> Turned:
    """Make one row, and keep its model.

    Args:
        task: The task.
        fresh: Returns the dense model, anew at each call.
        criterion: Of the curve.
        pattern: "2:4" and so on, "dense", or the name of a mixed recipe.
        chosen: Of a mixed recipe: pattern by layer.
    """
    dense, model = fresh().eval(), fresh().eval()
    sizes: dict[str, int] = {entry.name: entry.parameter.numel() for entry in eligible(task, dense)}
    begin = time.perf_counter()
    model = pruned(task, model, criterion, chosen or pattern)
    seconds = time.perf_counter() - begin
    both = Beside(model, dense).eval()
    with torch.inference_mode():
        value = task.evaluate(both)
    left = {name: int(mask.keep.sum()) for name, mask in masks.of(model).items()}
    density = sum(left.get(name, size) for name, size in sizes.items()) / sum(sizes.values())
    row = Turned(key(criterion, pattern), 0, value, both.away, density, seconds, version(), chosen or {})
    if pattern != DENSE:
        where = path(task, row)
        where.parent.mkdir(parents=True, exist_ok=True)
        twofour.save(model, where)
    return row


def again(task: Task, fresh: Callable[[], nn.Module], row: Turned) -> nn.Module:
    """Return the model of a row: the kept one, or pruned again where runs/ does not have it."""
    if row.key == DENSE:
        return fresh().eval()
    if path(task, row).exists():
        return twofour.load(path(task, row), fresh(), masked=True).eval()
    criterion, _, pattern = row.key.partition(": ")
    return pruned(task, fresh().eval(), criterion, row.recipe or pattern)


def path(task: Task, row: Turned) -> Path:
    """Where a row's model is kept."""
    name = "".join(letter if letter.isalnum() or letter in ".+" else "-" for letter in row.key)
    return records.SCRATCH / f"dial-{task.name}-{name}.safetensors"


def eligible(task: Task, model: nn.Module) -> Any:
    """The weights that the patterns are laid over."""
    return walk(model, skip=task.skip, eligibility=task.eligibility).weights


def sensitivities(task: Task, model: nn.Module, criterion: str) -> Sensitivities:
    """What each layer loses of the task with each pattern, on training batches; kept in runs/ once it is known."""
    where = _kept(task, criterion)
    if where.exists():
        return Sensitivities.load(where)
    torch.manual_seed(0)
    found = allocation.sensitivity(
        model,
        list(itertools.islice(task.loader(0), BATCHES)),
        (DENSE, *PATTERNS),
        criterion=criterion,
        loss=task.loss,
        samples=SAMPLES,
        skip=task.skip,
        eligibility=task.eligibility,
        progress=False,
    )
    where.parent.mkdir(parents=True, exist_ok=True)
    found.save(where)
    return found


def with_times(dial: Dial, task: Task, model: nn.Module, criterion: str) -> Sensitivities:
    """The same with the milliseconds of each layer and pattern on this machine, which wants to be quiet."""
    found = allocation.timed(sensitivities(task, model, criterion), model, dial.example(task))
    found.save(_kept(task, criterion))
    return found


def recipe(found: Sensitivities, share: int) -> dict[str, str]:
    """Choose the pattern of each layer that loses least within a share of the milliseconds between 2:4 and dense.

    Returns:
        Pattern by layer, as `twofour.prune` takes it.
    """
    low, high = (uniform(found, pattern).latency or 0.0 for pattern in (TWO_FOUR, DENSE))
    chosen = allocate(found, Budget(latency=low + share / 100 * (high - low)))
    return {glob: DENSE if pattern is None else pattern.name for glob, pattern in chosen.recipe.rules}


def _kept(task: Task, criterion: str) -> Path:
    return records.SCRATCH / f"dial-{task.name}-{criterion}-layers.json"
