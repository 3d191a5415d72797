"""depth: which whole layers may go, and what that loses beside what narrower groups of channels lose.

Both count as shares of the energy of what a layer hands on: a layer that goes loses |out - in|^2 of |out|^2, and
channels inside it lose their share of their readers' energy times the readers' share of the layer's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from twofour import calls
from twofour.calibration import Batch
from twofour.layers import PrunableWeight, walk
from twofour.shrinking.curves import Curve
from twofour.structure.shrink import Cut, Cuttable
from twofour.structure.shrink.surgery import apply

LEAST_WEIGHTS = 2
"""Weights of an entry of a list that counts as a layer: what has one is a part of a layer."""


@dataclass(frozen=True)
class Energies:
    """Sums of squares over calibration data.

    Attributes:
        layers: What each layer hands on, and its difference to what it gets.
        weights: The output of each weight's layer.
    """

    layers: Mapping[str, tuple[float, float]]
    weights: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Return the sums as JSON holds them."""
        return vars(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Energies:
        """Return the sums that `to_dict` gave."""
        return cls({name: (out, apart) for name, (out, apart) in found["layers"].items()}, dict(found["weights"]))

    def losses(self) -> dict[str, float]:
        """Return the share of its output that each layer adds."""
        return {name: apart / max(out, 1e-30) for name, (out, apart) in self.layers.items()}

    def scaled(self, group: Cuttable, curve: Curve) -> Curve:
        """Return what a group loses as a share of its layer's output; of a group in no layer, what it loses."""
        names = [place.name for place in group.group.places]
        layer = next((one for one in self.layers if all(name.startswith(f"{one}.") for name in names)), None)
        read = [self.weights[name] for name in group.group.consumers if name in self.weights]
        if layer is None or not read:
            return curve
        scale = sum(read) / len(read) / max(self.layers[layer][0], 1e-30)
        return replace(curve, losses=tuple(scale * loss for loss in curve.losses))


@torch.no_grad()
def droppable(model: nn.Module, example: Any) -> list[str]:
    """Return the entries of a model's lists of layers without which it runs to outputs of the same shapes.

    They hand on a tensor of the shape that they get, and hold two weights or more; of entries within each other the
    inner ones.
    """
    weights = [weight.name for weight in walk(model, eligibility="any", tied="*").weights]
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Sequential | nn.ModuleList)]
    entries = [f"{name}.{key}" if name else key for name, module in lists for key in module._modules]
    entries = [e for e in entries if sum(weight.startswith(f"{e}.") for weight in weights) >= LEAST_WEIGHTS]
    alike: dict[str, bool] = {}

    def see(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given, answer = calls.first_input(args, kwargs), _first(output)
        fits = isinstance(given, Tensor) and isinstance(answer, Tensor) and answer.shape == given.shape
        alike[name] = alike.get(name, True) and fits

    given = calls.Example.of(example)
    with calls.evaluating(model), calls.without_cache(model):
        with calls.observing([(name, model.get_submodule(name)) for name in entries], after=see):
            wanted = _shapes(given.run(model))
        fitting = [name for name in entries if alike.get(name)]
        inner = [name for name in fitting if not any(other.startswith(f"{name}.") for other in fitting)]
        return [name for name in inner if _runs(model, (name,), given, wanted)]


@torch.no_grad()
def together(model: nn.Module, layers: Sequence[str], example: Any) -> tuple[str, ...]:
    """Return those of some layers that may go together, the first ones first: each may go alone (`droppable`)."""
    given = calls.Example.of(example)
    with calls.evaluating(model), calls.without_cache(model):
        wanted = _shapes(given.run(model))
        if len(layers) < 2 or _runs(model, layers, given, wanted):
            return tuple(layers)
        found: tuple[str, ...] = ()
        for name in layers:
            found = (*found, name) if _runs(model, (*found, name), given, wanted) else found
        return found


def _runs(model: nn.Module, layers: Sequence[str], given: calls.Example, wanted: list[Any]) -> bool:
    """Whether a model runs to the same shapes without some layers."""
    undo = apply(model, Cut(layers=tuple(layers)))
    try:
        return _shapes(given.run(model)) == wanted
    except Exception:  # whatever a forward raises that counts its layers
        return False
    finally:
        undo()


def _shapes(output: Any) -> list[Any]:
    return [tuple(leaf.shape) for leaf in calls.output_leaves(output) if isinstance(leaf, Tensor)]


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple | list) else output


@torch.no_grad()
def energies(
    model: nn.Module, layers: Sequence[str], weights: Sequence[PrunableWeight], batches: Sequence[Batch]
) -> Energies:
    """Run a model on calibration data and return what its layers and its weights' layers give."""
    of_layers: dict[str, tuple[float, float]] = dict.fromkeys(layers, (0.0, 0.0))
    of_weights: dict[str, float] = {}
    given: dict[str, Tensor] = {}

    def keep(key: str | PrunableWeight, module: nn.Module, args: Any, kwargs: Any) -> None:
        if isinstance(key, str):  # a copy: a layer may add to what it gets
            given[key] = calls.first_input(args, kwargs).to(torch.float64, copy=True)

    def see(key: str | PrunableWeight, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        answer = _first(output).double()
        if isinstance(key, str):
            out, apart = of_layers[key]
            change = float((answer - given.pop(key)).square().sum())
            of_layers[key] = out + float(answer.square().sum()), apart + change
        else:
            for name in key.names:
                of_weights[name] = of_weights.get(name, 0.0) + float(answer.square().sum())

    keys: list[tuple[str | PrunableWeight, nn.Module]] = [(name, model.get_submodule(name)) for name in layers]
    keys += [(weight, weight.module) for weight in weights]
    with calls.evaluating(model), calls.without_cache(model), calls.observing(keys, keep, see):
        for batch in batches:
            calls.Example.of(batch.inputs).run(model)  # a forward may change what it is given
    return Energies(of_layers, of_weights)
