"""A copy of the dense model, and the proof that it is one: nothing that it runs or writes into is the model's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from twofour.calls import keeping_buffers, keeping_modes, output_leaves
from twofour.errors import TrainingError, cut
from twofour.layers import local
from twofour.training import randomness
from twofour.training.batches import call, device_of, to_device
from twofour.training.lesson import Question


def copied(model: nn.Module, question: Question) -> nn.Module:
    """Return a copy of a dense model that shares nothing with it and answers alike in both modes.

    Another copy is asked for that, so that the one that comes back has run nothing.

    Raises:
        TrainingError: There is none.
    """
    try:
        tried = copy.deepcopy(model)
        if found := shared(model, tried) or _reached(model, tried, question):
            raise ValueError(f"the copy would share {', '.join(found[:3])}")
        del tried
        return copy.deepcopy(model)
    except TrainingError:
        raise
    except Exception as error:
        raise TrainingError(
            "the dense model cannot be copied",
            got=f"{type(error).__name__}: {cut(str(error), 200)}",
            wanted="a model that copy.deepcopy takes, with weights and methods of its own",
            remedy="teacher=another_copy, or teacher=None: nobody teaches then",
        ) from error


def shared(model: nn.Module, other: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers that another model has in the memory of this one."""
    mine = {place for tensor in (*model.parameters(), *model.buffers()) for place in _places(tensor)}
    theirs = (*other.named_parameters(), *other.named_buffers())
    return [name for name, tensor in theirs if any(place in mine for place in _places(tensor))]


def _places(tensor: Tensor) -> list[object]:
    with suppress(RuntimeError, NotImplementedError):  # of a layout, or of a class, that shows no memory
        storage = local(tensor).untyped_storage()
        if storage.nbytes() and storage.data_ptr():
            return [id(tensor), (tensor.device, storage.data_ptr())]
    return [id(tensor)]


def _reached(model: nn.Module, tried: nn.Module, question: Question) -> list[str]:
    """Return which weights of a model its copy reads, and which buffers it writes into: by a closure, a hook, a method.

    Raises:
        TrainingError: The copy answers in another shape when it is trained.
    """
    named = {name: p for name, p in model.named_parameters() if p.is_floating_point() or p.is_complex()}
    buffers = {name: (b, b._version) for name, b in model.named_buffers() if not b.is_inference()}
    inputs, found = to_device(question.inputs, device_of(tried)), dict[str, None]()
    with _followed(model, tried, list(named.values())):
        for training in (False, True):
            model.train(training)
            output = call(tried.train(training), inputs)
            answer = question.answer(output)
            leaves = [t for t in (*output_leaves(output), answer) if isinstance(t, Tensor) and t.requires_grad]
            if leaves:
                ones = [torch.ones_like(leaf) for leaf in leaves]
                reached = torch.autograd.grad(leaves, list(named.values()), ones, allow_unused=True)
                found |= dict.fromkeys(n for n, gradient in zip(named, reached, strict=True) if gradient is not None)
            found |= dict.fromkeys(name for name, (buffer, version) in buffers.items() if buffer._version != version)
            if not found and answer.shape != question.wanted.shape:
                raise _other_shape(answer, question.wanted)
    return list(found)


@contextmanager
def _followed(model: nn.Module, tried: nn.Module, weights: list[nn.Parameter]) -> Iterator[None]:
    """Inside, what is computed from the model's weights has gradients, and from those of its copy none: no memory."""
    asked = [weight.requires_grad for weight in weights]
    tried.requires_grad_(False)
    with keeping_modes(model), keeping_buffers(model), randomness.undisturbed(), torch.enable_grad():
        try:
            for weight in weights:
                weight.requires_grad_(True)
            yield
        finally:
            for weight, was in zip(weights, asked, strict=True):
                weight.requires_grad_(was)


def _other_shape(answer: Tensor, wanted: Tensor) -> TrainingError:
    return TrainingError(
        "a copy of the dense model cannot teach it",
        got=f"answers of shape {tuple(answer.shape)} in training, {tuple(wanted.shape)} in evaluation",
        wanted="the same shape in both modes",
        remedy="training.Taught(loader, teacher, answer=) and training.distilled(loss, answer=) say what is compared",
    )
