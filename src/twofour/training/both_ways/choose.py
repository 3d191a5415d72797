"""Measure each product's ways at a layer's shape and take the fastest; packing counts as part of a sparse way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twofour import measure
from twofour.kernels import Kernel
from twofour.kernels.problem import Problem
from twofour.patterns import Transposable
from twofour.training import products
from twofour.training.both_ways.linear import estimated
from twofour.training.choice import PRODUCTS, Choice, fastest


class Case(NamedTuple):
    """What a layer's choices depend on: two layers with equal cases share them.

    Attributes:
        out: Outputs.
        columns: Inputs.
        tokens: Rows of the input.
        dtype: Computing type.
        device: Where it is computed.
    """

    out: int
    columns: int
    tokens: int
    dtype: torch.dtype
    device: torch.device

    def packed(self, product: str) -> tuple[int, int]:
        """Return the sizes of the matrix that a product's sparse way packs."""
        sizes = {"forward": (self.out, self.columns), "data": (self.columns, self.out)}
        return sizes.get(product, (self.out, self.tokens))

    def kernels(self, product: str) -> tuple[list[Kernel], str]:
        """Return the rows that can run a product sparse, and why there are none."""
        found = (
            products.estimate_kernels(self.dtype, self.device)
            if product == "weight"
            else products.sparse_kernels(self.dtype, self.tokens, self.device)
        )
        if not found:
            return [], f"no 2:4 kernel for {str(self.dtype).removeprefix('torch.')} on {self.device.type}"
        refused = [kernel.refill_refuses(*self.packed(product)) for kernel in found]
        left = [kernel for kernel, reason in zip(found, refused, strict=True) if reason is None]
        return left, next((reason for reason in refused if reason), "")


def unmeasured(case: Case, gradient: str) -> dict[str, Choice]:
    """Return the first sparse way of every product, without measuring: for tests, and where a machine is too busy."""
    found = {}
    for product in PRODUCTS:
        kernels, why = case.kernels(product)
        if product == "weight" and gradient != "2:4":
            kernels, why = [], "exact"
        taken = kernels[0].name if kernels else products.TORCH
        found[product] = Choice(taken, bool(kernels), "not measured" if kernels else why)
    return found


def measured(case: Case, gradient: str, every: int | None, seconds: float) -> dict[str, Choice]:
    """Return the fastest way of every product of a layer.

    Args:
        case: The layer.
        gradient: "dense" or "2:4".
        every: Steps between two choices of the mask, over which building a layout anew is spread; None: never.
        seconds: Time box of one product.
    """
    return _Measured(case, every, seconds).choices(gradient)


def dense(case: Case, seconds: float) -> dict[str, Choice]:
    """Return the fastest dense way of every product: the control."""
    return _Measured(case, None, seconds).choices("dense", sparse=False)


class _Measured:
    def __init__(self, case: Case, every: int | None, seconds: float) -> None:
        generator = torch.Generator().manual_seed(0)
        weight = (
            torch.randn(case.out, case.columns, generator=generator, dtype=torch.float32, device="cpu")
            * case.columns**-0.5
        )
        keep = Transposable().project(weight, absolute=True)
        x = torch.randn(case.tokens, case.columns, generator=generator, dtype=torch.float32, device="cpu")
        gradient = torch.randn(case.tokens, case.out, generator=generator, dtype=torch.float32, device="cpu")
        self.keep = keep.to(case.device)
        self.weight, self.x, self.gradient = (
            tensor.to(case.device, case.dtype) for tensor in (weight * keep, x, gradient)
        )
        self.case, self.every, self.seconds = case, every, seconds

    def choices(self, gradient: str, *, sparse: bool = True) -> dict[str, Choice]:
        ways: dict[str, tuple[Callable[[str], Tensor], bool]] = {
            "forward": (lambda way: products.forward(way, self.x, self.weight, None), sparse),
            "data": (lambda way: products.data_gradient(way, self.gradient, self.weight), sparse),
            "weight": (lambda way: products.weight_gradient(way, self.gradient, self.x), sparse and gradient == "2:4"),
        }
        return {product: self._choose(product, *given) for product, given in ways.items()}

    def _choose(self, product: str, exact: Callable[[str], Tensor], sparse: bool) -> Choice:
        kernels, why = self.case.kernels(product) if sparse else ([], "exact")
        if product == "weight" and self.case.tokens % 4:
            kernels, why = [], f"{self.case.tokens} tokens, no multiple of 4"
        ways = {kernel.name: self._way(product, kernel) for kernel in kernels}
        more = {}
        if self.every is not None and product != "weight":
            more = {kernel.name: self._building(kernel) / self.every for kernel in kernels}
        dense = products.dense_ways(exact, self.x)
        on_gpu = products.on_gpu(self.case.device)
        return fastest(dense, ways, self.seconds, more, gpu=on_gpu, same=product != "weight", exact=why)

    def _way(self, product: str, kernel: Kernel) -> Callable[[], Tensor]:
        """Return one sparse way: new values into the operand, then the product."""
        if product == "weight":
            return partial(self._estimated, kernel)
        turned = product == "data"
        packed = kernel.blank(self.keep.t().contiguous() if turned else self.keep)
        given = (self.weight.t(), self.keep.t()) if turned else (self.weight, self.keep)
        return partial(self._filled, kernel, packed, given, self.gradient if turned else self.x)

    @staticmethod
    def _filled(kernel: Kernel, packed: Tensor, given: tuple[Tensor, Tensor], operand: Tensor) -> Tensor:
        return kernel.run(operand, kernel.refill(packed, *given), None, Problem(len(given[0])))

    def _estimated(self, kernel: Kernel) -> Tensor:
        return kernel.run_columns(self.x, estimated(kernel, self.gradient, 0, self.case.dtype), self.case.out)

    def _building(self, kernel: Kernel) -> float:
        """Milliseconds to lay out a new mask."""
        if products.on_gpu(self.case.device):
            return 0.0
        made: Mapping[str, Any] = {"build": lambda: kernel.blank(self.keep)}
        return measure.compare(made, repeats=2).timings["build"].median * 1e3
