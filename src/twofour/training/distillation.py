"""Distillation: the dense model teaches the sparse one, through the loader and the loss that training already takes.

Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network" (arXiv 1503.02531), section 2: the mean of
the training loss and temperature^2 times the divergence of the softened answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twofour import calls
from twofour.errors import TrainingError
from twofour.training.batches import Loader, call, length, pair, require_loader, to_device
from twofour.training.plan import Loss, require_called

Answer = Callable[[Any], Tensor]
"""Takes the tensor that is compared out of what a model answers."""


def answer_of(output: Any) -> Tensor:
    """Return the tensor that a model answers with: its output, `logits` of it, or else the first tensor in it.

    Args:
        output: A tensor; an object or a dict with `logits`, as of Hugging Face's heads; a tuple, list, dict or
            dataclass with a tensor in it.

    Raises:
        TrainingError: There is none.
    """
    if isinstance(output, Tensor):
        return output
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(named, Tensor):
        return named
    parts: Any = ()
    if isinstance(output, Mapping):
        parts = output.values()
    elif isinstance(output, tuple | list):
        parts = output
    elif is_dataclass(output):
        parts = (getattr(output, entry.name) for entry in fields(output))
    for part in parts:
        if isinstance(part, Tensor):
            return part
    raise TrainingError(
        "a model's answer cannot be compared",
        got=f"{type(output).__name__} without a tensor",
        wanted="a tensor, something with `logits`, or a tuple, dict or dataclass with a tensor in it",
        remedy="say where it is, to Taught and distilled alike: answer=lambda output: output.scores[0]",
    )


class Taught:
    """A loader whose targets carry the teacher's answers: (input, target) -> (input, (target, answer)).

    Args:
        loader: Yields (input, target) pairs, anew each epoch.
        teacher: The dense model; it answers in evaluation mode, without gradients, on its own device.
        answer: Takes the tensor that the student is to match out of the teacher's output; default: `answer_of`.

    Raises:
        TrainingError: The teacher is no module, or the loader or `answer` cannot be used.
    """

    def __init__(self, loader: Loader, teacher: nn.Module, *, answer: Answer = answer_of) -> None:
        if not isinstance(teacher, nn.Module):
            raise TrainingError(
                "there is no teacher",
                got=type(teacher).__name__,
                wanted="a torch.nn.Module, the dense model",
                remedy="twofour.training.Taught(loader, dense_model)",
            )
        require_loader(loader)
        require_called("answer", answer)
        self.loader, self.teacher, self.answer = loader, teacher, answer

    def __len__(self) -> int:
        found = length(self.loader)
        if found is None:
            raise TypeError("the loader has no length")
        return found

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        device = next((parameter.device for parameter in self.teacher.parameters()), torch.device("cpu"))
        for batch in self.loader:
            inputs, target = pair(batch)
            with calls.evaluating(self.teacher), torch.no_grad():
                answer = self.answer(call(self.teacher, to_device(inputs, device)))
            yield inputs, (target, answer)


def distilled(
    loss: Loss,
    *,
    weight: float = 0.5,
    temperature: float = 2.0,
    kind: Literal["classes", "values"] = "classes",
    answer: Answer = answer_of,
) -> Loss:
    """Return a loss for the batches of `Taught`.

    Args:
        loss: The training loss, `loss(output, target)`; it is given the student's output as it is.
        weight: Share of the teacher, 0 to 1.
        temperature: Softens both answers, > 0; for "classes".
        kind: "classes": scores (..., classes), compared by KL divergence of their softmax; "values": tensors of any
            shape such as embeddings or the numbers of a regression, compared by mean squared error.
        answer: Takes the tensor to compare out of the student's output; default: `answer_of`, the output itself, its
            `logits` or the first tensor in it.

    Example:
        >>> taught = twofour.training.Taught(loader, teacher)
        >>> twofour.finetune(model, taught, loss=twofour.training.distilled(F.cross_entropy), ...)

    Raises:
        TrainingError: An argument is impossible. The loss raises it where the two answers differ
            in shape, or "classes" are asked for and there are no two scores on a last axis.
    """
    require_called("loss", loss)
    require_called("answer", answer)
    numbers = isinstance(weight, int | float) and isinstance(temperature, int | float)
    if not numbers or not 0 <= weight <= 1 or not temperature > 0 or kind not in ("classes", "values"):
        raise TrainingError(
            "the distillation is impossible",
            got=f"weight={weight}, temperature={temperature}, kind={kind!r}",
            wanted='0 <= weight <= 1, temperature > 0, kind "classes" or "values"',
            remedy="leave them out: half of the loss is the teacher's, at temperature 2",
        )

    def combined(output: Any, target: Any) -> Tensor:
        truth, wanted = target
        found = answer(output)
        wanted = wanted.to(found.device)
        _require_comparable(found, wanted, kind)
        if kind == "values":
            taught = F.mse_loss(found, wanted)
        else:
            student = F.log_softmax(found / temperature, -1).flatten(0, -2)
            teacher = F.log_softmax(wanted / temperature, -1).flatten(0, -2)
            taught = temperature**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)
        return (1 - weight) * loss(output, truth) + weight * taught

    return combined


def _require_comparable(found: Tensor, wanted: Tensor, kind: str) -> None:
    if found.shape != wanted.shape:
        raise TrainingError(
            "the student's answer and the teacher's cannot be compared",
            got=f"{tuple(found.shape)} and {tuple(wanted.shape)}",
            wanted="the same shape",
            remedy="pass answer=, a function of the output, to Taught and distilled",
        )
    if kind == "classes" and (found.ndim < 2 or found.shape[-1] < 2):
        raise TrainingError(
            "the answers are no scores of classes",
            got=f"shape {tuple(found.shape)}",
            wanted="(..., classes) with at least two classes: a softmax over one says nothing",
            remedy='kind="values" for a regression or single scores; a binary score x becomes two classes by '
            "answer=lambda output: torch.stack((torch.zeros_like(output), output), -1)",
        )
