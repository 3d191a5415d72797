"""times: what a layer takes at other widths on this machine, measured on a grid and interpolated between.

Layers and models are measured as `compile` makes them, since that is how they will run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from twofour import calls, measure, native
from twofour.compiler import compile
from twofour.errors import TwofourError, explained
from twofour.layers import PrunableWeight, walk
from twofour.shrinking.budget import answer_of, first_names, multiplying

_log = logging.getLogger("twofour.shrinking")

SHARES = (1.0, 0.5, 0.25)
"""Shares of a layer's inputs and of its outputs at which it is measured, of those that may get fewer."""

CONVOLUTIONS: Mapping[str, Any] = {"conv1d": nn.Conv1d, "conv2d": nn.Conv2d, "conv3d": nn.Conv3d}

Cell = tuple[nn.Module, Tensor]
"""A layer of some width, and what it reads."""


class Clock:
    """How models are timed on an example: as `compile` makes them in float32, else as torch runs them.

    Attributes:
        reason: Why as torch runs them; "" where they are compiled.
        large: The large model, to be timed.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        self.example, self.reason = calls.Example.of(example), ""
        if any(parameter.device.type != "cpu" for parameter in model.parameters()):
            self.reason = "compiled models are timed on the CPU alone"
        try:
            self.large = self.made(model)
        except TwofourError as error:
            self.reason = explained(error)
            self.large = model
        if self.reason:
            _log.warning("a budget of time counts that of torch's own layers: %s", self.reason)

    @property
    def told(self) -> str:
        """What is timed, in words."""
        threads = "1 thread" if (count := torch.get_num_threads()) == 1 else f"{count} threads"
        return f"as torch runs it ({self.reason}), {threads}" if self.reason else f"compiled in float32, {threads}"

    def made(self, model: nn.Module) -> nn.Module:
        """Return a model as it is timed; it stays as it is.

        Raises:
            TwofourError: It cannot be compiled, where the large one is.
        """
        if self.reason:
            return model
        with calls.without_cache(model):
            return compile(model, self.example, tokens=(1,))

    def ms(self, models: Mapping[str, nn.Module]) -> dict[str, float]:
        """Return the median milliseconds of one forward pass of each, in turn, in evaluation mode."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for model in models.values():
                stack.enter_context(calls.evaluating(model))
                stack.enter_context(calls.without_cache(model))
            return _ms({name: partial(self.example.run, model) for name, model in models.items()})

    def layers(self, cells: Mapping[str, Cell]) -> dict[str, float]:
        """Return the milliseconds of layers, each on its input: on the fastest kernel, or as torch runs them."""
        found: dict[str, float] = {}
        if cells and not self.reason:
            names = list(cells)
            plan: Any = compile(_Cells(cells), [x for _, x in cells.values()], tokens=(1,), graph=False).plan
            measured = {entry.name: entry.dense_ms for entry in plan.layers}
            listed = {name: measured.get(f"parts.{number}") for number, name in enumerate(names)}
            found = {name: ms for name, ms in listed.items() if ms is not None}
        with torch.no_grad():
            return found | _ms({name: partial(*cell) for name, cell in cells.items() if name not in found})


