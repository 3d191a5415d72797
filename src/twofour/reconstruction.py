"""Reconstruction: the values that were kept are solved together, so that blocks answer as the dense ones did.

A criterion solves each weight by itself. Here the kept values of a block, its biases and its norms follow the gradient
of the squared distance between what the block answers, given what the pruned blocks before it answered, and what the
dense block answers, given what the dense ones did: so that later blocks mend what earlier ones lost. Then those of the
whole model follow the distance of its answers. It needs inputs alone, no targets, a forward and backward pass of one
block a step, and copies of one block's weights beside the dense ones that are kept for an error's sake anyway.

After Li et al. 2021, "BRECQ" (arXiv 2102.05426), who reconstruct rounded blocks, and Guo et al. 2024, "EBFT" (arXiv
2402.12419), who train the kept values of pruned ones.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from twofour.calibration import Batch, Held, blocks, hold_back, part, to_device
from twofour.calibration.blocks import Chain
from twofour.calibration.gradients import trainable
from twofour.calibration.passes import calibrating, explained
from twofour.calls import Example, output_leaves
from twofour.criteria.solver import Solved
from twofour.errors import RecipeError
from twofour.layers import PrunableWeight
from twofour.progress import Progress

_log = logging.getLogger("twofour.reconstruction")

BLOCK_STEPS, MODEL_STEPS = 100, 600
"""Steps of Adam for each block, and for the whole model afterwards."""
BLOCK_RATE, MODEL_RATE = 0.05, 0.02
"""Learning rates, as a part of the root mean square of each parameter."""
JUDGED = 6
"""How often the whole model is judged while it is solved; it ends where it got worse."""
WARM = 20
"""Steps over which the rate rises; then it falls to zero as a cosine."""
SAMPLES = 16
"""Samples of a step at most."""
LEAST = 1e-3
"""A parameter whose root mean square is smaller, as a bias of zeros, has the rate of one of this."""

Write = Callable[[nn.Parameter, Tensor], None]


@dataclass(frozen=True)
class Report:
    """What reconstruction won.

    Attributes:
        before: How far the answers of the pruned model were from the dense one's on samples that it did not see,
            relative to their size.
        after: The same afterwards.
        kept: Whether it stands: not where `after` is no smaller.
        samples: How many samples judged.
        seconds: What it took.
    """

    before: float
    after: float
    kept: bool
    samples: int
    seconds: float

    def __str__(self) -> str:
        done = "kept" if self.kept else "no smaller, so the values of the criterion stand"
        return (
            f"reconstructed: answers to {self.samples} samples held back are {self.after:.4f} of their size from the "
            f"dense ones, {self.before:.4f} before; {done} ({self.seconds:.0f} s)"
        )


Reconstruct = Callable[[Solved], Report]
"""What solves weights together that a criterion has solved one by one."""


def prepared(model: nn.Module, batches: Sequence[Batch] | None, progress: bool) -> Reconstruct:
    """Return what reconstructs a model by its solved weights later; the dense model answers the data held back now.

    Args:
        model: The dense model.
        batches: What `calibration.take` returned.
        progress: Show how far it is on standard error.

    Raises:
        RecipeError: There are no data.
        DataError: The model does not run on them.
    """
    if batches is None:
        raise RecipeError(
            "there is nothing to reconstruct by",
            got="reconstruct=True without data",
            wanted="data: inputs as the model takes them",
            remedy="data=loader; targets are not needed",
        )
    used, held = hold_back(model, batches)

    def run(solved: Solved) -> Report:
        pruned = [(choice.weight, choice.keep) for choice in solved.choices]
        with Progress(progress) as display:
            return reconstruct(model, pruned, solved.before, used, held, solved.write, display=display)

    return run


def reconstruct(
    model: nn.Module,
    pruned: Sequence[tuple[PrunableWeight, Tensor]],
    dense: Mapping[nn.Parameter, Tensor],
    batches: Sequence[Batch],
    held: Held,
    write: Write,
    *,
    display: Progress | None = None,
) -> Report:
    """Solve the kept values of pruned weights together, with the biases and norms beside them.

    Args:
        model: Its pruned weights are zero outside of their masks. It runs in evaluation mode; its modes come back.
        pruned: Each weight with its mask, bool of the weight's shape.
        dense: What these parameters held before.
        batches: What `calibration.take` returned: inputs to follow.
        held: Other inputs, with the dense model's answers, that judge.
        write: Gives a parameter new values; called at the end, once each.
        display: Shows progress.

    Raises:
        DataError: The model does not run on the data.
    """
    begin = time.perf_counter()
    display = display or Progress(shown=False)
    run = _Run(model, dict(dense), _values(model, pruned), _small(batches), held, display)
    with calibrating(model), trainable(model, []):
        before = run.judge()
        run.solve([weight for weight, _ in pruned])
    for parameter, values in run.best.items():
        write(parameter, values)
    report = Report(before, run.least, run.least < before, held.samples, time.perf_counter() - begin)
    _log.info("%s", report)
    return report


@dataclass(eq=False)
class _Value:
    """One parameter that is solved: in float32, whatever its dtype, so that small steps are not lost."""

    parameter: nn.Parameter
    keep: Tensor | None = None
    master: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.master = self.parameter.detach().float().clone().requires_grad_()

    def now(self) -> Tensor:
        """Return the values in the parameter's own dtype, zero where they are pruned."""
        values = self.master if self.keep is None else self.master * self.keep
        return values.to(self.parameter.dtype)

    def rate(self, share: float) -> dict[str, Any]:
        """Return a group of Adam's."""
        size = float(self.master.detach().square().mean().sqrt())
        return {"params": [self.master], "lr": share * max(size, LEAST)}


