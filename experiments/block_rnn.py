"""Recurrent nets pruned block by block while they train (arXiv 1711.02782), beside dense nets of equal parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from records import Trained, version
from tasks.recurrent import Recurrent
from twofour import masks, training
from twofour.patterns import Block
from twofour.training import block_thresholds, gradual

SPARSITY = 0.8
"""Zeros of the recurrent weights; the paper's nets have 80 to 90 %."""

LASSO = 2.5e-5
"""Of GLP: with sqrt(16) in front of each block of 4 x 4 this is 1e-4 on the plain sum of their norms."""

REACH = (0.8, 4.0)
"""Where the factor is looked for, times the fourth root of a block's values, by which the paper's rule multiplies."""

LOOKS = 20
"""Looks at the blocks in an epoch: the paper's every 100 steps are too few for so short a training."""


@dataclass(frozen=True)
class Arm:
    """One row.

    Attributes:
        way: "BP", the paper's schedule alone; "GLP", with group lasso; "cubic", `training.gradual`; "": dense.
        blocks: Outputs and inputs of a block.
        size: "": the task's width; "small": a dense net with the parameters that the pruned ones keep; "large": a wider
            net, pruned to the parameters of the dense one.
    """

    way: str = ""
    blocks: tuple[int, int] = (1, 1)
    size: str = ""

    @property
    def key(self) -> str:
        """As the record and the page call it: "large 4x4 GLP"."""
        name = f"{self.blocks[0]}x{self.blocks[1]} {self.way}" if self.way else "dense"
        return f"{self.size} {name}" if self.size else name


DENSE, SMALL = Arm(), Arm(size="small")
UNSTRUCTURED = (1, 2)
"""Blocks have two values at least; these are the nearest to single weights."""
SQUARES = ((4, 4), (8, 8), (16, 16))

ARMS = (
    DENSE,
    SMALL,
    *(Arm(way, blocks) for blocks in SQUARES for way in ("BP", "GLP")),
    Arm("BP", UNSTRUCTURED),
    *(Arm("cubic", blocks) for blocks in (UNSTRUCTURED, *SQUARES)),
    Arm("GLP", (4, 4), "large"),
    *(Arm("cubic", blocks, "large") for blocks in ((4, 4), (16, 16))),
)


@dataclass(frozen=True)
class Training:
    """A net and how long it was trained."""

    task: Recurrent
    model: nn.Module
    seed: int
    seconds: float


Attach = Callable[[nn.Module, int], block_thresholds.BlockThresholds | gradual.Gradual]
"""Attaches what prunes a model while it trains, given the model and the number of steps."""


def trained(task: Recurrent, model: nn.Module, seed: int, scheme: Attach | None, epochs: int) -> Training:
    """Train a net so many of its task's epochs.

    Args:
        task: What is learned.
        model: From what.
        seed: Of its batches.
        scheme: Prunes the model while it trains, or nothing does.
        epochs: How many; the learning rate falls as over all of the task's.
    """
    options: dict[str, Any] = {"loss": task.loss, "optimizer": task.optimizer, "schedule": task.schedule}
    options |= {"epochs": epochs, "seed": seed, "clip_norm": 1.0, "progress": False}
    loader = task.loader(seed)
    if scheme is None:
        return Training(task, model, seed, training.train(model, loader, **options).seconds)
    return Training(task, model, seed, training.finetune(model, loader, scheme=scheme, **options).sparse.seconds)


def width(task: Recurrent, arm: Arm) -> int:
    """Return the width of an arm's recurrent layer."""
    if arm.size == "large":
        return task.larger
    if not arm.size:
        return task.width
    wanted = task.parameters(task.width) - SPARSITY * task.prunable(task.width)
    return min(range(1, task.width), key=lambda narrow: abs(task.parameters(narrow) - wanted))


def sparsity(task: Recurrent, arm: Arm) -> float:
    """Return the share of zeros that an arm's recurrent weights are to have."""
    if not arm.way:
        return 0.0
    if arm.size != "large":
        return SPARSITY
    return (task.parameters(task.larger) - task.parameters(task.width)) / task.prunable(task.larger)


def measured(task: Recurrent, arm: Arm, seed: int, rows: Sequence[Trained]) -> Trained:
    """Train one net.

    Args:
        task: What it learns.
        arm: How it is pruned.
        seed: Of its weights and its batches.
        rows: What was measured before: the dense net of this seed, whose weights say where thresholds aim, and the
            factor that an earlier seed was trained with. A factor that no row has is looked for.
    """
    factor, scheme = 0.0, cubic(task, arm) if arm.way else None
    if arm.way in ("BP", "GLP"):
        quantiles = next(row.quantiles for row in rows if (row.key, row.seed) == (DENSE.key, seed))
        known = [row.factor for row in rows if row.key == arm.key]

        def reached(factor: float) -> float:
            model = task.network(seed, width(task, arm))
            # After half of the epochs the thresholds stand still.
            trained(task, model, seed, rising(task, arm, quantiles, factor), task.epochs // 2)
            return zeros(model)

        factor = known[0] if known else found(reached, arm, sparsity(task, arm))
        scheme = rising(task, arm, quantiles, factor)
    return row(trained(task, task.network(seed, width(task, arm)), seed, scheme, task.epochs), arm, factor)


def found(reached: Callable[[float], float], arm: Arm, wanted: float) -> float:
    """Return the factor that ends near the wanted sparsity."""
    rule = (arm.blocks[0] * arm.blocks[1]) ** 0.25
    least, most = (end / rule for end in REACH)
    return block_thresholds.find_factor(reached, wanted, least=least, most=most, runs=7, close=0.012)


def rising(task: Recurrent, arm: Arm, quantiles: dict[str, float], factor: float) -> Attach:
    """The paper's thresholds: from the second epoch, faster from a quarter, until half of the epochs."""
    epoch = len(task.loader(0))
    total = task.epochs * epoch
    rise = block_thresholds.Rise(epoch, total // 4, task.epochs // 2 * epoch, every=max(1, epoch // LOOKS))
    options: dict[str, Any] = {"quantiles": quantiles, "factor": factor, "skip": task.skip}
    options["lasso"] = LASSO if arm.way == "GLP" else 0.0
    return lambda model, _: block_thresholds.attach(model, arm.blocks, rise, **options)


def cubic(task: Recurrent, arm: Arm) -> Attach:
    """The library's own schedule, between the same steps."""
    epoch = len(task.loader(0))
    pattern = Block(*arm.blocks, sparsity(task, arm))
    options: dict[str, Any] = {"begin": epoch, "end": task.epochs // 2 * epoch, "skip": task.skip, "eligibility": "any"}
    return lambda model, _: gradual.attach(model, pattern, **options)


def zeros(model: nn.Module) -> float:
    """Return the share of the recurrent weights that is pruned."""
    held = masks.of(model).values()
    pruned = sum(int((~mask.keep).sum()) for mask in held)
    return pruned / max(1, sum(mask.keep.numel() for mask in held))


def row(done: Training, arm: Arm, factor: float) -> Trained:
    """Return what is kept of a training that is over."""
    model, task = done.model, done.task
    pruned = sum(int((~mask.keep).sum()) for mask in masks.of(model).values())
    model.eval()
    with torch.inference_mode():
        value = task.evaluate(model)
    return Trained(
        arm.key,
        done.seed,
        value,
        zeros(model),
        sum(parameter.numel() for parameter in model.parameters()) - pruned,
        width(task, arm),
        factor,
        {name: q for name, q in block_thresholds.quantiles_of(model).items() if name.startswith("recurrent.")},
        done.seconds,
        task.epochs,
        version(),
    )
