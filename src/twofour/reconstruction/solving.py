"""The steps: values of one block after the other follow a distance, then those of the whole model."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from twofour import calls
from twofour.calibration import Batch, Held, blocks, to_device
from twofour.calibration.blocks import Chain
from twofour.calibration.held import MOST_BYTES
from twofour.layers import PrunableWeight
from twofour.progress import Progress, Work
from twofour.reconstruction.distances import answers_apart, leaves_apart, relative
from twofour.reconstruction.pace import Pace

_log = logging.getLogger("twofour.reconstruction")

BLOCK_STEPS, MODEL_STEPS = 100, 600
"""Steps of Adam for each block, and for the whole model afterwards."""
BLOCK_RATE, MODEL_RATE = 0.05, 0.02
"""Learning rates, as a part of the root mean square of each parameter."""
LOOKED = 25
"""Steps of the whole model after which samples held back judge it."""
LITTLE, PATIENCE = 0.003, 2
"""Part of the distance that a look must find won, and how many in a row may not before the rate falls and steps end;
where the first look finds the values no nearer than they were, they end at once."""
COOL = 5
"""One step in so many, at least, is of those in which the rate falls."""
WARM = 20
"""Steps over which the rate rises. Of a block it falls to zero as a cosine then; of the whole model it stays, and falls
as a line at the end."""
BLOCK_SECONDS, MODEL_SECONDS = 400.0, 200.0
"""As `Pace` counts them, of all blocks together and of the whole model: where a step takes long, there are fewer."""
FEWEST = 30
"""Steps below which nothing is begun."""
MODEL_BYTES = 4 << 30
"""Float32 values, gradients and Adam's moments of the whole model at most; of larger ones blocks alone are solved."""
LEAST = 1e-3
"""A parameter whose root mean square is smaller, as a bias of zeros, has the rate of one of this."""
GAIN = 2.0**16
"""What distances of float16 models are multiplied with, so that gradients do not vanish: Adam does not depend on it."""


@dataclass(eq=False)
class Value:
    """One parameter that is solved.

    Attributes:
        solved: The values so far, in the parameter's dtype.
        keep: Where they may be other than zero; None everywhere.
        master: In float32 while they are solved, so that small steps are not lost; None at other times.
    """

    solved: Tensor
    keep: Tensor | None = None
    master: Tensor | None = None

    def begin(self) -> Tensor:
        """Begin to solve, and return what follows the gradient."""
        self.master = self.solved.float().clone().requires_grad_()
        return self.master

    def keep_now(self) -> None:
        """Keep the values as they are now."""
        self.solved = self.now().detach().clone()

    def now(self) -> Tensor:
        """Return the values in the parameter's own dtype, zero where they are pruned."""
        if self.master is None:
            return self.solved
        # A view where nothing is pruned: a caller's autocast goes on with what it casted of a leaf, whatever its steps.
        values = self.master.view_as(self.master) if self.keep is None else self.master * self.keep
        return values.to(self.solved.dtype)


@dataclass(frozen=True)
class Cycle:
    """The steps of a block, whose end stands.

    Nothing ends them early: where the first ones win nothing on samples held back, the last may, as of ResNet-20.
    """

    steps: int

    def due(self, step: int) -> bool:
        """Whether the values are kept after so many steps."""
        return step == self.steps

    def nearer(self, step: int, judge: Callable[[], float]) -> bool:
        """Tell that they are."""
        return True

    def rate(self, step: int) -> float:
        """Return the rate of a step as a part of the full one."""
        return min(1.0, (step + 1) / WARM) * 0.5 * (1 + math.cos(math.pi * step / self.steps))


