"""The weight of a compiled layer as other code sees it: sizes and dtype for nothing, values when an operator asks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import _is_tracing, _len_torch_dispatch_stack
from torch.utils._pytree import tree_leaves, tree_map

from twofour.capture import outside_tracing
from twofour.errors import KernelError, TwofourError
from twofour.layers import CompiledLayer
from twofour.packing import Packed, dense_of, has_form, pack, packed_rule, rewrite
from twofour.patterns import Pattern

logger = logging.getLogger("twofour.compiler")


@dataclass(eq=False)
class Reads:
    """What has been said of a compiled model's weights being read; the layers of one model share it.

    Attributes:
        said: Whether the warning was given.
        layers: Names of the layers whose weights were unpacked.
    """

    said: bool = False
    layers: set[str] = field(default_factory=set)

    def add(self, layer: str) -> None:
        """Note that an operator reads a weight; the first one of a model is a warning."""
        self.layers.add(layer)
        if not self.said:
            self.said = True
            logger.warning(
                "layer `%s`: an operator reads the dense weight of a compiled layer; it is unpacked at each read, and "
                "a product computed with it does not use the compiled kernels (said once per model)",
                layer,
            )


class UnpackedWeight(Tensor):
    """Stand-in for the dense weight of a compiled layer, to look at and to compute with, never to write to.

    dtype, shape, strides and device are known without the values: Hugging Face's models ask `layer.weight.dtype` at
    every call. An operator gets the values, unpacked for it alone; views are stand-ins again, so that no write to one
    is lost without a word.
    """

    _layer: str
    _values: Callable[[], Tensor]

    # Attributes are the tensor's own, not a call of Python each.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def of(
        layer: str, values: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> UnpackedWeight:
        """Make the stand-in of a contiguous weight.

        Args:
            layer: Name of the layer, for messages.
            values: Returns the dense weight.
            shape: Of the weight.
            dtype: Of the weight.
            device: Of the weight.
        """
        with torch.inference_mode(False):  # it outlives the mode of the call that asks for it first
            made = Tensor._make_wrapper_subclass(UnpackedWeight, tuple(shape), dtype=dtype, device=device)
        made._layer, made._values = layer, values
        return made

    def _view(self, made: Tensor, values: Callable[[], Tensor]) -> UnpackedWeight:
        """Make the stand-in of a view, which has the sizes of `made`."""
        with torch.inference_mode(self.is_inference()):  # torch counts writes to a view with those to its base
            new = Tensor._make_wrapper_subclass(
                UnpackedWeight, made.size(), made.stride(), made.storage_offset(), dtype=made.dtype, device=made.device
            )
        new._layer, new._values = self._layer, values
        return new

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on the values; one that writes to them is refused."""
        kwargs = kwargs or {}
        schema = func._schema.arguments
        operands = [*zip(schema, args, strict=False), *((a, kwargs[a.name]) for a in schema if a.name in kwargs)]
        held = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, UnpackedWeight))
        for argument, operand in operands:
            if argument.is_write:
                for leaf in tree_leaves(operand):
                    if isinstance(leaf, UnpackedWeight):
                        raise unwritable(leaf._layer)
        if func is torch.ops.aten.detach.default:
            return held._view(held, held._values)
        opened = tree_map(lambda leaf: leaf._values() if isinstance(leaf, UnpackedWeight) else leaf, (args, kwargs))
        found = func(*opened[0], **opened[1])
        if not any(answer.alias_info is not None for answer in func._schema.returns):
            return found
        return tree_map(lambda leaf: held._view(leaf, lambda: leaf) if isinstance(leaf, Tensor) else leaf, found)

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The stand-in itself, without a gradient."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise unwritable(self._layer)

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """Return the values as an array that cannot be written to."""
        array = self.clone().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Return the values as lists."""
        return self.clone().tolist()

    def data_ptr(self) -> int:
        """Refuse to name an address: there is no memory behind a stand-in.

        Raises:
            KernelError: Always.
        """
        raise _without_memory(self._layer)

    def untyped_storage(self) -> torch.UntypedStorage:
        """Refuse as `data_ptr` does."""
        raise _without_memory(self._layer)

    def storage(self) -> torch.TypedStorage:
        """Refuse as `data_ptr` does."""
        raise _without_memory(self._layer)

    def share_memory_(self) -> Self:
        """Refuse as `data_ptr` does."""
        raise _without_memory(self._layer)

    def __dlpack__(self, **options: Any) -> Any:
        return self.clone().__dlpack__(**options)

    def apply_(self, fn: Callable[..., Any]) -> Tensor:
        """Refuse: a stand-in is not written to."""
        raise unwritable(self._layer)

    def map_(self, other: Tensor, fn: Callable[..., Any]) -> Tensor:
        """Refuse: a stand-in is not written to."""
        raise unwritable(self._layer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


class WeightedLayer(CompiledLayer):
    """A compiled layer whose weight can be looked at, though kernels run on what was prepared from it.

    Attributes:
        prepared: The weight as its kernels read it.
        axis: Reduction axis of the weight in the model that was compiled: 1, or 0 where it stands as (in, out).
        pattern: What that weight obeys, None where it is dense; a file says it again.
        weight_reads: What was said of its weight being read; layers of one model share it.
    """

    prepared: Any
    axis: int = 1
    pattern: Pattern | None = None

    def __init__(self) -> None:
        super().__init__()
        self.weight_reads = Reads()
        self._stand_in: UnpackedWeight | None = None

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight in the model that was compiled."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        """The dense weight: sizes and dtype for nothing, values unpacked for each operator that reads them."""
        if _is_tracing() or _len_torch_dispatch_stack():  # what a trace or a capture holds must have memory
            with _unrecorded():
                return self._unpacker(said=False)()
        if self._stand_in is None:
            shape, dtype = self.weight_shape, self.weight_dtype
            self._stand_in = UnpackedWeight.of(self.name, self._unpacker(), shape, dtype, self.placed)
        return self._stand_in

    def stored(self) -> Packed | Tensor:
        """Return the weight as it is prepared, (out, in)."""
        return self.prepared.stored()

    def source(self) -> Packed | Tensor:
        """Return the weight as the model has it and a file holds it: packed by its own pattern where that has a form.

        A dense weight of int8 is packed as "dense", any other is a tensor.

        Raises:
            PackingError: The weight does not obey its pattern.
        """
        source = exchanged(self.stored(), self.axis)
        if self.pattern is None:
            return source
        try:
            return _in_form(source, self.pattern, self.axis)
        except TwofourError as error:
            raise error.for_layer(f"{self.name}.weight") from None

    def _unpacker(self, *, said: bool = True) -> Callable[[], Tensor]:
        """Return what unpacks the weight, `said` with a word the first time; it does not hold the layer."""
        name, reads, prepared, axis, dtype = self.name, self.weight_reads, self.prepared, self.axis, self.weight_dtype

        def values() -> Tensor:
            if said:
                reads.add(name)
            with outside_tracing():
                source = exchanged(prepared.source(), axis)
                return dense_of(source).to(dtype).contiguous()

        return values

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise unwritable(self.name)
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter, however it is assigned; `weight` is none."""
        if name == "weight":
            raise unwritable(self.name)
        if (
            type(param) is nn.Parameter and param.is_neg()
        ):  # kernels read numbers where they stand, a sign stands beside
            param = nn.Parameter(param.detach().resolve_neg(), requires_grad=param.requires_grad)
        super().register_parameter(name, param)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stand_in": None}  # a copy makes its own, with its own account of reads


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Keep what is computed inside out of what torch.jit.trace records."""
    if not _is_tracing():
        yield
        return
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # pyright: ignore[reportAttributeAccessIssue]


def _in_form(weight: Packed | Tensor, pattern: Pattern, axis: int) -> Packed | Tensor:
    """Return a weight in the packed form of its pattern: kernels may read a wider form, or none."""
    held = weight.header.dtype if isinstance(weight, Packed) else str(weight.dtype).removeprefix("torch.")
    if not has_form(packed_rule(pattern), held):
        return weight
    return rewrite(weight, pattern) if isinstance(weight, Packed) else pack(weight, pattern, axis=axis)


def exchanged(weight: Packed | Tensor, axis: int) -> Packed | Tensor:
    """Return a weight (out, in) as a model has it whose reduction axis is `axis`, or the other way round."""
    if axis == 1:
        return weight
    return weight.transposed() if isinstance(weight, Packed) else weight.t()


def unwritable(layer: str) -> KernelError:
    """Build the error for a write to the weight of a compiled layer, which its kernels would not see."""
    return KernelError(
        "the weight of a compiled layer cannot be changed",
        got="a write to its `weight`, to a view of it, or another tensor in its place",
        wanted="a weight that is read: the kernels run on a packed copy of it",
        remedy="change the weight of the model that was compiled, and compile it again; to compute with a copy: "
        "weight.clone()",
        layer=layer,
    )


def _without_memory(layer: str) -> KernelError:
    return KernelError(
        "the weight of a compiled layer has no memory of its own",
        got="its address or storage asked for",
        wanted="an operator on its values",
        remedy="weight.clone() is a plain tensor",
        layer=layer,
    )
