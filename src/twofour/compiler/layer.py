"""The compiled Linear: prepared weights, a dispatch table of kernels, and nothing that trains."""

from __future__ import annotations

from bisect import bisect_left
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _is_tracing, _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from twofour.compiler.prepared import PreparedWeights
from twofour.compiler.unpacked import WeightedLayer
from twofour.errors import KernelError
from twofour.kernels.dispatch import DispatchTable, read_dispatch
from twofour.kernels.operands import require_memory
from twofour.kernels.operator import convert, inference_only, through_packed
from twofour.kernels.problem import Problem
from twofour.native.surroundings import STRANGE, followed, from_autocast, has_tangent, unreadable


class MeasuredLayer(WeightedLayer):
    """A layer for inference that runs on measured kernels.

    Args:
        name: Name of the layer in its model, for messages.
        problem: What a kernel is asked.
        dispatch: Kernels by token count.
        prepared: The weight in each layout of `dispatch.layouts`.
        bias: float32 (out,) or None.
    """

    bias: nn.Parameter | None
    prepared: PreparedWeights

    def __init__(
        self, name: str, problem: Problem, dispatch: DispatchTable, prepared: PreparedWeights, bias: Tensor | None
    ) -> None:
        super().__init__()
        assert prepared.layouts == dispatch.layouts, (prepared.layouts, dispatch.layouts)
        self.name = name
        self.problem = problem
        self.prepared = prepared
        self.dispatch_text = dispatch.to_text()
        self.placed = prepared.device
        kept = None if bias is None else nn.Parameter(bias.detach().float().clone(), requires_grad=False)
        self.register_parameter("bias", kept)

    @property
    def dispatch(self) -> DispatchTable:
        """Kernels by token count."""
        return read_dispatch(self.dispatch_text)

    def _by_operator(self, x: Tensor, other: Tensor | None) -> Tensor:
        """Return the answer of the registered operator, which whatever follows the call sees."""
        operator, arguments = self._operator(x, other)
        if is_compiling():
            return operator(*arguments)
        with followed():
            return operator(*arguments)

    def _operator(self, x: Tensor, other: Tensor | None) -> tuple[Any, tuple[Any, ...]]:
        """Return the registered operator of the layer and what it is called with."""
        raise NotImplementedError


