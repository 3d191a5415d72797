"""times: what a layer takes at other widths on this machine, measured on a grid and interpolated between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twofour import calls, measure
from twofour.layers import PrunableWeight, walk
from twofour.shrinking.budget import first_names, multiplying

SHARES = (1.0, 0.5, 0.25)
"""Shares of a layer's inputs and of its outputs at which it is measured: nine products for each kind of layer."""

CONVOLUTIONS: Mapping[str, Any] = {"conv1d": F.conv1d, "conv2d": F.conv2d, "conv3d": F.conv3d}


@dataclass(frozen=True, eq=False)
class Grid:
    """Milliseconds of one layer at shares of its outputs (rows) and inputs (columns), as `SHARES` has them."""

    ms: tuple[tuple[float, ...], ...]

    def at(self, outputs: float, inputs: float) -> float:
        """Return the milliseconds at shares of the layer's outputs and inputs, bilinear, below in proportion."""
        return _between([_between(row, inputs) for row in self.ms], outputs)


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

    def price(self, name: str, sizes: tuple[int, ...]) -> float:
        """Return the milliseconds that a weight of some sizes stands for, 0 of what is no layer's weight."""
        if name not in self.shapes:
            return 0.0
        axis, (outputs, inputs) = self.axes[name], self.shapes[name]
        out, into = sizes[1 - axis] / outputs, sizes[axis] / inputs
        grid = self.grids.get(name)
        return (0.0 if grid is None else grid.at(out, into)) + self.rest[name] * out


@torch.no_grad()
def times(model: nn.Module, example: Any) -> Times:
    """Measure a model and the kinds of its layers on this machine, with the threads that torch has.

    Linears and convolutions without groups are measured by themselves, as torch runs them; other layers count as part
    of the rest.
    """
    weights = [weight for weight in walk(model, eligibility="any", tied="*").weights if weight.parameter.ndim > 1]
    names = first_names(model)
    named = {names[id(weight.parameter)]: weight for weight in weights}
    inputs: dict[str, list[Tensor]] = {}
    values: dict[str, int] = {}

    def see(weight: PrunableWeight, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple | list) else output
        name = names[id(weight.parameter)]
        values[name] = values.get(name, 0) + first.numel()
        inputs.setdefault(name, []).append(calls.first_input(args, kwargs))

    given = calls.Example.of(example)
    observed = calls.observing(multiplying(weights), after=see)
    with calls.evaluating(model), calls.without_cache(model):
        with observed:
            given.run(model)
        whole = milliseconds(model, example)
        known: dict[Any, Grid] = {}
        grids: dict[str, Grid] = {}
        for name, weight in named.items():
            for x in inputs.get(name, ()):
                key = _kind(weight, x)
                if key not in known and (cells := _cells(weight, x)):
                    found = _ms(cells)
                    known[key] = Grid(tuple(tuple(found[f"{i} {j}"] for j in range(3)) for i in range(3)))
                if key in known:
                    grids[name] = _sum(grids.get(name), known[key])
    left = max(whole - sum(grid.ms[0][0] for grid in grids.values()), 0.0)
    total = max(sum(values.values()), 1)
    reached = {name: weight for name, weight in named.items() if name in values}
    axes = {name: weight.axis.axis for name, weight in reached.items()}
    shapes = {name: (w.parameter.shape[1 - axes[name]], w.parameter.shape[axes[name]]) for name, w in reached.items()}
    return Times(whole, grids, {name: left * count / total for name, count in values.items()}, shapes, axes)


def _kind(weight: PrunableWeight, x: Tensor) -> tuple[Any, ...]:
    """Return what a layer's time depends on: layers of which it is equal are measured once."""
    options = (getattr(weight.module, name, 0) for name in ("stride", "padding", "dilation"))
    return weight.kind, tuple(x.shape), x.dtype, tuple(weight.parameter.shape), *options


def milliseconds(model: nn.Module, example: Any) -> float:
    """Return the median milliseconds of one forward pass of a model, in evaluation mode and without gradients."""
    given = calls.Example.of(example)
    with torch.no_grad(), calls.evaluating(model), calls.without_cache(model):
        return _ms({"model": lambda: given.run(model)})["model"]


def _ms(candidates: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    clock = "thread" if torch.get_num_threads() == 1 else "wall"
    record = measure.compare(dict(candidates), repeats=7, seconds=0.3, clock=clock)
    return {name: 1e3 * timing.median for name, timing in record.timings.items()}


def _sum(first: Grid | None, second: Grid) -> Grid:
    if first is None:
        return second
    return Grid(tuple(tuple(map(sum, zip(a, b, strict=True))) for a, b in zip(first.ms, second.ms, strict=True)))


def _cells(weight: PrunableWeight, x: Tensor) -> dict[str, Callable[[], object]]:
    """Return the calls of a layer at each share of its outputs and inputs, {} of a layer that is not measured."""
    module: Any = weight.module
    found: dict[str, Callable[[], object]] = {}
    if weight.kind not in ("linear", "hf_conv1d", *CONVOLUTIONS) or getattr(module, "groups", 1) != 1:
        return found
    values = weight.parameter.detach().transpose(0, 1) if weight.kind == "hf_conv1d" else weight.parameter.detach()
    for i, out in enumerate(SHARES):
        for j, into in enumerate(SHARES):
            part = values[: max(1, int(len(values) * out)), : max(1, int(values.shape[1] * into))].contiguous()
            if weight.kind in CONVOLUTIONS:
                narrow, function = x[:, : part.shape[1]].contiguous(), CONVOLUTIONS[weight.kind]
                padding = module.padding if isinstance(module.padding, str) else tuple(module.padding)
                found[f"{i} {j}"] = _call(function, narrow, part, None, module.stride, padding, module.dilation)
            else:
                found[f"{i} {j}"] = _call(F.linear, x[..., : part.shape[1]].contiguous(), part)
    return found


def _call(function: Callable[..., object], *arguments: Any) -> Callable[[], object]:
    return lambda: function(*arguments)