@dataclass(eq=False)
class Looks:
    """When values that are solved are looked at, by samples held back, and when their rate falls.

    Attributes:
        least: The least distance so far.
        steps: At most so many are made.
        cooling: The step at which the rate begins to fall.
        missed: How many looks in a row found little won.
        won: Whether a look found anything won.
    """

    least: float
    steps: int
    cooling: int = 0
    missed: int = 0
    won: bool = False

    def __post_init__(self) -> None:
        self.cooling = self.steps - self.steps // COOL

    def due(self, step: int) -> bool:
        """Whether they are looked at after so many steps."""
        return step == self.steps or (step % LOOKED == 0 and step <= self.cooling)

    def nearer(self, step: int, judge: Callable[[], float]) -> bool:
        """Note the distance after so many steps; tell whether it is the least so far."""
        apart = judge()
        self.missed = 0 if apart < (1 - LITTLE) * self.least else self.missed + 1
        if nearer := apart < self.least:  # NaN is not
            self.least, self.won = apart, True
        if not self.won:
            self.steps = step
        elif self.missed >= PATIENCE and step < self.cooling:
            self.cooling, self.steps = step, min(self.steps, step + max(step // 2, FEWEST))
        return nearer

    def rate(self, step: int) -> float:
        """Return the rate of a step as a part of the full one."""
        falling = (self.steps - step) / (self.steps - self.cooling) if step >= self.cooling else 1.0
        return min(1.0, (step + 1) / WARM, falling)


@dataclass(frozen=True)
class Part:
    """What is solved together.

    Attributes:
        where: Its name.
        kind: Of its work.
        module: The values of its parameters are solved.
        distance: How far it is from the dense one on the batch of a number.
        steps: At most so many.
        rate: The learning rate, as `BLOCK_RATE`.
        seconds: As `BLOCK_SECONDS`.
        amount: The work of a step.
    """

    where: str
    kind: str
    module: nn.Module
    distance: Callable[[int], Tensor]
    steps: int
    rate: float
    seconds: float
    amount: float


@dataclass(eq=False)
class Run:
    """One reconstruction: what its blocks and the whole model need to know."""

    model: nn.Module
    dense: dict[nn.Parameter, Tensor]
    values: dict[nn.Parameter, Value]
    batches: list[Batch]
    held: Held
    display: Progress
    best: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    least: float = math.inf

    def __post_init__(self) -> None:
        self.device = next(iter(self.values)).device
        self.batches = [Batch(to_device(batch.inputs, self.device)) for batch in self.batches]
        self.sizes = [_values_in(batch) for batch in self.batches]
        self.short: list[str] = []
        self.answers: dict[int, Any] = {}
        self.room = MOST_BYTES
        self.draw = torch.Generator("cpu").manual_seed(0)
        half = any(parameter.dtype == torch.float16 for parameter in self.values)
        self.gain = GAIN if half else 1.0

    @torch.no_grad()
    def judge(self) -> float:
        """Return how far the answers to samples held back are from the dense ones, and remember the nearest values."""
        now = {parameter: value.now().detach() for parameter, value in self.values.items()}
        apart = list[float]()
        with _holding(now):
            for batch, wanted in zip(self.held.batches, self.held.answers, strict=True):
                inputs = to_device(batch.inputs, self.device)
                found = calls.output_leaves(calls.Example.of(inputs).run(self.model))
                apart.append(float(leaves_apart(found, to_device(wanted, self.device), batch.tokens)))
        lost = math.sqrt(sum(apart) / len(apart))
        if lost < self.least:  # NaN is not
            self.best, self.least = {parameter: values.clone() for parameter, values in now.items()}, lost
        return lost

    def solve(self, weights: Sequence[PrunableWeight]) -> None:
        """Solve block by block, where the model is a chain of them, and then the whole model, from the best so far."""
        self.display.begin("reconstructing: looking at the order of the blocks")
        with torch.no_grad():
            chain = blocks.survey(self.model, weights, self.batches, self.device).chain
        size = 4 * 4 * sum(parameter.numel() for parameter in self.values)
        whole = size <= MODEL_BYTES
        self._plan([] if chain is None else [self._share(block) for block in chain.blocks], whole)
        if chain is not None:
            self._chained(chain)
            self.judge()
        for parameter, values in self.best.items():
            self.values[parameter].solved = values
        if not whole:
            _log.info("blocks alone are reconstructed: the whole model would take %.1f GiB beside it", size / 2**30)
            return
        given = self.model, self._answers_apart, MODEL_STEPS, MODEL_RATE, MODEL_SECONDS, 1.0
        self._follow(Part("whole model", "model", *given), partial(Looks, self.least))

    def _plan(self, shares: Sequence[float], whole: bool) -> None:
        """Say how many steps there are, and what they cost beside each other: one of the whole model is one."""
        passes = 2 * sum(shares[:-1]) * len(self.batches) / 3
        steps = {"blocks": BLOCK_STEPS * sum(shares), "outputs": passes, "model": float(MODEL_STEPS * whole)}
        self.work, self.steps = Work(steps), BLOCK_STEPS * len(shares) + MODEL_STEPS * whole
        self.display.begin("reconstructing, steps", self.steps, left=self.work.left)

    def _share(self, block: nn.Module) -> float:
        """Return how much of the values to solve is in a block."""
        inside = {parameter for parameter in block.parameters() if parameter in self.values}
        return sum(p.numel() for p in inside) / sum(p.numel() for p in self.values)

    def _chained(self, chain: Chain) -> None:
        """Solve the blocks, with what the dense ones and the solved ones hand on beside each other."""
        first, count, used = chain.blocks[0], len(chain.blocks), len(self.batches)
        with torch.no_grad():
            pruned = [blocks.inputs_of(self.model, first, batch.inputs) for batch in self.batches]
            with _holding(self.dense):
                dense = [blocks.inputs_of(self.model, first, batch.inputs) for batch in self.batches]
        for number, block in enumerate(chain.blocks, 1):
            where, share = f"block {number} of {count}", self._share(block)
            with torch.no_grad(), _holding(self.dense), self.work.doing("outputs", share * used / 3):
                wanted = [block(*args, **kwargs) for args, kwargs in dense]

            def apart(index: int, block: nn.Module = block, wanted: Sequence[Any] = wanted) -> Tensor:
                found = functional_call(block, self._now(block), *pruned[index], tie_weights=False)
                return relative(blocks.hidden(found), blocks.hidden(wanted[index]), self.batches[index].tokens)

            given = block, apart, BLOCK_STEPS, BLOCK_RATE, BLOCK_SECONDS / count, share
            self._follow(Part(where, "blocks", *given), Cycle)
            if number == count:
                return
            self.display.say(f"{where}, outputs")
            with torch.no_grad(), self.work.doing("outputs", share * used / 3):
                dense = [blocks.handed_on(chain, call, answer) for call, answer in zip(dense, wanted, strict=True)]
                now = self._now(block)
                for index, call in enumerate(pruned):
                    answer = functional_call(block, now, *call, tie_weights=False)
                    pruned[index] = blocks.handed_on(chain, call, answer)

    def _answers_apart(self, index: int) -> Tensor:
        batch = self.batches[index]
        example = calls.Example.of(batch.inputs)
        wanted = self._dense_answer(index, example)
        own = example.copy()
        found = functional_call(self.model, self._now(self.model), own.args, own.kwargs, tie_weights=False)
        return answers_apart(found, wanted, batch.tokens)

    @torch.no_grad()
    def _dense_answer(self, index: int, example: calls.Example) -> Any:
        """Return what the dense model answers to a batch; it is kept where there is room, since each comes again."""
        if index in self.answers:
            return self.answers[index]
        with _holding(self.dense):
            wanted = example.run(self.model)
        size = sum(leaf.nbytes for leaf in calls.output_leaves(wanted) if isinstance(leaf, Tensor))
        if size <= self.room:
            self.answers[index], self.room = wanted, self.room - size
        return wanted

    def _follow(self, part: Part, course: Callable[[int], Cycle | Looks]) -> None:
        """Follow the gradient of a distance over inputs drawn at random, on a course of so many steps at most."""
        values = [self.values[parameter] for parameter in part.module.parameters() if parameter in self.values]
        if not values:
            return
        groups = [{"params": [master := value.begin()], "lr": part.rate * _size(master)} for value in values]
        optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
        rates, step = [group["lr"] for group in optimizer.param_groups], 0
        looks, fit = course(part.steps), part.steps
        pace = Pace(self.device, self.sizes, part.seconds)
        while step < looks.steps:
            for group, full in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = full * looks.rate(step)
            index = int(torch.randint(len(self.batches), (), generator=self.draw, device="cpu"))
            with pace.step(index):
                apart = self._step(part, optimizer, index)
            if apart is None:
                break  # what it was solved to so far is judged as all is
            step += 1
            self.display.advance(f"{part.where}, distance {apart:.4f}")
            if pace.due() and (found := _affordable(part, pace)) != fit:
                looks, fit = course(found), found
            if looks.due(step) and looks.nearer(step, self.judge):
                for value in values:
                    value.keep_now()
        for value in values:
            value.master = None
        self._leave_out(part, part.steps - step)
        if fit < part.steps and step >= fit:
            self.short.append(f"{part.where}: {fit} of {part.steps} steps, of {pace.least:.2g} s each")

    def _step(self, part: Part, optimizer: torch.optim.Optimizer, index: int) -> float | None:
        """Take a step; return the distance before it, None where it is no number or has no gradient to follow."""
        with torch.enable_grad(), self.work.doing(part.kind, part.amount):
            apart = part.distance(index)
            if not apart.requires_grad or not torch.isfinite(apart):
                return None
            optimizer.zero_grad(set_to_none=True)
            (self.gain * apart).backward()
            optimizer.step()
        return float(apart.detach())

    def _leave_out(self, part: Part, steps: int) -> None:
        """Say that steps are not made."""
        self.steps -= steps
        self.work.skip(part.kind, steps * part.amount)
        self.display.move(total=self.steps)

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


def _affordable(part: Part, pace: Pace) -> int:
    """Return how many steps there is time for; 0 where they would be too few."""
    fit = min(part.steps, pace.fit())
    return 0 if fit < min(FEWEST, part.steps) else fit


def _values_in(batch: Batch) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(batch.inputs) if isinstance(leaf, Tensor))


def _size(values: Tensor) -> float:
    return max(float(values.detach().square().mean().sqrt()), LEAST)
