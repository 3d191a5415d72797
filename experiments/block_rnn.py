"""Recurrent nets pruned block by block while they train (arXiv 1711.02782), beside dense nets of equal parameters."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from records import Trained, version
from tasks.base import one_cycle
from tasks.recurrent import Recurrent
from twofour import masks
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


class Training:
    """One training, epoch by epoch; others may run between its epochs.

    Args:
        task: What is learned.
        model: From what.
        seed: Of its batches.
        schedule: Prunes the model while it trains, or nothing does.
    """

    def __init__(
        self,
        task: Recurrent,
        model: nn.Module,
        seed: int,
        schedule: block_thresholds.BlockThresholds | gradual.Gradual | None = None,
    ) -> None:
        self.task, self.model, self.seed, self.schedule = task, model, seed, schedule
        self.loader = task.loader(seed)
        self.optimizer = task.optimizer(list(model.parameters()))
        self.rates = one_cycle(self.optimizer, task.epochs * len(self.loader))
        self.epoch, self.seconds = 0, 0.0

    def run(self, epochs: int) -> None:
        """Go on until so many epochs are done."""
        begin = time.perf_counter()
        self.model.train()
        while self.epoch < epochs:
            torch.manual_seed(1000 * self.seed + self.epoch)
            for inputs, target in self.loader:
                self._step(inputs, target)
            self.epoch += 1
        self.seconds += time.perf_counter() - begin

    def _step(self, inputs: torch.Tensor, target: torch.Tensor) -> None:
        loss = self.task.loss(self.model(inputs), target)
        if isinstance(self.schedule, block_thresholds.BlockThresholds):
            loss = loss + self.schedule.penalty()
        self.optimizer.zero_grad()
        loss.backward()
        masks.enforce(self.model)  # the norm is that of the gradients that the step will use
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.rates.step()
        if self.schedule is not None:
            self.schedule.step()


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
    factor = 0.0
    if arm.way in ("BP", "GLP"):
        quantiles = next(row.quantiles for row in rows if (row.key, row.seed) == (DENSE.key, seed))
        known = [row.factor for row in rows if row.key == arm.key]
        trials: dict[float, Training] = {}

        def reached(factor: float) -> float:
            trials[factor] = rising(task, arm, seed, quantiles, factor)
            trials[factor].run(task.epochs // 2)  # the thresholds stand still from here on
            return zeros(trials[factor].model)

        factor = known[0] if known else found(reached, arm, sparsity(task, arm))
        training = trials.get(factor) or rising(task, arm, seed, quantiles, factor)
    else:
        model = task.network(seed, width(task, arm))
        training = Training(task, model, seed, cubic(task, arm, model) if arm.way else None)
    training.run(task.epochs)
    if training.schedule is not None:
        training.schedule.finish()
    return row(training, arm, factor)


def found(reached: Callable[[float], float], arm: Arm, wanted: float) -> float:
    """Return the factor that ends near the wanted sparsity."""
    rule = (arm.blocks[0] * arm.blocks[1]) ** 0.25
    least, most = (end / rule for end in REACH)
    return block_thresholds.find_factor(reached, wanted, least=least, most=most, runs=7, close=0.012)


def rising(task: Recurrent, arm: Arm, seed: int, quantiles: dict[str, float], factor: float) -> Training:
    """Begin a training with the paper's thresholds: from the second epoch, faster from a quarter, until half of it."""
    model = task.network(seed, width(task, arm))
    epoch = len(task.loader(seed))
    total = task.epochs * epoch
    rise = block_thresholds.Rise(epoch, total // 4, task.epochs // 2 * epoch, every=max(1, epoch // LOOKS))
    lasso = LASSO if arm.way == "GLP" else 0.0
    schedule = block_thresholds.attach(
        model, arm.blocks, rise, quantiles=quantiles, factor=factor, lasso=lasso, skip=task.skip
    )
    return Training(task, model, seed, schedule)


def cubic(task: Recurrent, arm: Arm, model: nn.Module) -> gradual.Gradual:
    """Attach the library's own schedule, between the same steps."""
    epoch = len(task.loader(0))
    pattern = Block(*arm.blocks, sparsity(task, arm))
    return gradual.attach(model, pattern, begin=epoch, end=task.epochs // 2 * epoch, skip=task.skip, eligibility="any")


def zeros(model: nn.Module) -> float:
    """Return the share of the recurrent weights that is pruned."""
    held = masks.of(model).values()
    pruned = sum(int((~mask.keep).sum()) for mask in held)
    return pruned / max(1, sum(mask.keep.numel() for mask in held))


def row(training: Training, arm: Arm, factor: float) -> Trained:
    """Return what is kept of a training that is over."""
    model, task = training.model, training.task
    pruned = sum(int((~mask.keep).sum()) for mask in masks.of(model).values())
    model.eval()
    with torch.inference_mode():
        value = task.evaluate(model)
    return Trained(
        arm.key,
        training.seed,
        value,
        zeros(model),
        sum(parameter.numel() for parameter in model.parameters()) - pruned,
        width(task, arm),
        factor,
        {name: q for name, q in block_thresholds.quantiles_of(model).items() if name.startswith("recurrent.")},
        training.seconds,
        task.epochs,
        version(),
    )
