"""Distillation: the dense model teaches the sparse one, through the loader and the loss that training already takes.

Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network" (arXiv 1503.02531), section 2: the mean of
the training loss and temperature^2 times the divergence of the softened answers. What layers hand on can be taught too,
as Romero et al. 2015, "FitNets" (arXiv 1412.6550), and, for each layer of a transformer, Jiao et al. 2020, "TinyBERT"
(arXiv 1909.10351, equation 8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from types import TracebackType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twofour import calls
from twofour.calibration import Batch, read
from twofour.errors import TrainingError
from twofour.reconstruction.distances import counted, relative
from twofour.training import randomness
from twofour.training.batches import Loader, call, device_of, length, pair, require_loader, to_device
from twofour.training.plan import Loss, require_called

Answer = Callable[[Any], Tensor]
"""Takes the tensor that is compared out of what a model answers."""
IGNORED = -100
"""The class of what is not to be learned, as `ignore_index` of torch's losses has it."""
Kind = Literal["classes", "values", "relative"]
"""How the student's answer is compared with the teacher's."""


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
    named = _logits(output)
    if isinstance(named, Tensor):
        return named
    parts: Any = output if isinstance(output, tuple | list) else ()
    if isinstance(output, Mapping):
        parts = output.values()
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


def _logits(output: Any) -> Any:
    return output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)


class Hidden:
    """What layers of a student hand on, kept from each forward pass inside for the loss of `distilled(hidden=)`.

    Args:
        student: The model that is trained.
        layers: Names of its modules, in the order of those that `Taught(layers=)` names of the teacher. Of a module
            that answers with more than a tensor, `answer_of` says which counts; of several calls, the last.
        weight: What the mean distance of the layers is multiplied with before it is added to the loss, >= 0.

    Example:
        >>> layers = [f"encoder.layer.{n}" for n in range(6)]
        >>> with twofour.training.Hidden(model, layers) as hidden:
        ...     taught = twofour.training.Taught(loader, teacher, layers=layers)
        ...     twofour.finetune(model, taught, loss=twofour.training.distilled(loss, hidden=hidden), ...)

    Raises:
        TrainingError: The model has no such layers, or the weight is impossible.
    """

    def __init__(self, student: nn.Module, layers: Sequence[str], *, weight: float = 1.0) -> None:
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 <= weight < float("inf"):
            raise TrainingError(
                "`weight` is impossible",
                got=repr(weight),
                wanted="a number of 0 or more",
                remedy="1.0 adds the mean distance of the layers to the loss as it is",
            )
        self._modules = _modules(student, layers)
        self.layers, self.weight = tuple(layers), float(weight)
        self._seen: dict[str, Tensor] = {}
        self._observed: AbstractContextManager[None] | None = None

    def __enter__(self) -> Hidden:
        self._observed = calls.observing(self._modules, after=_keeping(self._seen))
        self._observed.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._observed is not None:
            self._observed.__exit__(kind, value, trace)
        self._observed = None
        self._seen.clear()

    def distance(self, wanted: Sequence[Tensor], tokens: Tensor | None = None) -> Tensor:
        """Return the mean over the layers of the squared distance relative to the square of what is wanted, and forget.

        Args:
            wanted: What the teacher's layers handed on, of the shapes of the student's.
            tokens: bool (batch, tokens), True for those that count where layers hand on one vector each; None for all.

        Raises:
            TrainingError: The student was not run inside `with`, or the layers do not match.
        """
        found = [self._seen[name] for name in self.layers if name in self._seen]
        self._seen.clear()
        if len(found) != len(self.layers) or len(found) != len(wanted):
            raise TrainingError(
                "the layers of the student and the teacher cannot be compared",
                got=f"{len(found)} of {len(self.layers)} layers that the student's forward ran, {len(wanted)} taught",
                wanted="as many of both",
                remedy="train inside `with Hidden(...) as hidden`, and pass Taught as many layers",
            )
        terms = list[Tensor]()
        for name, state, other in zip(self.layers, found, wanted, strict=True):
            require_comparable(state, other, "values", name)
            terms.append(relative(state, other.to(state.device), tokens))
        return torch.stack(terms).mean()


