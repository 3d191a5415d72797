"""Nets that lose channels and blocks while they train, beside the dense net trained as long.

All cut nets of a seed have at most the parameters that the first strength of the learned proportions leaves.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from records import Shrunk, version
from tasks import Task
from tasks.base import one_cycle
from twofour import training
from twofour.structure import shrink
from twofour.training import Taught, channel_thresholds, distilled, gates

LEARNED = ("learned", "learned, stronger")
"""Rows of the task's strengths. The first sets the budget of the others."""


def arms(task: Task) -> tuple[str, ...]:
    """Return the keys of a task's rows."""
    taught = ["dense, taught"] if task.taught else []
    return ("dense", *taught, *LEARNED, "thresholds", "slimming", "L1", "random", "small")


class Made(NamedTuple):
    """A net, the seconds of all that was trained for it, and what its gates learned."""

    model: nn.Module
    seconds: float
    found: gates.Learned | None = None


def measured(task: Task, seed: int, kept: Mapping[str, Shrunk] | None = None) -> Iterable[Shrunk]:
    """Yield the rows of one seed but those that are kept."""
    yield from _Seed(task, seed, kept or {}).rows()


class _Seed:
    def __init__(self, task: Task, seed: int, kept: Mapping[str, Shrunk]) -> None:
        self.task, self.seed, self.kept = task, seed, kept
        self.example = task.calibration()[0][:32]
        self.epochs = task.epochs, task.after
        self.steps = task.epochs * len(task.loader(seed))
        self._strengths: dict[str, float] = dict(zip(LEARNED, task.strengths, strict=True))
        self._learned: dict[str, Made] = {}

    def rows(self) -> Iterable[Shrunk]:
        for key in arms(self.task):
            if key not in self.kept:
                yield self._row(key, self._made(key))

    def _made(self, key: str) -> Made:
        random = torch.Generator().manual_seed(self.seed)
        match key:
            case "dense":
                return self._large
            case "dense, taught":
                return self._taught(self._before)
            case "thresholds":
                return self._taught(self._within())
            case "slimming":
                return self._taught(self._cut(self._slim, _scales, uniform=False))
            case "L1":
                return self._taught(self._cut(self._before, _l1, uniform=True))
            case "random":
                return self._taught(self._cut(self._before, lambda _, group: torch.rand(group.size, generator=random)))
            case "small":
                return self._taught(self._trained(Made(_fresh(self._narrow("learned").model, self.seed), 0.0), 0))
        return self._taught(self._narrow(key))

    @cached_property
    def _start(self) -> nn.Module:
        return self.task.network(self.seed)

    @cached_property
    def _before(self) -> Made:
        """The dense net before the cut."""
        return self._trained(Made(self._start, 0.0), 0)

    @cached_property
    def _large(self) -> Made:
        """The dense net at its end, which teaches the others."""
        return self._trained(self._before, 1)

    @cached_property
    def _slim(self) -> Made:
        """The net before the cut, with Network Slimming's penalty."""
        return self._trained(
            Made(self._start, 0.0), 0, penalty=_pull(self.task, self.steps, self._strengths["learned"])
        )

    def _narrow(self, key: str) -> Made:
        """Return the net that gates of a strength leave."""
        if key not in self._learned:
            scheme = gates.during(self.example, self._strengths[key], share=self.task.share, multiple=1)
            large = self._trained(Made(self._start, 0.0), 0, scheme=scheme)
            small = gates.cut(large.model.eval(), self.example)
            self._learned[key] = Made(small, large.seconds, gates.learned(large.model))
        return self._learned[key]

    def _within(self) -> Made:
        """Return the net that learned thresholds leave within the limit, biases that take constants up included."""
        biases = sum(module.out_channels for module in self._start.modules() if isinstance(module, nn.Conv2d))
        budget = (self._limit - biases) / _size(self._start)
        scheme = channel_thresholds.during(self.example, budget, share=self.task.share, multiple=1)
        large = self._trained(Made(self._start, 0.0), 0, scheme=scheme)
        small = channel_thresholds.cut(large.model.eval(), self.example)
        return Made(small, large.seconds, gates.learned(large.model))

    @property
    def _limit(self) -> int:
        return self.kept["learned"].parameters if "learned" in self.kept else _size(self._narrow("learned").model)

    def _taught(self, made: Made) -> Made:
        """Train behind the cut, the dense net the teacher where the task has one."""
        return self._trained(made, 1, teacher=self._large.model if self.task.taught else None)

    def _trained(
        self,
        made: Made,
        part: int,
        scheme: training.gates.Gates | object = None,
        penalty: float = 0.0,
        teacher: nn.Module | None = None,
    ) -> Made:
        """Train a copy for the epochs before the cut, part 0, or behind it, part 1.

        A penalty is Network Slimming's, on the scales of all inner batch norms.
        """
        begin, model = time.perf_counter(), copy.deepcopy(made.model)
        loader, loss = self.task.loader(self.seed), self.task.loss
        if teacher is not None:
            loader, loss = Taught(loader, teacher), distilled(loss)
        given = {
            "optimizer": self.task.optimizer,
            "schedule": lambda optimizer: self._schedule(optimizer, part),
            "epochs": self.epochs[part],
            "seed": self.seed + 1000 * part,
            "clip_norm": 1.0,
            "progress": False,
        }
        if scheme is not None:
            training.finetune(model, loader, loss=loss, scheme=scheme, **given)  # type: ignore[arg-type]
        else:
            scales = [_norm(model, g) for g in _inner(shrink.channels(model, self.example))] if penalty else []
            pulled = lambda out, y: loss(out, y) + penalty * sum(scale.abs().sum() for scale in scales)  # noqa: E731
            training.train(model, loader, loss=pulled if penalty else loss, name="part", **given)  # type: ignore[arg-type]
        return Made(model, made.seconds + time.perf_counter() - begin, made.found)

    def _schedule(self, optimizer: Optimizer, part: int) -> LRScheduler:
        if self.task.restarts:
            return self.task.schedule(optimizer)
        return one_cycle(optimizer, sum(self.epochs) * len(self.task.loader(self.seed)), begin=part * self.steps)

    def _cut(self, made: Made, score: Callable[[nn.Module, shrink.Cuttable], Tensor], uniform: bool = True) -> Made:
        """Cut the inner channels of least score, of each layer alike or of all layers together, down to the limit."""
        model = made.model
        found = shrink.channels(model, self.example)
        groups = _inner(found)
        scores = {group.name: score(model, group) for group in groups}
        if uniform:  # places in the layer's own order: the same share of each goes
            scores = {name: values.argsort().argsort() / len(values) for name, values in scores.items()}
        pool = torch.cat(list(scores.values())).sort().values
        low, high = 0, len(pool) - 1
        while low < high:  # the least threshold that meets the size
            middle = (low + high) // 2
            fits = _size(shrink.cut(model, found.plan(_above(scores, float(pool[middle]))))) <= self._limit
            low, high = (low, middle) if fits else (middle + 1, high)
        plan = found.plan(_above(scores, float(pool[low])))
        return Made(shrink.absorbed(model.eval(), plan, self.example)[0], made.seconds)

    def _row(self, key: str, made: Made) -> Shrunk:
        model, found = made.model.eval(), made.found
        with torch.inference_mode():
            value = self.task.evaluate(model)
        widths = {name: list(pair) for name, pair in found.widths.items()} if found else {}
        gone = list(found.layers) if found else []
        return Shrunk(key, self.seed, value, _size(model), widths, gone, made.seconds, self.task.epochs, version())


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _above(scores: Mapping[str, Tensor], threshold: float) -> dict[str, Tensor]:
    """Keep what is above a threshold, the best of each layer in any case."""
    return {name: (values > threshold) | (values == values.max()) for name, values in scores.items()}