def _values(model: nn.Module, pruned: Sequence[tuple[PrunableWeight, Tensor]]) -> dict[nn.Parameter, _Value]:
    """Return the pruned weights and every parameter of one axis."""
    values = {weight.parameter: _Value(weight.parameter, keep) for weight, keep in pruned}
    flat = (p for p in model.parameters() if p.ndim == 1 and p.is_floating_point() and not p.is_meta)
    return values | {parameter: _Value(parameter) for parameter in flat if parameter not in values}


def _small(batches: Sequence[Batch]) -> list[Any]:
    """Return the inputs in parts of a step's size, as tensors that gradients may be taken through."""
    parts = [part(b, start, start + SAMPLES) for b in batches for start in range(0, max(b.samples, 1), SAMPLES)]
    return [tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch.inputs) for batch in parts]


@dataclass(eq=False)
class _Run:
    """One reconstruction: what its blocks and the whole model need to know."""

    model: nn.Module
    dense: dict[nn.Parameter, Tensor]
    values: dict[nn.Parameter, _Value]
    inputs: list[Any]
    held: Held
    display: Progress
    best: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    least: float = math.inf

    def __post_init__(self) -> None:
        device = next(iter(self.values)).device
        self.inputs = [to_device(inputs, device) for inputs in self.inputs]
        self.draw = torch.Generator("cpu").manual_seed(0)

    def judge(self) -> float:
        """Return how far the answers to samples held back are from the dense ones, and remember the nearest values."""
        now = {parameter: value.now().detach().clone() for parameter, value in self.values.items()}
        with _holding(now):
            lost = self.held.lost(self.model)
        if lost < self.least:  # NaN is not
            self.best, self.least = now, lost
        return lost

    def solve(self, weights: Sequence[PrunableWeight]) -> None:
        """Solve block by block, where the model is a chain of them, and then the whole model."""
        self.display.begin("reconstructing, steps", None)
        with torch.no_grad(), explained():
            batches = [Batch(inputs) for inputs in self.inputs]
            chain = blocks.survey(self.model, weights, batches, next(iter(self.values)).device).chain
        count = len(chain.blocks) if chain is not None else 0
        self.display.begin("reconstructing, steps", count * BLOCK_STEPS + MODEL_STEPS)
        if chain is not None:
            self._chained(chain)
            self.judge()
        self._restart()
        self._follow(self.model, self._answers_apart, MODEL_STEPS, MODEL_RATE, "whole model", MODEL_STEPS // JUDGED)

    def _restart(self) -> None:
        """Go on from the best values so far."""
        for parameter, value in self.values.items():
            if parameter in self.best:
                value.master = self.best[parameter].float().clone().requires_grad_()

    def _chained(self, chain: Chain) -> None:
        """Solve the blocks, with what the dense ones and the solved ones hand on beside each other."""
        first = chain.blocks[0]
        with torch.no_grad(), explained():
            pruned = [blocks.inputs_of(self.model, first, inputs) for inputs in self.inputs]
            with _holding(self.dense):
                dense = [blocks.inputs_of(self.model, first, inputs) for inputs in self.inputs]
        for number, block in enumerate(chain.blocks, 1):
            with torch.no_grad(), explained(), _holding(self.dense):
                wanted = [block(*args, **kwargs) for args, kwargs in dense]

            def apart(index: int, block: nn.Module = block, wanted: Sequence[Any] = wanted) -> Tensor:
                found = functional_call(block, self._now(block), *pruned[index], tie_weights=False)
                return _relative(blocks.hidden(found), blocks.hidden(wanted[index]))

            self._follow(block, apart, BLOCK_STEPS, BLOCK_RATE, f"block {number} of {len(chain.blocks)}")
            if number == len(chain.blocks):
                return
            dense = [blocks.handed_on(chain, call, answer) for call, answer in zip(dense, wanted, strict=True)]
            with torch.no_grad(), explained():
                now = self._now(block)
                for index, call in enumerate(pruned):
                    answer = functional_call(block, now, *call, tie_weights=False)
                    pruned[index] = blocks.handed_on(chain, call, answer)

    def _answers_apart(self, index: int) -> Tensor:
        example = Example.of(self.inputs[index])
        with torch.no_grad(), _holding(self.dense):
            wanted = self.model(*example.args, **example.kwargs)
        return _apart(
            functional_call(self.model, self._now(self.model), example.args, example.kwargs, tie_weights=False), wanted
        )

    def _follow(
        self,
        module: nn.Module,
        distance: Callable[[int], Tensor],
        steps: int,
        rate: float,
        where: str,
        judged: int | None = None,
    ) -> None:
        """Follow the gradient of a distance over inputs drawn at random; end early where a judgement got worse."""
        values = [self.values[parameter] for parameter in module.parameters() if parameter in self.values]
        if not values:
            return
        optimizer = torch.optim.Adam([value.rate(rate) for value in values], betas=(0.9, 0.99))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _cycle(step, steps))
        for step in range(1, steps + 1):
            index = int(torch.randint(len(self.inputs), (), generator=self.draw, device="cpu"))
            with torch.enable_grad(), explained():
                apart = distance(index)
            if not apart.requires_grad or not torch.isfinite(apart):
                return  # what it was solved to so far is judged as all is
            optimizer.zero_grad(set_to_none=True)
            apart.backward()
            optimizer.step()
            schedule.step()
            self.display.advance(f"{where}, distance {float(apart.detach()):.4f}")
            if judged and step % judged == 0 and self.judge() > self.least:
                return

    def _now(self, module: nn.Module) -> dict[str, Tensor]:
        """Return what the module's parameters are solved to, by their names: one of each module that it has twice."""
        return {
            f"{prefix}.{attribute}".lstrip("."): self.values[parameter].now()
            for prefix, inner in module.named_modules()
            for attribute, parameter in inner.named_parameters(recurse=False, remove_duplicate=False)
            if parameter in self.values
        }


