"""The gradients of a loss at the weights, for first-order Taylor scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twofour.calibration.batches import Batch, call, to_device
from twofour.calibration.display import Display
from twofour.calibration.passes import explained, observing
from twofour.errors import DataError
from twofour.layers import PrunableWeight

Loss = Callable[[Any, Any], Tensor]


def gradients(
    model: nn.Module,
    weights: Sequence[PrunableWeight],
    batches: Sequence[Batch],
    loss: Loss,
    display: Display | None = None,
) -> dict[str, Tensor]:
    """Return the root mean square over the batches of the loss's gradient at each weight, in float32, by name.

    A weight that the loss of no batch depends on has no entry.

    Args:
        model: Runs in evaluation mode; its own modes, `requires_grad` and gradients come back.
        weights: Where the gradient is taken.
        batches: What `take` returned.
        loss: `loss(output, target)`, as `finetune` takes it.
        display: Shows progress.

    Raises:
        DataError: The model does not run on the data, or the loss is no finite number.
    """
    display = display or Display(0, shown=False)
    with observing(model), trainable(model, weights), torch.enable_grad():
        parameters = [weight.parameter for weight in weights]
        sums: dict[str, Tensor] = {}
        for index, batch in enumerate(batches, 1):
            display.say(f"gradients, batch {index} of {len(batches)}")
            value = evaluate(model, batch, loss, parameters[0].device)
            for weight, found in zip(weights, torch.autograd.grad(value, parameters, allow_unused=True), strict=True):
                if found is not None:
                    square = found.detach().float().square()
                    sums[weight.name] = sums[weight.name] + square if weight.name in sums else square
    return {name: (total / len(batches)).sqrt() for name, total in sums.items()}


def evaluate(model: nn.Module, batch: Batch, loss: Loss, device: torch.device) -> Tensor:
    """Return the loss of one batch.

    Raises:
        DataError: The model does not run on it, or the loss is no finite number that depends on the weights.
    """
    with explained():
        output = call(model, to_device(batch.inputs, device))
    return require_loss(loss(output, to_device(batch.target, device)))


def require_loss(value: Any) -> Tensor:
    """Return the value of a loss if it is a finite scalar that gradients can be taken of.

    Raises:
        DataError: It is not.
    """
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad or not torch.isfinite(value):
        tensor = isinstance(value, Tensor)
        loose = ", which depends on no weight to prune" if tensor and not value.requires_grad else ""
        raise DataError(
            "the loss cannot be used",
            got=f"{type(value).__name__} {value.detach() if tensor else value}{loose}",
            wanted="loss(output, target) -> a finite scalar tensor that depends on the weights",
            remedy="reduce it, for example with .mean(), and keep it in the graph: no .item(), no detach()",
        )
    return value


class trainable:
    """Let gradients reach the given weights and nothing else inside; then put every `requires_grad` back."""

    def __init__(self, model: nn.Module, weights: Sequence[PrunableWeight]) -> None:
        self._model, self._wanted = model, {id(weight.parameter) for weight in weights}

    def __enter__(self) -> None:
        self._before = [(parameter, parameter.requires_grad) for parameter in self._model.parameters()]
        for parameter, _ in self._before:
            parameter.requires_grad_(id(parameter) in self._wanted)

    def __exit__(self, *_: object) -> None:
        for parameter, required in self._before:
            parameter.requires_grad_(required)
