"""A weight and its mask, packed both ways: W for the forward product and W^T for the data gradient.

On the CPU a layout is made once for a mask and filled again when the weight moves; on a GPU one pass packs both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Self, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from twofour.errors import TrainingError
from twofour.kernels import Kernel, Prepared
from twofour.kernels.base import Row
from twofour.kernels.problem import Problem
from twofour.packing import Packed, kept
from twofour.training.both_ways.watched import watch
from twofour.training.sparse_linear import Call, Source
from twofour.training.sparse_linear.implementations import fitting, weight_kernels


class _Handed(NamedTuple):
    """A dense weight that was shown, its version and that of the kept values then, and itself until the next use."""

    weak: ReferenceType[Tensor]
    version: int
    values: int
    held: Tensor | None


def computes_in(kernel: Row) -> torch.dtype:
    """Return the type that a row computes in."""
    return cast(torch.dtype, getattr(torch, kernel.dtype))


class MaskedWeight(Source):
    """The source of "forward" and "data"; nothing is packed twice for one state of the weight.

    Attributes:
        dense_parameter: Whether the parameter holds pruned values too (the mask moves).
        keep: Mask of the weight, bool (out, in); None before the first, and where there are `places`.
        places: Where the parameter holds the kept values alone: their places, packed (out, in), without values.
    """

    def __init__(self, dense_parameter: bool) -> None:
        self.dense_parameter = dense_parameter
        self.keep: Tensor | None = None
        self.places: Packed | None = None
        self._packed: dict[tuple[str, str], Prepared] = {}
        self._filled: set[tuple[str, str]] = set()
        self._packed_state: tuple[int, int] | None = None
        self._packed_mask: int | None = None
        self._dense: tuple[tuple[object, ...], Tensor] | None = None
        self._handed: list[_Handed] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_handed": []}

    def put(self, keep: Tensor) -> None:
        """Put a mask in force; the layer keeps the tensor itself, and sees when it is changed in place."""
        keep = keep.flatten(1)
        if self.keep is not keep:
            self.forget_layouts()
        self.keep, self.places = keep, None
        self.forget_values()

    def lift(self) -> None:
        """Have no mask."""
        self.keep = None
        self.forget_layouts()
        self.forget_values()

    def put_places(self, places: Packed) -> None:
        """Have the parameter hold the values at these places alone from now on."""
        self.forget_layouts()
        self.keep, self.places = None, places
        self.forget_values()

    def forget_layouts(self) -> None:
        """Drop what was laid out: other kernels will multiply from now on."""
        self._packed, self._filled, self._packed_mask = {}, set(), None

    def forget_values(self) -> None:
        """Take it that the weight has moved, though its version may not show it: it was written through `.data`."""
        self._packed_state = self._dense = None

    def hand_out(self, dense: Tensor, parameter: Tensor) -> None:
        """Remember a dense weight that a state dict shows, since it may be written to as that of a dense layer."""
        if not (dense.is_inference() or parameter.is_inference()):
            self._handed.append(_Handed(ref(dense), dense._version, parameter._version, dense))

    def forget_handed(self) -> None:
        """Take it that no dense weight is shown: other values come."""
        self._handed = []

    def settle(self, parameter: Tensor) -> None:
        """Have the kept values hold what was written to a dense weight that a state dict has shown.

        Raises:
            TrainingError: The kept values have moved in the meantime.
        """
        if not self._handed:
            return
        handed, self._handed, version = self._handed, [], parameter._version
        for weak, before, values, _ in handed:
            if (dense := weak()) is None:
                continue
            if dense._version != before:
                self._write(dense, parameter, moved=values not in (version, parameter._version))
                values = parameter._version
            # Whoever holds it on may write again; nobody else needs it.
            self._handed.append(_Handed(weak, dense._version, values, None))

    def _write(self, dense: Tensor, parameter: Tensor, moved: bool) -> None:
        if moved or self.places is None:
            raise TrainingError(
                "a tensor of a state dict was written to after the weights had moved",
                got=f"values {tuple(dense.shape)} of before",
                wanted="a write to what state_dict() shows now: kept values are no view of it",
                remedy="call state_dict() again before writing, or use load_state_dict or model.parameters()",
            )
        with torch.no_grad():
            parameter.copy_(kept.gather(self.places, dense))

    def mask(self) -> Tensor | None:
        """Return the mask in force, bool (out, in): of places a new tensor."""
        return self.keep if self.places is None else kept.mask_of(self.places)

    @property
    def nbytes(self) -> int:
        """Bytes of the mask and of the layouts that were built."""
        masks = [one for one in (self.keep, self.places) if one is not None]
        return self.layout_nbytes + sum(one.nbytes for one in masks)

    @property
    def layout_nbytes(self) -> int:
        """Bytes of what was made of the values: layouts, and the dense weight where a product is dense."""
        dense = 0 if self._dense is None else self._dense[1].nbytes
        return dense + sum(packed.nbytes for packed in self._packed.values())

    def kernels(self, call: Call) -> tuple[list[Kernel], str]:
        """See `Source.kernels`."""
        tokens = call.a.shape[:-1].numel()
        return fitting(weight_kernels(call.a.dtype, tokens, call.a.device), call.b, call.a)

    def takes(self, kernel: Kernel, call: Call) -> bool:
        """Whether a mask is in force, and the kernel computes in the call's type."""
        return (self.keep is not None or self.places is not None) and computes_in(kernel) is call.a.dtype

    def packed(self, kernel: Kernel, call: Call) -> Prepared:
        """Return the layout of W or W^T with the values that the weight has now."""
        self.watch(call.b)
        weight, key, version = call.b, (call.product, kernel.name), -1 if self.keep is None else self.keep._version
        if self._packed_mask != version:
            self.forget_layouts()
            self._packed_mask = version
        if key not in self._packed:
            keep = self.mask()
            assert keep is not None
            self._packed[key] = kernel.blank(keep.t().contiguous() if call.product == "data" else keep)
        state = (weight._version, weight.data_ptr())
        moved = self._packed_state != state
        # Layouts of another type, of evaluations between the steps, wait until they are asked for.
        alike = {one for one in self._filled if self._packed[one].kernel.dtype == kernel.dtype}
        if stale := {key} | alike if moved else {key} - self._filled:
            self._refill(weight.t() if call.product == "data" else weight, stale)
            self._filled, self._packed_state = stale if moved else self._filled | stale, state
        return self._packed[key]

    def watch(self, weight: Tensor) -> None:
        """Have optimisers' steps seen: fused ones do not count the version up by which a layout is known to be old.

        Forward products of a Linear have the parameter itself, others a view of it.
        """
        if isinstance(weight, nn.Parameter):
            watch(weight, self)

    def _refill(self, weight: Tensor, stale: set[tuple[str, str]]) -> None:
        """Write a weight as the parameter holds it into layouts."""
        converted: dict[torch.dtype, Tensor] = {}  # once for each type: torch's own rounds faster than a refill would
        keep = self.keep
        for product, name in stale:
            packed, turned = self._packed[product, name], product == "data"
            dtype = computes_in(packed.kernel)
            if dtype not in converted:
                converted[dtype] = weight.detach().to(dtype).contiguous()
            values = converted[dtype]
            if self.places is not None:
                whole = replace(self.places, values=values)
                given: tuple[Tensor | Packed, Tensor | None] = whole.transposed() if turned else whole, None
            else:
                assert keep is not None
                given = (values.t(), keep.t()) if turned else (values, keep)
            self._packed[product, name] = packed.kernel.refill(packed, *given)

    def multiply(self, kernel: Kernel, packed: Prepared, call: Call) -> Tensor:
        """Return the product, with B as `packed` returned it; leading axes are flattened."""
        bias = None if call.bias is None else call.bias.float()
        rows = len(call.b) if self.places is None else self.places.header.shape[call.product == "data"]
        return kernel.run(call.a.flatten(0, -2), packed, bias, Problem(rows))

    def dense(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return B in A's type, dense: masked where the parameter holds pruned values too."""
        keep = self.keep if self.dense_parameter else None
        if keep is None and self.places is None and call.b.dtype == call.a.dtype:
            return call.a, call.b
        self.watch(call.b)
        turned = call.product == "data"
        weight = call.b.t() if turned else call.b
        state = (weight._version, weight.data_ptr(), -1 if keep is None else keep._version, call.a.dtype)
        if self._dense is None or self._dense[0] != state:
            whole = weight if self.places is None else kept.scatter(replace(self.places, values=weight.detach()))
            self._dense = state, (whole if keep is None else whole * keep).to(call.a.dtype)
        return call.a, self._dense[1].t() if turned else self._dense[1]

    def trial(self) -> Self:
        """Return itself, to be packed anew: its layouts stay, and only what this trial uses is filled again."""
        self.forget_values()
        self._filled = set()
        return self