def comparison(output: Any, target: Any) -> tuple[Kind, Answer] | None:
    """Return how answers like this one are compared, told by the targets; None where there is nothing to compare.

    Whole numbers as targets, one for each row of scores, are classes; the scores' axis is the last one, or the second
    as `F.cross_entropy` has it of images and texts. Scores under the name `logits` are classes unless the targets are
    floats. Everything else is compared by its values.

    Args:
        output: What a model answers.
        target: The target of the same batch.
    """
    try:
        found = answer_of(output)
    except TrainingError:
        return None
    if found.ndim == 0 or not found.is_floating_point():
        return None
    floats = isinstance(target, Tensor) and target.is_floating_point()
    if isinstance(target, Tensor) and not floats and found.ndim >= 2:
        if found.shape[:-1] == target.shape and found.shape[-1] > 1:
            return "classes", answer_of
        if (found.shape[0], *found.shape[2:]) == tuple(target.shape) and found.shape[1] > 1:
            return "classes", lambda output: answer_of(output).movedim(1, -1)
    if found is _logits(output) and found.ndim >= 2 and found.shape[-1] > 1 and not floats:
        return "classes", answer_of
    return "relative", answer_of


def _modules(model: nn.Module, layers: Sequence[str]) -> list[tuple[str, nn.Module]]:
    named = dict(model.named_modules())
    if isinstance(layers, str) or not layers or any(name not in named for name in layers):
        missing = layers if isinstance(layers, str) else next((n for n in layers if n not in named), "no layer")
        raise TrainingError(
            "the model has no such layers",
            got=repr(missing),
            wanted=f"a list of names of modules of {type(model).__name__}",
            remedy="[name for name, _ in model.named_modules()] has them",
        )
    return [(name, named[name]) for name in layers]


