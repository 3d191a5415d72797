"""A weight and its mask, packed both ways: W for the forward product and W^T for the data gradient.

On the CPU a layout is made once for a mask and filled again when the weight moves; on a GPU one pass packs both.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from twofour.kernels import Kernel, Prepared
from twofour.kernels.problem import Problem
from twofour.training.sparse_linear import Call, Source
from twofour.training.sparse_linear.implementations import fitting, weight_kernels


class MaskedWeight(Source):
    """The source of "forward" and "data"; nothing is packed twice for one state of the weight.

    Attributes:
        dtype: Computing type of the packed values.
        dense_parameter: Whether the parameter holds pruned values too (the mask moves).
        keep: Mask of the weight, bool (out, in); None before the first.
    """

    def __init__(self, dtype: torch.dtype, dense_parameter: bool) -> None:
        self.dtype, self.dense_parameter = dtype, dense_parameter
        self.keep: Tensor | None = None
        self._packed: dict[tuple[str, str], Prepared] = {}
        self._filled: set[tuple[str, str]] = set()
        self._packed_state: tuple[int, int] | None = None
        self._packed_mask: int | None = None
        self._dense: tuple[tuple[object, ...], Tensor] | None = None

    def put(self, keep: Tensor) -> None:
        """Put a mask in force; the layer keeps the tensor itself, and sees when it is changed in place."""
        if self.keep is not keep:
            self.forget_layouts()
        self.keep = keep
        self.forget_values()

    def forget_layouts(self) -> None:
        """Drop what was laid out: other kernels will multiply from now on."""
        self._packed, self._filled, self._packed_mask = {}, set(), None

    def forget_values(self) -> None:
        """Take it that the weight has moved, though its version may not show it: it was written through `.data`."""
        self._packed_state = self._dense = None

    @property
    def nbytes(self) -> int:
        """Bytes of the mask and of the layouts that were built."""
        held = [*self._packed.values(), *([] if self.keep is None else [self.keep])]
        return sum(one.nbytes for one in held)

    def kernels(self, call: Call) -> tuple[list[Kernel], str]:
        """See `Source.kernels`."""
        tokens = call.a.shape[:-1].numel()
        return fitting(weight_kernels(call.a.dtype, tokens, call.a.device), call.b, call.a)

    def takes(self, kernel: Kernel, call: Call) -> bool:
        """Whether a mask is in force, and the type is that of the packed values."""
        return self.keep is not None and call.a.dtype == self.dtype

    def packed(self, kernel: Kernel, call: Call) -> Prepared:
        """Return the layout of W or W^T with the values that the weight has now."""
        weight, keep, key = call.b, self.keep, (call.product, kernel.name)
        assert keep is not None
        if self._packed_mask != keep._version:
            self.forget_layouts()
            self._packed_mask = keep._version
        if key not in self._packed:
            self._packed[key] = kernel.blank(keep.t().contiguous() if call.product == "data" else keep)
        state = (weight._version, weight.data_ptr())
        stale = {key} - self._filled if self._packed_state == state else {key} | self._filled
        if stale:
            # One conversion for all: torch's own rounds faster than a refill would.
            values = (weight.t() if call.product == "data" else weight).detach().to(self.dtype).contiguous()
            for product, name in stale:
                packed = self._packed[product, name]
                given = (values.t(), keep.t()) if product == "data" else (values, keep)
                self._packed[product, name] = packed.kernel.refill(packed, *given)
            self._filled, self._packed_state = self._filled | stale, state
        return self._packed[key]

    def multiply(self, kernel: Kernel, packed: Prepared, call: Call) -> Tensor:
        """Return the product, with B as `packed` returned it; leading axes are flattened."""
        bias = None if call.bias is None else call.bias.float()
        return kernel.run(call.a.flatten(0, -2), packed, bias, Problem(len(call.b)))

    def dense(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return B in A's type, masked where the parameter is dense."""
        keep = self.keep if self.dense_parameter else None
        if keep is None and call.b.dtype == call.a.dtype:
            return call.a, call.b
        turned = call.product == "data"
        weight = call.b.t() if turned else call.b
        state = (weight._version, weight.data_ptr(), -1 if keep is None else keep._version, call.a.dtype)
        if self._dense is None or self._dense[0] != state:
            self._dense = state, (weight if keep is None else weight * keep).to(call.a.dtype)
        return call.a, self._dense[1].t() if turned else self._dense[1]

    def trial(self) -> Self:
        """Return itself, to be packed anew: its layouts stay, and only what this trial uses is filled again."""
        self.forget_values()
        self._filled = set()
        return self
