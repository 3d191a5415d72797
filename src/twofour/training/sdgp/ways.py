"""How the products of a layer with pruned gradients run: which way, measured in the first training step of a size."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from twofour.kernels import Kernel, find
from twofour.kernels.nm_gradient import packed_bytes, refuses
from twofour.training import products
from twofour.training.choice import Choice, fastest
from twofour.training.step_clock import part

PRODUCT = ("auto", "sparse", "dense")
"""What `attach` takes as `product`."""

LEAST = 1 << 22
"""Multiply-adds of a product from which it is measured: below, calling a kernel costs as much as it saves."""


class Pruner(Protocol):
    """Who prunes a layer's gradients: its state."""

    def prune(self, gradient: Tensor, *, trial: bool = False) -> Tensor:
        """Return the pruned gradient; a trial, for measuring, is no draw of the training."""
        ...

    def pack(self, gradient: Tensor, out: Tensor, *, trial: bool = False) -> Tensor:
        """Return the pruned gradient, packed into the beginning of `out`."""
        ...


class Shared:
    """What the layers of one `attach` share: the choices of equal sizes, and what pruned gradients are packed into.

    Attributes:
        product: One of `PRODUCT`.
        seconds: Time box of measuring one product at one size.
    """

    def __init__(self, product: str, seconds: float) -> None:
        self.product, self.seconds = product, seconds
        self.__setstate__({"product": product, "seconds": seconds})

    def buffer(self, size: int) -> Tensor:
        """Return this thread's buffer of at least `size` bytes: fresh pages would cost as much as the packing."""
        found: Tensor | None = getattr(self._threads, "buffer", None)
        if found is None or len(found) < size:
            self._threads.buffer = found = torch.empty(size, dtype=torch.uint8, device="cpu")
        return found

    def __getstate__(self) -> dict[str, Any]:  # choices hold for this machine, buffers for this process
        return {"product": self.product, "seconds": self.seconds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.known: dict[tuple[object, ...], Choice] = {}
        self._threads = threading.local()


class Ways:
    """The ways of one layer.

    Attributes:
        shared: What it shares with the other layers.
        why_dense: Why its data gradient has no sparse product, whatever the size, or None.
        shape: (out, in) of its weight as a matrix.
        choices: Product -> how it ran last; empty before the first step.
        size: (tokens, dtype) of that step.
    """

    def __init__(self, shared: Shared, shape: tuple[int, int], why_dense: str | None) -> None:
        self.shared, self.shape, self.why_dense = shared, shape, why_dense
        self.choices: dict[str, Choice] = {}
        self.size: tuple[int, str] = (0, "")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "choices": {}, "size": (0, "")}

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return X W^T + b of x (..., in) by the fastest dense way."""
        flat = _rows(x)
        dense = products.dense_ways(lambda way: products.forward(way, flat, weight, bias), flat)
        way = self._exact("forward", flat, dense)
        with part("forward"):
            if way == products.TORCH:
                return F.linear(x, weight, bias)
            return products.forward(way, flat, weight, bias).view(*x.shape[:-1], len(weight))

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Return dZ^T X of (..., out) and (..., in) by the fastest dense way."""
        gradient, x = _rows(gradient), _rows(x)
        dense = products.dense_ways(lambda way: products.weight_gradient(way, gradient, x), gradient)
        way = self._exact("weight", gradient, dense)
        with part("weight gradient"):
            return products.weight_gradient(way, gradient, x)

    def data_gradient(
        self,
        gradient: Tensor,
        weight: Tensor,
        state: Pruner,
        dense: Mapping[str, Callable[[Tensor], Tensor]],
        why_dense: str | None = None,
    ) -> Tensor:
        """Return the input's gradient: packed and multiplied by a 2:4 kernel, or pruned and given to a dense way.

        Args:
            gradient: dL/dz, (samples, tokens, out).
            weight: (out, in), of the gradient's dtype.
            state: Prunes.
            dense: Name -> what a dense way makes of the pruned gradient.
            why_dense: Why there is no sparse product this time, or None.

        Returns:
            (samples * tokens, in) of a sparse product, or what the dense way returns.
        """
        choice = self._data(gradient, weight, state, dense, self._why_dense(gradient, weight) or why_dense)
        if choice.sparse:
            return self._sparse(find(choice.kernel), gradient, weight, state, trial=False)
        with part("pack"):
            left = state.prune(gradient)
        with part("data gradient"):
            return dense[choice.dense](left)

    def _sparse(self, kernel: Kernel, gradient: Tensor, weight: Tensor, state: Pruner, *, trial: bool) -> Tensor:
        rows = gradient.shape[0] * gradient.shape[1]
        with part("pack"):
            if products.on_gpu(gradient.device):
                packed = kernel.refill(gradient, state.prune(gradient, trial=trial).reshape(rows, -1).contiguous())
            else:
                buffer = self.shared.buffer(packed_bytes(rows, gradient.shape[2], gradient.dtype))
                packed = state.pack(gradient, buffer, trial=trial)
        with part("data gradient"):
            return kernel.run_columns(weight, packed, rows)

    def _kernels(self, gradient: Tensor) -> list[Kernel]:
        """Return the rows that can multiply this gradient, packed."""
        rows = gradient.shape[0] * gradient.shape[1]
        found = products.estimate_kernels(gradient.dtype, gradient.device)
        return [kernel for kernel in found if kernel.refill_refuses(rows, gradient.shape[2]) is None]

    def _why_dense(self, gradient: Tensor, weight: Tensor) -> str | None:
        if self.why_dense is not None:
            return self.why_dense
        on_gpu = products.on_gpu(gradient.device)
        if not on_gpu and (reason := refuses(gradient)) is not None:
            return reason
        if weight.dtype != gradient.dtype:
            return f"a weight of {weight.dtype} with a gradient of {gradient.dtype}"
        if not gradient.numel():
            return "an empty batch"
        return self._why_not_on_gpu(gradient) if on_gpu else None

    def _why_not_on_gpu(self, gradient: Tensor) -> str | None:
        if self._kernels(gradient):
            return None
        found = products.estimate_kernels(gradient.dtype, gradient.device)
        if not found:
            return f"no 2:4 kernel for {str(gradient.dtype).removeprefix('torch.')} on this GPU"
        return found[0].refill_refuses(gradient.shape[0] * gradient.shape[1], gradient.shape[2])

    def _data(
        self,
        gradient: Tensor,
        weight: Tensor,
        state: Pruner,
        dense: Mapping[str, Callable[[Tensor], Tensor]],
        why: str | None,
    ) -> Choice:
        # Two answers without timing: sparse where it was asked for and can be had, torch's own product where nothing
        # is measured. `why` says why no sparse product can be had for this gradient.
        if self.shared.product == "sparse" and why is None:
            choice = Choice(self._kernels(gradient)[0].name, True, "asked for, not measured")
            return self._keep("data", gradient, choice)
        if reason := self._unmeasured(gradient):
            return self._keep("data", gradient, Choice(products.TORCH, False, why or reason))

        def measured() -> Choice:
            # Both sides pay for pruning: a dense way gets the pruned gradient, a sparse one packs it. Each is a trial,
            # which draws from a generator of its own: measuring must not move the random numbers of the training.
            ways = {name: partial(_after_pruning, way, gradient, state) for name, way in dense.items()}
            on_gpu = products.on_gpu(gradient.device)
            if why is not None:
                return fastest(ways, {}, self.shared.seconds, gpu=on_gpu, exact=why)
            sparse = {
                kernel.name: partial(self._sparse, kernel, gradient, weight, state, trial=True)
                for kernel in self._kernels(gradient)
            }
            return fastest(ways, sparse, self.shared.seconds, gpu=on_gpu)

        return self._keep("data", gradient, self._known("data", gradient, (why, *dense), measured))

    def _exact(self, product: str, operand: Tensor, dense: Mapping[str, Callable[[], Tensor]]) -> str:
        """Return the name of the fastest dense way."""
        if reason := self._unmeasured(operand):
            return self._keep(product, operand, Choice(products.TORCH, False, reason)).dense
        if len(dense) == 1:
            return self._keep(product, operand, Choice(products.TORCH, False, "the one exact way here")).dense
        choice = self._known(product, operand, (), lambda: fastest(dense, {}, self.shared.seconds))
        return self._keep(product, operand, choice).dense

    def _unmeasured(self, operand: Tensor) -> str | None:
        """Return why torch's own way is taken without measuring, or None."""
        if self.shared.product != "auto":
            return "not measured"
        known = operand.is_cpu or products.on_gpu(operand.device)
        if not known or operand.dtype not in products.types(operand.device):
            return f"{str(operand.dtype).removeprefix('torch.')} on {operand.device.type}: torch's own way"
        out, columns = self.shape
        if operand.numel() // operand.shape[-1] * out * columns < LEAST:
            return f"fewer than {LEAST / 1e6:.1f} million multiply-adds, not worth measuring"
        return None

    def _known(self, product: str, operand: Tensor, more: tuple[object, ...], measured: Callable[[], Choice]) -> Choice:
        """Measure once for all layers of a shape and for all batches of a size, up to a factor of two."""
        tokens = operand.numel() // operand.shape[-1]
        key = (product, *self.shape, tokens.bit_length(), operand.dtype, *more)
        if key not in self.shared.known:
            self.shared.known[key] = measured()
        return self.shared.known[key]

    def _keep(self, product: str, operand: Tensor, choice: Choice) -> Choice:
        self.choices[product] = choice
        self.size = operand.numel() // operand.shape[-1], str(operand.dtype).removeprefix("torch.")
        return choice


def _rows(x: Tensor) -> Tensor:
    """Return (tokens, columns) without gaps or repetitions."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.is_contiguous() else flat.contiguous()


def _after_pruning(way: Callable[[Tensor], Tensor], gradient: Tensor, state: Pruner) -> Tensor:
    return way(state.prune(gradient, trial=True))
