"""The steps: values of one block after the other follow a distance, then those of the whole model."""

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

from twofour import calls
from twofour.calibration import Batch, Held, blocks, to_device
from twofour.calibration.blocks import Chain
from twofour.layers import PrunableWeight
from twofour.progress import Progress
from twofour.reconstruction.distances import answers_apart, leaves_apart, relative

_log = logging.getLogger("twofour.reconstruction")

BLOCK_STEPS, MODEL_STEPS = 100, 600
"""Steps of Adam for each block, and for the whole model afterwards."""
BLOCK_RATE, MODEL_RATE = 0.05, 0.02
"""Learning rates, as a part of the root mean square of each parameter."""
JUDGED = 6
"""How often the whole model is judged while it is solved; it ends where it got worse."""
WARM = 20
"""Steps over which the rate rises; then it falls to zero as a cosine."""
BLOCK_SECONDS, MODEL_SECONDS = 400.0, 200.0
"""Of all blocks together, and of the whole model: where a step takes long, there are fewer."""
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

    def end(self) -> None:
        """Keep the values, and let go of the rest."""
        self.solved, self.master = self.now().detach().clone(), None

    def now(self) -> Tensor:
        """Return the values in the parameter's own dtype, zero where they are pruned."""
        if self.master is None:
            return self.solved
        # A view where nothing is pruned: a caller's autocast goes on with what it casted of a leaf, whatever its steps.
        values = self.master.view_as(self.master) if self.keep is None else self.master * self.keep
        return values.to(self.solved.dtype)


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
        self.display.begin("reconstructing, steps", None)
        with torch.no_grad():
            chain = blocks.survey(self.model, weights, self.batches, self.device).chain
        count = len(chain.blocks) if chain is not None else 0
        self.display.begin("reconstructing, steps", count * BLOCK_STEPS + MODEL_STEPS)
        if chain is not None:
            self._chained(chain)
            self.judge()
        for parameter, values in self.best.items():
            self.values[parameter].solved = values
        size = 4 * 4 * sum(parameter.numel() for parameter in self.values)
        if size > MODEL_BYTES:
            _log.info("blocks alone are reconstructed: the whole model would take %.1f GiB beside it", size / 2**30)
            return
        self._follow(
            self.model, self._answers_apart, MODEL_STEPS, MODEL_RATE, MODEL_SECONDS, "whole model", judged=True
        )

    def _chained(self, chain: Chain) -> None:
        """Solve the blocks, with what the dense ones and the solved ones hand on beside each other."""
        first, count = chain.blocks[0], len(chain.blocks)
        with torch.no_grad():
            pruned = [blocks.inputs_of(self.model, first, batch.inputs) for batch in self.batches]
            with _holding(self.dense):
                dense = [blocks.inputs_of(self.model, first, batch.inputs) for batch in self.batches]
        for number, block in enumerate(chain.blocks, 1):
            with torch.no_grad(), _holding(self.dense):
                wanted = [block(*args, **kwargs) for args, kwargs in dense]

            def apart(index: int, block: nn.Module = block, wanted: Sequence[Any] = wanted) -> Tensor:
                found = functional_call(block, self._now(block), *pruned[index], tie_weights=False)
                return relative(blocks.hidden(found), blocks.hidden(wanted[index]), self.batches[index].tokens)

            self._follow(block, apart, BLOCK_STEPS, BLOCK_RATE, BLOCK_SECONDS / count, f"block {number} of {count}")
            if number == count:
                return
            dense = [blocks.handed_on(chain, call, answer) for call, answer in zip(dense, wanted, strict=True)]
            with torch.no_grad():
                now = self._now(block)
                for index, call in enumerate(pruned):
                    answer = functional_call(block, now, *call, tie_weights=False)
                    pruned[index] = blocks.handed_on(chain, call, answer)

    def _answers_apart(self, index: int) -> Tensor:
        batch = self.batches[index]
        example = calls.Example.of(batch.inputs)
        with torch.no_grad(), _holding(self.dense):
            wanted = example.run(self.model)
        own = example.copy()
        found = functional_call(self.model, self._now(self.model), own.args, own.kwargs, tie_weights=False)
        return answers_apart(found, wanted, batch.tokens)

    def _follow(
        self,
        module: nn.Module,
        distance: Callable[[int], Tensor],
        steps: int,
        rate: float,
        seconds: float,
        where: str,
        *,
        judged: bool = False,
    ) -> None:
        """Follow the gradient of a distance over inputs drawn at random; end early where a judgement got worse."""
        values = [self.values[parameter] for parameter in module.parameters() if parameter in self.values]
        if not values:
            return
        begin = time.perf_counter()
        groups = [{"params": [master := value.begin()], "lr": rate * _size(master)} for value in values]
        optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
        rates, step = [group["lr"] for group in optimizer.param_groups], 0
        while step < steps:
            index = int(torch.randint(len(self.batches), (), generator=self.draw, device="cpu"))
            with torch.enable_grad():
                apart = distance(index)
                if not apart.requires_grad or not torch.isfinite(apart):
                    break  # what it was solved to so far is judged as all is
                optimizer.zero_grad(set_to_none=True)
                (self.gain * apart).backward()
            for group, full in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = full * _cycle(step, steps)
            optimizer.step()
            step += 1
            self.display.advance(f"{where}, distance {float(apart.detach()):.4f}")
            if step == 1 and (steps := self._affordable(steps, seconds, time.perf_counter() - begin, where)) == 0:
                break
            if judged and step % max(1, steps // JUDGED) == 0 and not self.judge() <= self.least:
                break
        if steps:
            for value in values:
                value.end()
        for value in values:
            value.master = None

    def _affordable(self, steps: int, seconds: float, first: float, where: str) -> int:
        """Return how many steps there is time for, told by the first one; 0 where they would be too few."""
        fit = min(steps, int(seconds / max(first, 1e-9)))
        if fit < min(FEWEST, steps):
            _log.info("%s is not reconstructed: a step takes %.1f s, and there are %.0f s", where, first, seconds)
            return 0
        if fit < steps:
            _log.info("%s has %d of %d steps: one takes %.1f s", where, fit, steps, first)
        return fit

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


def _size(values: Tensor) -> float:
    return max(float(values.detach().square().mean().sqrt()), LEAST)


def _cycle(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / WARM) * 0.5 * (1 + math.cos(math.pi * step / steps))