class CompiledLinear(MeasuredLayer):
    """A Linear for inference whose kernel is chosen by token count.

    Args:
        name: Name of the layer in its model, for messages.
        in_features: Reduction length.
        problem: Rows of the weight, int8: the input's static range, and what happens to the product.
        dispatch: Kernels by token count.
        prepared: The weight in each layout of `dispatch.layouts`.
        bias: float32 (out,) or None.

    Attributes:
        answers: float32 (2, out), the least and greatest of each output on data, where they are known: what attention
            reads as bytes is rounded by them.
        sources: Names of the layers whose rows it has, of a product of a graph.
    """

    answers: Tensor | None = None
    sources: tuple[str, ...] = ()

    def __init__(
        self,
        name: str,
        in_features: int,
        problem: Problem,
        dispatch: DispatchTable,
        prepared: PreparedWeights,
        bias: Tensor | None,
    ) -> None:
        super().__init__(name, problem, dispatch, prepared, bias)
        self.in_features = in_features
        self.out_features = problem.rows
        self.reads = dispatch.reads
        self.on_cpu = self.placed.type == "cpu"

    def read_bytes(self) -> None:
        """Take bytes of the layer's static range as input too: inside a graph, whose calls hand them on."""
        if not self.problem.quantization.dynamic:
            self.reads = (*self.reads, torch.uint8)

    def forward(self, input: Tensor, other: Tensor | None = None) -> Tensor:
        """Return epilogue(input @ W.T + bias): (..., in), float32 or bfloat16 -> (..., out) in the input's dtype.

        Args:
            input: The input; one that autocast made in a type that no kernel here reads is made float32.
            other: Second operand of the epilogue, (..., out), where it has one.

        Raises:
            KernelError: Shape, dtype or device of `input` or `other` do not fit, or a gradient is asked for.
        """
        x = input  # torch's name of it, by which a model may call its layer
        # `by_operators` and `has_tangent` written out: two calls of Python are a tenth of a microsecond.
        if is_compiling() or _is_tracing() or _len_torch_dispatch_stack():
            made = from_autocast(x, self.reads)
            return self._by_operator(x if made is None else made, other)
        try:  # costs nothing where nothing is raised
            shape = x.shape
            if x.dtype not in self.reads or not shape or shape[-1] != self.in_features or x.is_cpu is not self.on_cpu:
                return self.forward(self._fitting(x), other)
            if x.requires_grad and torch.is_grad_enabled():
                return self._differentiable(x, other)
            if x.is_neg() or forward_ad._current_level >= 0:
                x = self._plain(x)
            # A small product takes ten microseconds, and Python's share of it counts: steps are looked up once per
            # layer, and Module.__getattr__, which finds parameters, takes half a microsecond.
            limits, steps = self.prepared.steps.get(self.dispatch_text) or self.prepared.bound(self.dispatch_text)
            bias, tokens = self._parameters["bias"], shape[0] if len(shape) == 2 else prod(shape[:-1])
            run, weight, any_axes = steps[bisect_left(limits, tokens)] if limits else steps[0]
            if len(shape) == 2 or (any_axes and x.is_contiguous()):
                return run(x, weight, bias, self.problem, other)
            require_memory(x)  # it may have to be copied
            flat = x.reshape(tokens, self.in_features)
            other = None if other is None else other.reshape(tokens, self.out_features)
            return run(flat, weight, bias, self.problem, other).view(*shape[:-1], self.out_features)
        except KernelError as error:  # of what a tensor is, the layer knows more to say than a kernel
            raise (error.for_layer(self.name) if unreadable(x) is None else self._unfit(x)) from None
        except STRANGE as error:
            if unreadable(x) is None:
                raise
            raise self._unfit(x) from error

    def _operator(self, x: Tensor, other: Tensor | None) -> tuple[Any, tuple[Any, ...]]:
        epilogue, range_of_x = self.problem.epilogue, self.problem.quantization
        options = epilogue.activation, epilogue.combine, other, range_of_x.x_scale, range_of_x.x_zero
        options += () if range_of_x.plain else (range_of_x.bits, range_of_x.levels)
        weights = self.prepared.tensors, self.bias, self.dispatch_text
        return torch.ops.twofour.linear, (x, *weights, self.out_features, *options)

    def _plain(self, x: Tensor) -> Tensor:
        """Return x as its memory says it, or refuse what its memory does not hold."""
        if has_tangent(x):
            raise inference_only()
        return x.resolve_neg()

    def _differentiable(self, x: Tensor, other: Tensor | None) -> Tensor:
        if self.dispatch.device == "cpu" or not self.problem.epilogue.plain or other is not None:
            raise inference_only().for_layer(self.name)
        return through_packed(x, self.prepared.weights, self.bias, self.dispatch, self.out_features)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight in the model that was compiled."""
        shape = self.out_features, self.in_features
        return shape if self.axis == 1 else shape[::-1]

    def extra_repr(self) -> str:
        """Describe the layer in the printed model."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, kernels={self.dispatch_text}"

    def _fitting(self, x: Tensor) -> Tensor:
        """Return an input that autocast made in a type that is read, or refuse it."""
        if (made := from_autocast(x, self.reads)) is None:
            raise self._unfit(x)
        return made

    def _unfit(self, x: Tensor) -> KernelError:
        if (odd := unreadable(x)) is not None:
            got, remedy = odd
        else:
            fits = x.dtype in self.reads and x.is_cpu is self.on_cpu
            width = f"give the layer inputs whose last size is {self.in_features}, as the model was built for"
            move = width if fits else convert(x, self.reads, "cpu" if self.on_cpu else "cuda")
            got, remedy = f"{x.dtype} {tuple(x.shape)} on {x.device}", move
        return KernelError(
            "the input of a compiled layer does not fit",
            got=got,
            wanted=f"{' or '.join(map(str, self.reads))} (..., {self.in_features}) on {self.placed.type}",
            remedy=remedy,
            layer=self.name,
        )