def _inner(found: shrink.Channels) -> list[shrink.Cuttable]:
    """Return the channels between two layers."""
    return [group for group in found.groups if group.exact and not group.group.stream]


def _norm(model: nn.Module, group: shrink.Cuttable) -> nn.Parameter:
    """Return the scale of a group's batch norm."""
    layers = (model.get_submodule(place.name.rpartition(".")[0]) for place in group.group.places)
    return next(layer.weight for layer in layers if isinstance(layer, nn.BatchNorm2d))


def _scales(model: nn.Module, group: shrink.Cuttable) -> Tensor:
    """Liu et al. 2017 (arXiv 1708.06519): the size of each channel's batch norm scale."""
    return _norm(model, group).detach().abs()


def _l1(model: nn.Module, group: shrink.Cuttable) -> Tensor:
    """Li et al. 2017 (arXiv 1608.08710): the L1 norm of each filter."""
    return model.get_submodule(_layer(group)).get_parameter("weight").detach().abs().flatten(1).sum(1)


def _layer(group: shrink.Cuttable) -> str:
    return group.name.partition(".weight")[0]


def _pull(task: Task, steps: int, strength: float) -> float:
    """Return the penalty whose pull on a scale before the cut is what `strength` is for gates.

    Under SGD a penalty s moves a free scale by s times the sum of learning rates over 1 - momentum; the gates' pull is
    strength times the mean of the learning rates over their peak.
    """
    held = task.optimizer([nn.Parameter(torch.ones(1))]).param_groups[0]
    return strength * (1 - held["momentum"]) / (steps * held["lr"])


@torch.no_grad()
def _fresh(model: nn.Module, seed: int) -> nn.Module:
    """Return a net of the same shapes with random weights."""
    torch.manual_seed(seed)
    model = copy.deepcopy(model)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]
    return model
