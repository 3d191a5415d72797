"""The compiled Linear: prepared weights, a dispatch table of kernels, and nothing that trains."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _is_tracing, _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from twofour.compiler.unpacked import WeightedLayer
from twofour.errors import KernelError
from twofour.kernels import Kernel, rows
from twofour.kernels.dispatch import DispatchTable, read_dispatch
from twofour.kernels.epilogue import PLAIN_EPILOGUE, Epilogue
from twofour.kernels.nm_matmul import DYNAMIC
from twofour.kernels.operands import require_memory
from twofour.kernels.operator import convert, inference_only, through_packed
from twofour.kernels.problem import Problem
from twofour.native.surroundings import STRANGE, followed, has_tangent, unreadable
from twofour.packing import Packed

Step = tuple[Callable[[Tensor, Tensor, Tensor | None, Problem, Tensor | None], Tensor], Tensor, bool]
"""A kernel's `run`, the weight in its layout, and whether it takes contiguous inputs of more than two axes."""


class PreparedWeights:
    """A weight in each layout a dispatch table needs; immutable, so copies of a model share it.

    oneDNN's opaque tensors cannot be deep-copied or pickled: copying shares them, pickling goes through dense ones.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.layouts = tuple(tensors)
        self.tensors = list(tensors.values())
        self.steps: dict[str, tuple[tuple[int, ...], tuple[Step, ...]]] = {}

    def bound(self, dispatch: str) -> tuple[tuple[int, ...], tuple[Step, ...]]:
        """Return the dispatch table's limits, and each step's kernel call with its weight; looked up once per table."""
        if dispatch not in self.steps:
            found = read_dispatch(dispatch)
            calls = tuple((kernel.run, self.tensors[layout], kernel.any_axes) for kernel, layout in found.steps)
            self.steps[dispatch] = (found.limits, calls)
        return self.steps[dispatch]

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedWeights:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        pairs = tuple(zip(self.layouts, self.tensors, strict=True))
        plain = {layout: tensor for layout, tensor in pairs if not tensor.is_mkldnn}
        opaque = {layout: _of(layout, tensor).restore(tensor) for layout, tensor in pairs if tensor.is_mkldnn}
        return _unpickle, (self.layouts, plain, opaque)

    @property
    def nbytes(self) -> int:
        """Bytes of all layouts; MKL's comes with the plain weight, which it needs beside its own."""
        beside = [plain for tensor in self.tensors if isinstance(plain := getattr(tensor, "plain", None), Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.tensors, *beside))

    def source(self) -> Packed | Tensor:
        """Return the weight in its canonical packed form, or dense (out, in) where no layout is packed."""
        pairs = zip(self.layouts, self.tensors, strict=True)
        weights = [_of(layout, tensor).restore(tensor) for layout, tensor in pairs]
        return next((weight for weight in weights if isinstance(weight, Packed)), weights[0])


def _of(layout: str, weight: Packed | Tensor) -> Kernel:
    """Return a kernel of the layout: that of the weight's own type where rows of several types share it."""
    found = [kernel for kernel in rows() if kernel.layout == layout]
    held = str(weight.dtype).removeprefix("torch.") if isinstance(weight, Tensor) else ""
    return next((kernel for kernel in found if kernel.dtype == held), found[0])


def _unpickle(
    layouts: tuple[str, ...], plain: dict[str, Tensor], opaque: dict[str, Packed | Tensor]
) -> PreparedWeights:
    made = plain | {layout: _of(layout, weight).prepare(weight) for layout, weight in opaque.items()}
    return PreparedWeights({layout: made[layout] for layout in layouts})


class CompiledLinear(WeightedLayer):
    """A Linear for inference whose kernel is chosen by token count.

    Args:
        name: Name of the layer in its model, for messages.
        in_features: Reduction length.
        out_features: Rows of the weight.
        dispatch: Kernels by token count.
        prepared: The weight in each layout of `dispatch.layouts`.
        bias: float32 (out,) or None.
        epilogue: What happens to the product before it is stored.

    Attributes:
        quantization: int8: the input's static range, which the prepared weights carry; else dynamic.
    """

    bias: nn.Parameter | None
    prepared: PreparedWeights

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        dispatch: DispatchTable,
        prepared: PreparedWeights,
        bias: Tensor | None,
        epilogue: Epilogue = PLAIN_EPILOGUE,
    ) -> None:
        super().__init__()
        assert prepared.layouts == dispatch.layouts, (prepared.layouts, dispatch.layouts)
        self.name = name
        self.in_features = in_features
        self.out_features = out_features
        self.prepared = prepared
        self.epilogue = epilogue
        self.quantization = DYNAMIC
        self.dispatch_text = dispatch.to_text()
        self.reads = dispatch.reads
        self.placed = prepared.tensors[0].device
        self.on_cpu = self.placed.type == "cpu"
        kept = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)
        self.register_parameter("bias", kept)

    @cached_property
    def problem(self) -> Problem:
        """What a kernel is asked."""
        return Problem(self.out_features, self.epilogue)

    @property
    def dispatch(self) -> DispatchTable:
        """Kernels by token count."""
        return read_dispatch(self.dispatch_text)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """Return epilogue(x @ W.T + bias): x (..., in), float32 or bfloat16 -> (..., out) in x's dtype.

        Args:
            x: The input.
            other: Second operand of the epilogue, (..., out), where it has one.

        Raises:
            KernelError: Shape, dtype or device of `x` or `other` do not fit, or a gradient is asked for.
        """
        # `by_operators` and `has_tangent` written out: two calls of Python are a tenth of a microsecond.
        if is_compiling() or _is_tracing() or _len_torch_dispatch_stack():
            return self._by_operator(x, other)
        try:  # costs nothing where nothing is raised
            shape = x.shape
            if x.dtype not in self.reads or not shape or shape[-1] != self.in_features or x.is_cpu is not self.on_cpu:
                raise self._unfit(x)
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

    def _by_operator(self, x: Tensor, other: Tensor | None) -> Tensor:
        """Return the answer of the registered operator, which whatever follows the call sees."""
        tensors, options = self.prepared.tensors, (self.epilogue.activation, self.epilogue.combine, other)
        arguments = x, tensors, self.bias, self.dispatch_text, self.out_features, *options
        if is_compiling():
            return torch.ops.twofour.linear(*arguments)
        with followed():
            return torch.ops.twofour.linear(*arguments)

    def _plain(self, x: Tensor) -> Tensor:
        """Return x as its memory says it, or refuse what its memory does not hold."""
        if has_tangent(x):
            raise inference_only()
        return x.resolve_neg()

    def _differentiable(self, x: Tensor, other: Tensor | None) -> Tensor:
        if self.dispatch.device == "cpu" or not self.epilogue.plain or other is not None:
            raise inference_only().for_layer(self.name)
        return through_packed(x, self.prepared.tensors, self.bias, self.dispatch, self.out_features)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight in the model that was compiled."""
        shape = self.out_features, self.in_features
        return shape if self.axis == 1 else shape[::-1]

    def extra_repr(self) -> str:
        """Describe the layer in the printed model."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, kernels={self.dispatch_text}"

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
