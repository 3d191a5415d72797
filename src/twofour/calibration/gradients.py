"""The gradients of a loss at the weights, for first-order Taylor scores."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from twofour.calibration.batches import Batch, to_device
from twofour.calibration.finite import not_finite
from twofour.calibration.passes import calibrating, explained
from twofour.calls import call
from twofour.errors import DataError, RecipeError, TwofourError
from twofour.layers import PrunableWeight
from twofour.progress import Progress

Loss = Callable[[Any, Any], Tensor]


def gradients(
    model: nn.Module,
    weights: Sequence[PrunableWeight],
    batches: Sequence[Batch],
    loss: Loss,
    display: Progress | None = None,
) -> dict[str, Tensor]:
    """Return the root mean square over the batches of the loss's gradient at each weight, in float32, by name.

    A weight that the loss of no batch depends on, or whose gradient is zero everywhere, has no entry.

    Args:
        model: Runs in evaluation mode; its own modes, `requires_grad` and gradients come back.
        weights: Where the gradient is taken.
        batches: What `take` returned.
        loss: `loss(output, target)`, as `finetune` takes it.
        display: Shows progress.

    Raises:
        DataError: The model does not run on the data, or the loss is no finite number.
    """
    display = display or Progress(shown=False)
    with calibrating(model), trainable(model, weights), torch.enable_grad():
        parameters = [weight.parameter for weight in weights]
        sums: dict[str, Tensor] = {}
        for index, batch in enumerate(batches, 1):
            display.say(f"gradients, batch {index} of {len(batches)}")
            with explained():
                output = call(model, to_device(batch.inputs, parameters[0].device))
            value = require_loss(computed(loss, output, batch, parameters[0].device), batches)
            for weight, found in zip(weights, torch.autograd.grad(value, parameters, allow_unused=True), strict=True):
                if found is not None:
                    square = found.detach().float().square()
                    sums[weight.name] = sums[weight.name] + square if weight.name in sums else square
    return {name: (total / len(batches)).sqrt() for name, total in sums.items() if total.any()}


def require_function(loss: Any) -> None:
    """Refuse what cannot be called as `loss(output, target)`.

    Raises:
        RecipeError: It is no function, or one of another number of arguments.
    """
    got = repr(loss)
    if callable(loss):
        try:
            signature = inspect.signature(loss)
        except (TypeError, ValueError):  # a function without a signature
            return
        try:
            signature.bind(None, None)
            return
        except TypeError as error:
            got = f"{getattr(loss, '__name__', type(loss).__name__)}{signature}: {error}"
    raise RecipeError(
        "the loss is no function of an output and a target",
        got=got,
        wanted="loss(output, target) -> scalar tensor, as finetune takes it",
        remedy="for instance loss=torch.nn.functional.cross_entropy, or loss=lambda output, _: output.loss",
    )


def computed(loss: Loss, output: Any, batch: Batch, device: torch.device) -> Any:
    """Return what the loss answers to an output of the model and the batch's target.

    Raises:
        DataError: It raises an error.
    """
    try:
        return loss(output, to_device(batch.target, device))
    except (TwofourError, MemoryError):
        raise
    except Exception as error:
        raise DataError(
            "the loss cannot be computed",
            got=f"{type(error).__name__}: {error}; target: {type(batch.target).__name__}",
            wanted="a loss(output, target) that takes what the model puts out and the targets of the data",
            remedy="call it yourself on one batch; data with targets are pairs (input, target)",
        ) from error


def require_loss(value: Any, batches: Sequence[Batch] = ()) -> Tensor:
    """Return the value of a loss if it is a finite scalar that gradients can be taken of.

    Raises:
        DataError: It is not; where inputs of `batches` hold NaN or infinity, that is what is said.
    """
    tensor = isinstance(value, Tensor)
    if tensor and value.numel() == 1 and value.requires_grad and torch.isfinite(value):
        return value
    scalar = tensor and value.numel() == 1
    if scalar and not torch.isfinite(value) and (found := not_finite(batches)):
        raise found
    loose = ", which depends on no weight to prune" if tensor and not value.requires_grad else ""
    shown = f"{value.detach()}" if scalar else f"of shape {tuple(value.shape)}" if tensor else repr(value)
    raise DataError(
        "the loss cannot be used",
        got=f"{type(value).__name__} {shown}{loose}",
        wanted="loss(output, target) -> a finite scalar tensor that depends on the weights",
        remedy="reduce it, for example with .mean(), and keep it in the graph: no .item(), no detach()",
    )


@contextmanager
def trainable(model: nn.Module, weights: Sequence[PrunableWeight]) -> Iterator[None]:
    """Let gradients reach the given weights and nothing else inside; then put every `requires_grad` back."""
    wanted = {id(weight.parameter) for weight in weights}
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.requires_grad_(id(parameter) in wanted)
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)
