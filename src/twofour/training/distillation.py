"""Distillation: the dense model teaches the sparse one, through the loader and the loss that training already takes.

Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network" (arXiv 1503.02531), section 2: the mean of
the training loss and temperature^2 times the divergence of the softened answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twofour.errors import TrainingError
from twofour.training.batches import Loader, call, length, pair, to_device
from twofour.training.plan import Loss


class Taught:
    """A loader whose targets carry the teacher's answers: (input, target) -> (input, (target, answer)).

    Args:
        loader: Yields (input, target) pairs, anew each epoch.
        teacher: The dense model; it answers in evaluation mode, without gradients, on its own device.
    """

    def __init__(self, loader: Loader, teacher: nn.Module) -> None:
        self.loader, self.teacher = loader, teacher

    def __len__(self) -> int:
        found = length(self.loader)
        if found is None:
            raise TypeError("the loader has no length")
        return found

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        device = next((parameter.device for parameter in self.teacher.parameters()), torch.device("cpu"))
        for batch in self.loader:
            inputs, target = pair(batch)
            modes = {module: module.training for module in self.teacher.modules()}
            self.teacher.eval()
            try:
                with torch.no_grad():
                    answer = call(self.teacher, to_device(inputs, device))
            finally:
                for module, mode in modes.items():
                    module.training = mode
            yield inputs, (target, answer)


def distilled(
    loss: Loss, *, weight: float = 0.5, temperature: float = 2.0, kind: Literal["classes", "values"] = "classes"
) -> Loss:
    """Return a loss for the batches of `Taught`.

    Args:
        loss: The training loss, `loss(output, target)`.
        weight: Share of the teacher, 0 to 1.
        temperature: Softens both answers, > 0; for "classes".
        kind: "classes": scores (..., classes), compared by KL divergence of their softmax; "values": tensors such as
            embeddings, compared by mean squared error.

    Example:
        >>> taught = twofour.training.Taught(loader, teacher)
        >>> twofour.finetune(model, taught, loss=twofour.training.distilled(F.cross_entropy), ...)

    Raises:
        TrainingError: `weight`, `temperature` or `kind` is impossible.
    """
    if not 0 <= weight <= 1 or not temperature > 0 or kind not in ("classes", "values"):
        raise TrainingError(
            "the distillation is impossible",
            got=f"weight={weight}, temperature={temperature}, kind={kind!r}",
            wanted='0 <= weight <= 1, temperature > 0, kind "classes" or "values"',
        )

    def combined(output: Any, target: Any) -> Tensor:
        truth, answer = target
        answer = answer.to(output.device)
        if kind == "values":
            taught = F.mse_loss(output, answer)
        else:
            soft = F.log_softmax(output / temperature, -1).flatten(0, -2)
            wanted = F.log_softmax(answer / temperature, -1).flatten(0, -2)
            taught = temperature**2 * F.kl_div(soft, wanted, reduction="batchmean", log_target=True)
        return (1 - weight) * loss(output, truth) + weight * taught

    return combined