def _keeping(seen: dict[str, Tensor]) -> Callable[..., None]:
    def keep(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen[name] = answer_of(output)

    return keep


class Taught:
    """A loader whose targets carry the teacher's answers: (input, target) -> (input, (target, answer)).

    Where inputs come with a mask that hides tokens, so do targets: (target, answer, outputs, tokens), whose `tokens`,
    bool (batch, tokens), are those that are compared.

    Args:
        loader: Yields (input, target) pairs, anew each epoch.
        teacher: The dense model; it answers in evaluation mode, without gradients, on its own device.
        answer: Takes the tensor that the student is to match out of the teacher's output; default: `answer_of`.
        layers: Names of modules of the teacher whose outputs come along, (input, (target, answer, outputs)), for
            `Hidden`.

    Raises:
        TrainingError: The teacher is no module or has no such layers, or the loader or `answer` cannot be used.
    """

    def __init__(
        self, loader: Loader, teacher: nn.Module, *, answer: Answer = answer_of, layers: Sequence[str] = ()
    ) -> None:
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
        self._layers = _modules(teacher, layers) if layers else []

    def __len__(self) -> int:
        found = length(self.loader)
        if found is None:
            raise TypeError("the loader has no length")
        return found

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return self.answering(self.loader)

    def answering(self, batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield some (input, target) pairs of the loader with the teacher's answers."""
        device = device_of(self.teacher)
        for batch in batches:
            inputs, target = pair(batch)
            seen = dict[str, Tensor]()
            observed = calls.observing(self._layers, after=_keeping(seen))
            with calls.evaluating(self.teacher), torch.no_grad(), observed, randomness.undisturbed():  # the loader's
                answer = self._answered(call(self.teacher, to_device(inputs, device)), target)
            states = tuple(seen[name] for name, _ in self._layers if name in seen)
            tokens = read(self.teacher, Batch(inputs)).tokens
            if tokens is not None and not tokens.all():
                yield inputs, (target, answer, states, tokens)
            else:
                yield inputs, (target, answer, states) if self._layers else (target, answer)

    def _answered(self, output: Any, target: Any) -> Tensor:
        return self.answer(output)


def distilled(
    loss: Loss,
    *,
    weight: float | Callable[[Tensor], float] = 0.5,
    temperature: float = 2.0,
    kind: Kind = "classes",
    answer: Answer = answer_of,
    hidden: Hidden | None = None,
) -> Loss:
    """Return a loss for the batches of `Taught`.

    Args:
        loss: The training loss, `loss(output, target)`; it is given the student's output as it is.
        weight: Share of the teacher, 0 to 1; or a function of the training loss of a batch that tells it.
        temperature: Softens both answers, > 0; for "classes".
        kind: "classes": scores (..., classes), compared by KL divergence of their softmax; "values": tensors of any
            shape such as embeddings or the numbers of a regression, compared by mean squared error; "relative": the
            same over the mean square of the teacher's, so that it does not depend on their size.
        answer: Takes the tensor to compare out of the student's output; default: `answer_of`, the output itself, its
            `logits` or the first tensor in it.
        hidden: The student's layers, whose distance to the teacher's (`Taught(layers=)`) is added.

    Tokens that an attention mask hides are not compared, nor scores whose class is -100, torch's `ignore_index`.

    Example:
        >>> taught = twofour.training.Taught(loader, teacher)
        >>> twofour.finetune(model, taught, loss=twofour.training.distilled(F.cross_entropy), ...)

    Raises:
        TrainingError: An argument is impossible. The loss raises it where the two answers differ
            in shape, or "classes" are asked for and there are no two scores on a last axis.
    """
    require_called("loss", loss)
    require_called("answer", answer)
    share = weight if callable(weight) else lambda own: weight
    numbers = (callable(weight) or isinstance(weight, int | float)) and isinstance(temperature, int | float)
    if not numbers or not (callable(weight) or 0 <= weight <= 1) or not temperature > 0 or kind not in get_args(Kind):
        raise TrainingError(
            "the distillation is impossible",
            got=f"weight={weight}, temperature={temperature}, kind={kind!r}",
            wanted='0 <= weight <= 1, temperature > 0, kind "classes", "values" or "relative"',
            remedy="leave them out: half of the loss is the teacher's, at temperature 2",
        )

    def combined(output: Any, target: Any) -> Tensor:
        truth, wanted, *further = target
        states, tokens = further[0] if further else (), further[1] if len(further) > 1 else None
        found = answer(output)
        wanted = wanted.to(found.device)
        require_comparable(found, wanted, kind)
        count = _meant(found, truth, tokens) if kind == "classes" else tokens
        ours, dense = counted(found, count), counted(wanted, count)
        if kind == "classes":
            apart = _divergence(ours, dense, temperature)
        else:
            wide = torch.promote_types(ours.dtype, torch.float32)  # the square of 300 is no number of float16
            apart = F.mse_loss(ours.to(wide), dense.to(wide)) if kind == "values" else relative(ours, dense)
        own = loss(output, truth)
        teaching = share(own)
        both = (1 - teaching) * own + teaching * apart
        return both if hidden is None else both + hidden.weight * hidden.distance(states, tokens)

    return combined


def _divergence(found: Tensor, wanted: Tensor, temperature: float) -> Tensor:
    """Return Hinton's term for scores (..., classes): 0 where there are none."""
    wide = torch.promote_types(found.dtype, torch.float32)  # a sum over tokens is no number of float16
    student, teacher = (F.log_softmax(s / temperature, -1, dtype=wide).flatten(0, -2) for s in (found, wanted))
    return temperature**2 * F.kl_div(student, teacher, reduction="sum", log_target=True) / max(1, len(student))


def _meant(found: Tensor, truth: Any, tokens: Tensor | None) -> Tensor | None:
    """Return which scores count, as bool of one entry each: of tokens not hidden, and not left out by their class."""
    if not isinstance(truth, Tensor) or truth.is_floating_point() or truth.shape != found.shape[:-1]:
        return tokens
    meant = truth != IGNORED
    return meant & tokens.to(meant.device) if tokens is not None and tokens.shape == meant.shape else meant


def require_comparable(found: Tensor, wanted: Tensor, kind: str, layer: str | None = None) -> None:
    """Refuse answers of two shapes, and as classes those that are no scores."""
    if found.shape != wanted.shape:
        raise TrainingError(
            "the student's answer and the teacher's cannot be compared",
            got=f"{tuple(found.shape)} and {tuple(wanted.shape)}",
            wanted="the same shape",
            remedy="name layers that hand on the same shapes: before a width that was cut, or behind it"
            if layer
            else "pass answer=, a function of the output, to Taught and distilled",
            layer=layer,
        )
    if kind == "classes" and (found.ndim < 2 or found.shape[-1] < 2):
        raise TrainingError(
            "the answers are no scores of classes",
            got=f"shape {tuple(found.shape)}",
            wanted="(..., classes) with at least two classes: a softmax over one says nothing",
            remedy='kind="values" for a regression or single scores; a binary score x becomes two classes by '
            "answer=lambda output: torch.stack((torch.zeros_like(output), output), -1)",
        )
