"""The products of a training step, and the values that all other operations pass, found on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from twofour import calls
from twofour.errors import HardwareError
from twofour.hardware.matmul_shapes import Recorder, Traced, empty_like, prepared


class _Fused(torch.autograd.Function):
    """Attention and dropout as the one kernel that a GPU has for each, of which operands and results are counted.

    Dropout's mask, a byte a value written and read again, stands for the operand that its way back does not read.
    """

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, shape: Sequence[int], *given: Tensor) -> Tensor:
        """Return an answer of the shape."""
        ctx.recorder, ctx.given = recorder, given
        result = empty_like(shape, given[0])
        recorder.note(None, (given, result))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return gradients of what was given; it is read once more, the answer's gradient with it."""
        found = tuple(empty_like(tensor.shape, tensor) for tensor in ctx.given)
        ctx.recorder.note(None, (ctx.given, gradients, found))
        return None, None, *found


class _TrainedShortcuts(TorchFunctionMode):
    """Takes attention and dropout of a training step ahead of torch, whose meta device takes them apart."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and len(args) >= 3:
            query, _, value = args[:3]
            noted = self.recorder.products_of(func.__name__, args, None) or []
            self.recorder.products += noted
            return _Fused.apply(self.recorder, (*query.shape[:-1], value.shape[-1]), *args[:3])
        if func is F.dropout and isinstance(args[0], Tensor):
            given = args[0]
            rate, training = kwargs.get("p", args[1] if len(args) > 1 else 0.5), kwargs.get("training", True)
            training = args[2] if len(args) > 2 else training
            return _Fused.apply(self.recorder, given.shape, given) if training and rate else given
        return func(*args, **kwargs)


class _Step(nn.Module):
    """Forward and back in one call, so that checkpoints find the same parameters on the way back."""

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        super().__init__()
        self.model, self.recorder, self.values = model, recorder, 0

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Run both; without a trained output there is no way back."""
        with _TrainedShortcuts(self.recorder):
            output = self.model(*args, **kwargs)
        self.values = self.recorder.values
        trained = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if trained:
            self.recorder.backward = True
            torch.autograd.backward(trained, [empty_like(leaf.shape, leaf) for leaf in trained])


def trace_step(model: nn.Module, example: Any) -> Traced:
    """Run the shapes of a training step on the meta device: forward in training mode, and back from the outputs' sum.

    The products are those of the forward pass, each with the gradients that the step asks for. The loss is none of it.

    Args:
        model: Any module; it is neither changed nor computed.
        example: A tensor, a tuple of positional arguments or a dict of keyword arguments.

    Raises:
        HardwareError: As `trace`, or nothing of the model is trained.
    """
    recorder, tensors, given = prepared(model, example)
    wanted, remedy = calls.FORMS, "estimate the forward pass alone: leave training=True out"
    step = _Step(model, recorder)
    with (
        calls.keeping_modes(model),
        torch.enable_grad(),
        calls.explaining(HardwareError, "the shapes of a training step alone", wanted=wanted, remedy=remedy),
        recorder,
    ):
        model.train()
        named = {f"model.{name}": tensor for name, tensor in tensors.items()}
        torch.func.functional_call(step, named, given.args, given.kwargs, tie_weights=False)
    if not recorder.backward:
        raise HardwareError(
            "the training step trains nothing",
            got=f"{type(model).__name__}, whose output needs no gradient",
            wanted="a parameter with requires_grad that the output depends on",
            remedy="model.requires_grad_(True), or leave training=True out",
        )
    products, elementwise = tuple(recorder.products), recorder.values - recorder.norms
    return Traced(products, step.values, recorder.norms, elementwise, recorder.anew)
