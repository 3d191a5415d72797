"""Nets that lose channels and blocks half-way through their training, beside the dense net trained as long.

All cut nets of a seed have at most the parameters that the first strength of the learned proportions leaves.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from records import Shrunk, version
from tasks import Task
from twofour import training
from twofour.structure import shrink
from twofour.training import gates

STRENGTHS = {"learned": 2.8, "learned, stronger": 5.0}
"""Key of a row -> strength. The first sets the budget of the others."""
ARMS = ("dense", *STRENGTHS, "slimming", "L1", "random", "small")


def measured(task: Task, seed: int, kept: Container[str] = ()) -> Iterable[Shrunk]:
    """Yield the rows of one seed: all of them, since each follows from the first."""
    yield from _Seed(task, seed).rows()


@dataclass(eq=False)
class _Seed:
    task: Task
    seed: int
    begin: float = field(default_factory=time.perf_counter)

    def rows(self) -> Iterable[Shrunk]:
        start = self.task.network(self.seed)
        half = self._trained(copy.deepcopy(start), 0)
        first = time.perf_counter() - self.begin
        yield self._row("dense", self._trained(copy.deepcopy(half), 1))
        limit, learned_net = 0, start
        for key, strength in STRENGTHS.items():
            model = self._trained(copy.deepcopy(start), 0, scheme=gates.during(self._example(), strength))
            small = gates.cut(model.eval(), self._example())
            if not limit:
                limit, learned_net = _size(small), copy.deepcopy(small)
            yield self._row(key, self._trained(small, 1), gates.learned(model))
        slim = self._trained(copy.deepcopy(start), 0, penalty=_pull(self.task, STRENGTHS["learned"]))
        slimming = time.perf_counter() - self.begin
        generator = torch.Generator().manual_seed(self.seed)
        for key, model, score, uniform in (
            ("slimming", slim, _scales, False),
            ("L1", half, _l1, True),
            ("random", half, lambda m, g: torch.rand(g.size, generator=generator), True),
        ):
            self.begin = time.perf_counter() - (first if model is half else slimming)
            yield self._row(key, self._trained(self._cut(model, score, uniform, limit), 1))
        small = _fresh(learned_net, self.seed)
        yield self._row("small", self._trained(self._trained(small, 0), 1))

    def _trained(self, model: nn.Module, half: int, scheme: object = None, penalty: float = 0.0) -> nn.Module:
        """Train for the epochs of one half; a penalty is Network Slimming's, on the scales of all inner batch norms."""
        given = {
            "optimizer": self.task.optimizer,
            "schedule": self.task.schedule,
            "epochs": self.task.epochs,
            "seed": self.seed + 1000 * half,
            "clip_norm": 1.0,
            "progress": False,
        }
        loader, loss = self.task.loader(self.seed), self.task.loss
        if scheme is not None:
            training.finetune(model, loader, loss=loss, scheme=scheme, **given)  # type: ignore[arg-type]
        else:
            scales = [_norm(model, g) for g in _inner(shrink.channels(model, self._example()))] if penalty else []
            pulled = lambda out, y: loss(out, y) + penalty * sum(scale.abs().sum() for scale in scales)  # noqa: E731
            training.train(model, loader, loss=pulled if penalty else loss, name="half", **given)  # type: ignore[arg-type]
        return model

    def _cut(
        self, model: nn.Module, score: Callable[[nn.Module, shrink.Cuttable], Tensor], uniform: bool, limit: int
    ) -> nn.Module:
        """Cut the inner channels of least score, of each layer alike or of all layers together, down to a size."""
        found = shrink.channels(model, self._example())
        groups = _inner(found)
        scores = {group.name: score(model, group) for group in groups}
        if uniform:  # places in the layer's own order: the same share of each goes
            scores = {name: values.argsort().argsort() / len(values) for name, values in scores.items()}
        pool = torch.cat(list(scores.values())).sort().values
        low, high = 0, len(pool) - 1
        while low < high:  # the least threshold that meets the size
            middle = (low + high) // 2
            fits = _size(shrink.cut(model, found.plan(_above(scores, float(pool[middle]))))) <= limit
            low, high = (low, middle) if fits else (middle + 1, high)
        plan = found.plan(_above(scores, float(pool[low])))
        return shrink.absorbed(model.eval(), plan, self._example())[0]

    def _row(self, key: str, model: nn.Module, found: gates.Learned | None = None) -> Shrunk:
        model.eval()
        with torch.inference_mode():
            value = self.task.evaluate(model)
        widths = {name: list(pair) for name, pair in found.widths.items()} if found else {}
        seconds, self.begin = time.perf_counter() - self.begin, time.perf_counter()
        gone = list(found.layers) if found else []
        return Shrunk(key, self.seed, value, _size(model), widths, gone, seconds, self.task.epochs, version())

    def _example(self) -> Tensor:
        return self.task.calibration()[0][:32]


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


def _pull(task: Task, strength: float) -> float:
    """Return the penalty whose pull on a scale over one half is what `strength` is for gates.

    Under SGD a penalty s moves a free scale by s times the sum of learning rates over 1 - momentum; the gates' pull is
    strength times the mean of the learning rates over their peak.
    """
    steps, rate, momentum = task.epochs * len(task.loader(0)), 0.1, 0.9
    return strength * (1 - momentum) / (steps * rate)


@torch.no_grad()
def _fresh(model: nn.Module, seed: int) -> nn.Module:
    """Return a net of the same shapes with random weights."""
    torch.manual_seed(seed)
    model = copy.deepcopy(model)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]
    return model