class _Cells(nn.Module):
    """Layers side by side, each with an input of its own."""

    def __init__(self, cells: Mapping[str, Cell]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(layer for layer, _ in cells.values())

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return [part(x) for part, x in zip(self.parts, inputs, strict=True)]


@dataclass(frozen=True, eq=False)
class Grid:
    """Milliseconds of one layer at shares of its outputs (rows) and inputs (columns), as `SHARES` has them."""

    ms: tuple[tuple[float, ...], ...]

    def at(self, outputs: float, inputs: float) -> float:
        """Return the milliseconds at shares of the layer's outputs and inputs, bilinear, below in proportion."""
        return _between([_between(row, inputs) for row in self.ms], outputs)

    def times(self, share: float) -> Grid:
        """Return the grid with every time multiplied by a number."""
        return Grid(tuple(tuple(share * ms for ms in row) for row in self.ms))


def _between(values: Any, share: float) -> float:
    """Interpolate between values at `SHARES`."""
    if share <= SHARES[-1]:
        return values[-1] * share / SHARES[-1]
    index = next(i for i in range(1, len(SHARES)) if share >= SHARES[i])
    high, low = SHARES[index - 1], SHARES[index]
    part = (share - low) / (high - low)
    return values[index] + (values[index - 1] - values[index]) * part


@dataclass(frozen=True, eq=False)
class Times:
    """What a model takes, layer by layer.

    Attributes:
        whole: Milliseconds of one forward pass of the example.
        grids: Name of a weight -> what its layer takes at other widths.
        rest: Name of a weight -> its part of what is left of the whole, in proportion to the values that it puts out:
            activations, normalisations, and what is between the layers.
        shapes: Outputs and inputs of each of these weights.
        axes: Reduction axis of each.
    """

    whole: float
    grids: dict[str, Grid]
    rest: dict[str, float]
    shapes: dict[str, tuple[int, int]]
    axes: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Return the times as JSON holds them."""
        return {**vars(self), "grids": {name: grid.ms for name, grid in self.grids.items()}}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Times:
        """Return the times that `to_dict` gave."""
        grids = {name: Grid(tuple(map(tuple, ms))) for name, ms in found["grids"].items()}
        shapes = {name: (int(outputs), int(inputs)) for name, (outputs, inputs) in found["shapes"].items()}
        return cls(found["whole"], grids, dict(found["rest"]), shapes, dict(found["axes"]))

    def price(self, name: str, sizes: tuple[int, ...]) -> float:
        """Return the milliseconds that a weight of some sizes stands for, 0 of what is no layer's weight."""
        if name not in self.shapes:
            return 0.0
        axis, (outputs, inputs) = self.axes[name], self.shapes[name]
        out, into = sizes[1 - axis] / outputs, sizes[axis] / inputs
        grid = self.grids.get(name)
        return (0.0 if grid is None else grid.at(out, into)) + self.rest[name] * out


@torch.no_grad()
def times(model: nn.Module, example: Any, clock: Clock, axes: Collection[tuple[str, int]], whole: float) -> Times:
    """Measure the kinds of a model's layers on this machine, with the threads that torch has.

    Linears and convolutions without groups are measured by themselves; other layers count as part of the rest. Where
    the layers by themselves take longer than the model, in which one call does several of them, each counts for less.

    Args:
        model: The model that becomes narrower.
        example: Input of one forward pass.
        clock: How layers are timed.
        axes: (weight, axis) of those that may get shorter.
        whole: Milliseconds of the model on the example.
    """
    weights = [weight for weight in walk(model, eligibility="any", tied="*").weights if weight.parameter.ndim > 1]
    names = first_names(model)
    named = {names[id(weight.parameter)]: weight for weight in weights}
    inputs, values = _seen(model, example, weights)
    kinds: dict[str, list[int]] = {}
    cells: list[dict[tuple[int, int], Cell]] = []
    known: dict[Any, int] = {}
    for name, weight in named.items():
        axis = weight.axis.axis
        cut = (name, 1 - axis) in axes, (name, axis) in axes
        for x in inputs.get(name, ()):
            key = _kind(weight, x), cut
            if key not in known:
                known[key] = len(cells)
                cells.append(_cells(weight, x, *cut))
            kinds.setdefault(name, []).append(known[key])
    found = clock.layers({f"{n} {i} {j}": cell for n, of in enumerate(cells) for (i, j), cell in of.items()})
    grids = {name: grid for name, of in kinds.items() if (grid := _grid(of, cells, found)) is not None}
    share = min(1.0, whole / max(sum(grid.ms[0][0] for grid in grids.values()), 1e-9))
    grids = {name: grid.times(share) for name, grid in grids.items()}
    left = max(whole - sum(grid.ms[0][0] for grid in grids.values()), 0.0)
    total = max(sum(values.values()), 1)
    reached = {name: weight for name, weight in named.items() if name in values}
    axis_of = {name: weight.axis.axis for name, weight in reached.items()}
    shapes = {n: (w.parameter.shape[1 - axis_of[n]], w.parameter.shape[axis_of[n]]) for n, w in reached.items()}
    return Times(whole, grids, {name: left * count / total for name, count in values.items()}, shapes, axis_of)


def _seen(
    model: nn.Module, example: Any, weights: Sequence[PrunableWeight]
) -> tuple[dict[str, list[Tensor]], dict[str, int]]:
    """Return what each layer reads, and how many values it puts out, by the name of its weight."""
    names = first_names(model)
    inputs: dict[str, list[Tensor]] = {}
    held: dict[Any, Tensor] = {}  # one of each kind of call: layers of one kind are measured once
    values: dict[str, int] = {}

    def see(weight: PrunableWeight, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name = names[id(weight.parameter)]
        values[name] = values.get(name, 0) + answer_of(output).numel()
        x = calls.first_input(args, kwargs)
        inputs.setdefault(name, []).append(held.setdefault(_kind(weight, x), x))

    observed = calls.observing(multiplying(weights), after=see)
    with calls.evaluating(model), calls.without_cache(model), observed:
        calls.Example.of(example).run(model)
    return inputs, values


def _grid(
    of: Sequence[int], cells: Sequence[Mapping[tuple[int, int], Cell]], found: Mapping[str, float]
) -> Grid | None:
    """Return what a layer takes in all of its calls; a side that stays whole is measured whole."""
    rows = [[0.0] * len(SHARES) for _ in SHARES]
    for kind in of:
        for i, row in enumerate(rows):
            for j in range(len(row)):
                place = next((p for p in ((i, j), (i, 0), (0, j), (0, 0)) if p in cells[kind]), None)
                if place is None:
                    return None
                row[j] += found[f"{kind} {place[0]} {place[1]}"]
    return Grid(tuple(map(tuple, rows)))


def _kind(weight: PrunableWeight, x: Tensor) -> tuple[Any, ...]:
    """Return what a layer's time depends on: layers of which it is equal are measured once."""
    options = (getattr(weight.module, name, 0) for name in ("stride", "padding", "dilation"))
    return weight.kind, tuple(x.shape), x.dtype, tuple(weight.parameter.shape), *options


def _ms(candidates: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    if not candidates:
        return {}
    clock = "thread" if native.threads() == torch.get_num_threads() == 1 else "wall"
    record = measure.compare(dict(candidates), repeats=7, seconds=0.3, clock=clock)
    return {name: 1e3 * timing.median for name, timing in record.timings.items()}


def _cells(weight: PrunableWeight, x: Tensor, outputs: bool, inputs: bool) -> dict[tuple[int, int], Cell]:
    """Return a layer at each share of its outputs and inputs that may get fewer, {} of one that is not measured."""
    module: Any = weight.module
    if weight.kind not in ("linear", "hf_conv1d", *CONVOLUTIONS) or getattr(module, "groups", 1) != 1:
        return {}
    values = weight.parameter.detach().transpose(0, 1) if weight.kind == "hf_conv1d" else weight.parameter.detach()
    found: dict[tuple[int, int], Cell] = {}
    for i, out in enumerate(SHARES if outputs else SHARES[:1]):
        for j, into in enumerate(SHARES if inputs else SHARES[:1]):
            part = values[: max(1, int(len(values) * out)), : max(1, int(values.shape[1] * into))].contiguous()
            narrow = x[:, : part.shape[1]] if weight.kind in CONVOLUTIONS else x[..., : part.shape[1]]
            found[i, j] = _layer(weight, part), narrow.contiguous()
    return found


def _layer(weight: PrunableWeight, values: Tensor) -> nn.Module:
    """Return a layer with these values for its weight (outputs, inputs, ...), without a bias."""
    module: Any = weight.module
    outputs, inputs = values.shape[:2]
    if weight.kind in CONVOLUTIONS:
        size = values.shape[2:], module.stride, module.padding, module.dilation
        layer = CONVOLUTIONS[weight.kind](
            inputs, outputs, *size, bias=False, padding_mode=module.padding_mode, device="meta"
        )
    else:
        layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.weight = nn.Parameter(values, requires_grad=False)
    return layer.eval()