@contextmanager
def _holding(values: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Let parameters hold other values inside."""
    before = [(parameter, parameter.data) for parameter in values]
    try:
        for parameter, other in values.items():
            parameter.data = other
        yield
    finally:
        for parameter, own in before:
            parameter.data = own


def _cycle(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / WARM) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _apart(found: Any, wanted: Any) -> Tensor:
    """Return how far answers are apart: of `logits` the divergence of their softmax, else the distance of each leaf."""
    scores = getattr(found, "logits", None)
    if isinstance(scores, Tensor) and scores.ndim >= 2 and scores.shape[-1] > 1:
        ours, dense = (answer.flatten(0, -2).float().log_softmax(-1) for answer in (scores, wanted.logits))
        return F.kl_div(ours, dense, reduction="batchmean", log_target=True)
    leaves = zip(output_leaves(found), output_leaves(wanted), strict=True)
    terms = [_relative(one, other) for one, other in leaves if isinstance(one, Tensor) and one.requires_grad]
    return torch.stack(terms).mean() if terms else torch.zeros((), dtype=torch.float32, device="cpu")


def _relative(found: Any, wanted: Any) -> Tensor:
    wanted = wanted.float()
    return (found.float() - wanted).square().sum() / wanted.square().sum().clamp_min(1e-12)
