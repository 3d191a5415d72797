"""Measure each product's ways at a layer's shape and take the fastest; packing counts as part of a sparse way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from twofour import measure
from twofour.kernels.nm_matmul import NativeMatmul, refill
from twofour.kernels.nm_unbiased import nm_unbiased
from twofour.patterns import Transposable
from twofour.training import products
from twofour.training.both_ways.layouts import build
from twofour.training.choice import Choice, fastest

Shape = tuple[int, int, int]
"""(out, in, tokens) of a layer."""


def unmeasured(shape: Shape, dtype: torch.dtype, gradient: str) -> dict[str, Choice]:
    """Return the first sparse way of every product, without measuring: for tests, and where a machine is too busy."""
    kernels, estimates = products.sparse_kernels(dtype, shape[2]), products.estimate_kernels(dtype)
    found = Choice(kernels[0].name, True, "not measured")
    weight = Choice(estimates[0].name, True, "not measured") if gradient == "2:4" else _exact()
    return {"forward": found, "data": found, "weight": weight}


def measured(shape: Shape, dtype: torch.dtype, gradient: str, every: int | None, seconds: float) -> dict[str, Choice]:
    """Return the fastest way of every product at a shape.

    Args:
        shape: (out, in, tokens).
        dtype: Computing type.
        gradient: "dense" or "2:4".
        every: Steps between two choices of the mask, over which building a layout anew is spread; None: never.
        seconds: Time box of one product.
    """
    return _Measured(shape, dtype, every, seconds).choices(gradient)


def dense(shape: Shape, dtype: torch.dtype, seconds: float) -> dict[str, Choice]:
    """Return the fastest dense way of every product: the control."""
    return _Measured(shape, dtype, None, seconds).choices("dense", sparse=False)


class _Measured:
    def __init__(self, shape: Shape, dtype: torch.dtype, every: int | None, seconds: float) -> None:
        out, columns, tokens = shape
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(out, columns, generator=generator) * columns**-0.5
        self.keep = Transposable().project(self.weight, absolute=True)
        self.weight = (self.weight * self.keep).to(dtype)
        self.x = torch.randn(tokens, columns, generator=generator).to(dtype)
        self.gradient = torch.randn(tokens, out, generator=generator).to(dtype)
        self.dtype, self.every, self.seconds, self.tokens = dtype, every, seconds, tokens

    def choices(self, gradient: str, *, sparse: bool = True) -> dict[str, Choice]:
        ways: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
            "forward": (
                products.dense_ways(lambda way: products.forward(way, self.x, self.weight, None)),
                self._packed(self.x, turned=False) if sparse else {},
            ),
            "data": (
                products.dense_ways(lambda way: products.data_gradient(way, self.gradient, self.weight)),
                self._packed(self.gradient, turned=True) if sparse else {},
            ),
            "weight": (
                products.dense_ways(lambda way: products.weight_gradient(way, self.gradient, self.x)),
                self._estimated() if gradient == "2:4" else {},
            ),
        }
        return {product: self._choose(*candidates) for product, candidates in ways.items()}

    def _packed(self, operand: Tensor, *, turned: bool) -> dict[str, Callable[[], Tensor]]:
        """Return each sparse way: new values into the layout, then the product."""
        weight, rows = (self.weight.t(), self.weight.shape[1]) if turned else (self.weight, len(self.weight))
        ways = {}
        for kernel in products.sparse_kernels(self.dtype, self.tokens):
            packed = build(self.keep, self.dtype, kernel.layout, turned=turned)
            ways[kernel.name] = partial(self._refilled, kernel, packed, weight, operand, rows)
        return ways

    @staticmethod
    def _refilled(kernel: NativeMatmul, packed: Tensor, weight: Tensor, operand: Tensor, rows: int) -> Tensor:
        refill(packed, kernel.layout, weight)
        return kernel.run(operand, packed, None, rows)

    def _estimated(self) -> dict[str, Callable[[], Tensor]]:
        if self.tokens % 4:
            return {}
        buffer, rows = nm_unbiased(self.gradient, 0, self.dtype), len(self.weight)

        def run(kernel: NativeMatmul) -> Tensor:
            return kernel.run_columns(self.x, nm_unbiased(self.gradient, 0, self.dtype, buffer), rows)

        return {kernel.name: partial(run, kernel) for kernel in products.estimate_kernels(self.dtype)}

    def _choose(self, dense: Mapping[str, Any], sparse: Mapping[str, Any]) -> Choice:
        more = {}
        if self.every is not None:
            kernels = [kernel for kernel in products.sparse_kernels(self.dtype, self.tokens) if kernel.name in sparse]
            more = {kernel.name: self._building(kernel.layout) / self.every for kernel in kernels}
        return fastest(dense, sparse, self.seconds, more)

    def _building(self, layout: str) -> float:
        """Milliseconds to lay out a new mask."""
        record = measure.compare({"build": lambda: build(self.keep, self.dtype, layout, turned=False)}, repeats=2)
        return record.timings["build"].median * 1e3


def _exact() -> Choice:
    return Choice(products.TORCH, False, "exact")
