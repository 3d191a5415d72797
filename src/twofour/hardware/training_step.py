"""estimate_step: what one training step would take on a machine that is not here, dense and with sparse operands.

A layer Y = X W^T multiplies three times: forward, input gradient dX = dZ W, weight gradient dW = dZ^T X. Each is priced
by `costs`, as in inference; a convolution is the implicit product of the same operations. Everything else passes
through memory and is priced by its bytes (`passes`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from twofour import quantization
from twofour.errors import HardwareError, one_of
from twofour.hardware import passes
from twofour.hardware.costs import Costs, costs
from twofour.hardware.machine import BITS, Machine, group_of
from twofour.hardware.matmul_shapes import Product, Traced, require_products
from twofour.hardware.reasons import DEPTHWISE, layer_of, reasons_of
from twofour.hardware.step_shapes import trace_step
from twofour.hardware.training_estimate import (
    DZ,
    FORWARD,
    INPUT,
    PRODUCTS,
    WEIGHT,
    Sparse,
    StepRow,
    TrainingEstimate,
    W,
)
from twofour.layers import attached, kind_of, walk
from twofour.training.sdgp.handle import why_exact
from twofour.training.sdgp.rule import Rule

TRAINED = ("tf32", "float16", "bfloat16")
"""Types of a step that is priced: those in which weights stay float32 and products are multiplied as they are."""

NO_LAYER = "no Linear, Conv1d or Conv2d"
NO_CONVOLUTION = "no library multiplies a 2:4 convolution: it is priced as a 2:4 product of its implicit matrices"
NO_ESTIMATE = "the unbiased estimate is priced as one pass; on a GPU twofour makes it by several torch operators"
ATTENTION = "attention is priced as its products; fused kernels multiply its scores a second time on the way back"
NOT_PRICED = ("the loss", "loading data", "gradients between GPUs", "launches of what is no product", "loss scaling")


@dataclass(frozen=True)
class _Size:
    """A product as it is priced: (m, k) by (k, n), n's operand sparse where one is."""

    m: float
    n: float
    k: float
    batch: int
    repeats: tuple[float, float] = (1, 1)


def _input(product: Product) -> _Size:
    """Return the input gradient: as many operations as forward, over the places of the input that an output sees."""
    if product.weight is None or product.positions is None:
        return _Size(product.m, product.k, product.n, product.batch)
    rows = min(product.positions, product.m * product.taps)
    depth = product.m * product.n * product.taps / rows
    often = max(1.0, rows * depth / (product.m * product.n))
    return _Size(rows, product.k // product.taps, depth, product.batch, (often, 1))


def _turned(size: _Size) -> _Size:
    """Return the same product with its other operand on the side that can be sparse."""
    return _Size(size.n, size.m, size.k, size.batch, (size.repeats[1], size.repeats[0]))


def _weight(product: Product) -> _Size:
    """Return the weight gradient; its operand of n is dZ^T."""
    return _Size(product.k, product.n, product.m, product.batch, (product.repeats, 1))


def estimate_step(
    model: nn.Module,
    example: Any,
    machine: Machine,
    dtype: str,
    optimizer: str,
    skip: str | Sequence[str] = (),
    *,
    rule: object = None,
    tokens: int | None = None,
    traced: Traced | None = None,
) -> TrainingEstimate:
    """Predict one training step on the example: `estimate(..., training=True)`. `traced` saves following it again.

    Forward in training mode, back from the outputs, a fused optimiser; products in `dtype` under autocast, weights and
    state in float32. What is sparse needs a pass that chooses and packs it in every step, which is counted: a weight is
    read in float32 and written packed for each product and its zeros are kept (`passes`); a gradient is read and
    written packed, read twice where it is rescaled.

    Raises:
        HardwareError: There is no example, or tokens beside it, the pattern is not 2:4, the dtype is none that is
            trained in, the optimiser is unknown, layers have low bits or something attached to them, the model cannot
            be followed, it runs no product, or nothing is trained.
    """
    _require(model, example, dtype, optimizer, rule, tokens)
    traced = traced or trace_step(model, example)
    require_products(model, traced)
    weights = {p.weight: p.values for p in traced.products if p.weight}
    cold = passes.is_cold(machine, dtype, traced.products)
    reasons = reasons_of(model, traced.products, dtype, skip)
    rows = _rows(model, traced.products, machine, dtype, skip, cold, reasons)
    value = passes.value_bytes(dtype)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    learned = sum(weights[name] for name in {p.weight for p in traced.products if p.weight_gradient and p.weight})
    casts = passes.CAST * (sum(weights.values()) + learned) if BITS[dtype] <= 16 else 0
    masks = {name: values for name, values in weights.items() if reasons.get(name) == ""}
    masked = {name: passes.traffic(machine, passes.MASK * values) * 1e3 for name, values in masks.items()}
    return TrainingEstimate(
        *(machine, dtype, optimizer, rows),
        norms_ms=passes.traffic(machine, traced.norms * value) * 1e3,
        elementwise_ms=passes.traffic(machine, traced.elementwise * value) * 1e3,
        optimizer_ms=passes.traffic(machine, passes.OPTIMIZERS[optimizer] * trained + casts) * 1e3,
        mask_ms=MappingProxyType(masked),
        cold=cold,
        notes=_notes(model, traced, rows),
    )


def _require(model: nn.Module, example: Any, dtype: str, optimizer: str, rule: object, tokens: int | None) -> None:
    one_of(f"a training step in {dtype} is not priced", dtype, TRAINED, HardwareError, 'dtype="bfloat16"')
    names = tuple(passes.OPTIMIZERS)
    one_of(f"the optimiser {optimizer!r} is unknown", optimizer, names, HardwareError, 'optimizer="adamw"')
    if example is None:
        raise HardwareError(
            "a training step needs an example",
            got="neither example nor tokens" if tokens is None else f"tokens={tokens} alone",
            wanted="a batch, as a tensor, a tuple or a dict of arguments",
            remedy="estimate(model, example, machine=..., training=True)",
        )
    if tokens is not None:
        raise HardwareError(
            "a training step takes no tokens",
            got=f"tokens={tokens} beside an example",
            wanted="the example alone, whose batch is priced",
            remedy="leave tokens out",
        )
    if rule is not None:
        raise HardwareError(
            "training steps with such weights are not priced",
            got=str(rule),
            wanted='"2:4"',
            remedy='pattern="2:4", or leave training=True out',
        )
    for name, module in model.named_modules():
        if over := attached(module):
            raise HardwareError(
                "a training step is priced of a model that nothing is attached to",
                got=f"`{name}`: {over} is attached",
                wanted="the model as it was before, pruned or not",
                remedy="call remove() of its handle first",
            )
    if low := next(iter(quantization.of(model)), None):
        raise HardwareError(
            "training steps of layers of low bits are not priced",
            got=f"`{low}` computes in low bits",
            wanted="a model that computes in floats",
            remedy="leave training=True out, or estimate the model before twofour.quantize",
        )


def _rows(
    model: nn.Module,
    products: Sequence[Product],
    machine: Machine,
    dtype: str,
    skip: str | Sequence[str],
    cold: bool,
    reasons: Mapping[str, str],
) -> tuple[StepRow, ...]:
    prices = _Prices(machine, dtype)
    exact = _exact(model, skip)
    uses = {name: sum(p.weight == name for p in products) for name in {p.weight for p in products}}
    found: list[StepRow] = []
    for product in products:
        wanted = (True, product.input_gradient, product.weight_gradient)
        for name, asked in zip(PRODUCTS, wanted, strict=True):
            if asked and product.depthwise:
                seconds = passes.depthwise(product, machine, dtype)
                size = (product.m, product.n, product.k, product.batch)
                ways = tuple(Sparse(operand, None, 0, "", DEPTHWISE) for operand in (W, DZ))
                place = (layer_of(product.weight), name)
                found.append(StepRow(*place, *size, seconds * 1e3, "memory", ways, product.weight))
            elif asked:
                why = "no weight" if product.weight is None else reasons.get(product.weight, "not a weight to prune")
                whole = exact.get(product.weight, NO_LAYER) if product.weight else why
                row = _Row(product, why, whole, uses[product.weight], cold)
                found.append(row.of(name, prices))
    return tuple(found)


def _exact(model: nn.Module, skip: str | Sequence[str]) -> dict[str, str]:
    """Return why SDGP leaves the gradient of a weight's layer whole, or ""; its own rule, by each name of the weight.

    Of layers that share a weight, which of them multiplies is not known: all have to be pruned.
    """
    globs = (skip,) if isinstance(skip, str) else tuple(skip)
    found: dict[int, str] = {}
    for layer, module in model.named_modules():
        kind = kind_of(module)
        for attribute, parameter in module.named_parameters(recurse=False):
            if kind is not None and kind.holds(attribute):
                why = why_exact(layer, module, Rule(2, 4), globs) or ""
                found[id(parameter)] = found.get(id(parameter)) or why
    names = model.named_parameters(remove_duplicate=False)
    return {name: found[id(parameter)] for name, parameter in names if id(parameter) in found}


class _Prices:
    """Prices products, each size once."""

    def __init__(self, machine: Machine, dtype: str) -> None:
        self.machine, self.dtype = machine, dtype
        self.known: dict[tuple[_Size, bool, bool], tuple[float, str]] = {}

    def of(self, size: _Size, sparse: bool, cold: bool) -> tuple[float, str]:
        """Return milliseconds and what bounds them."""
        key = (size, sparse, cold)
        if key not in self.known:
            m, n, k = size.m, size.n, size.k
            found: Costs = costs(
                self.machine, self.dtype, sparse, m, n, k, batch=size.batch, cold=cold, repeats=size.repeats
            )
            self.known[key] = float(found.seconds[0]) * 1e3, found.bound[0]
        return self.known[key]


@dataclass(frozen=True)
class _Row:
    """One layer's use in the step: why its weight and its gradient stay dense, how often the weight is used."""

    product: Product
    why: str
    exact: str
    uses: int
    cold: bool

    def of(self, name: str, prices: _Prices) -> StepRow:
        """Price one of its products."""
        p = self.product
        size = _Size(p.m, p.n, p.k, p.batch, (p.repeats, 1))
        size = {FORWARD: size, INPUT: _input(p), WEIGHT: _weight(p)}[name]
        cold = self.cold and name != WEIGHT
        ms, bound = prices.of(size, False, cold)
        make = {FORWARD: self._forward, INPUT: self._input, WEIGHT: self._weight}[name]
        sizes = (size.m, size.n, size.k, p.batch)
        return StepRow(layer_of(p.weight), name, *sizes, ms, bound, make(size, prices), p.weight)

    def _whole_groups(self, count: float, what: str, dtype: str) -> str:
        group = group_of(dtype)
        return f"{count:g} {what} have no whole groups of {group}" if count % group else ""

    def _forward(self, size: _Size, prices: _Prices) -> tuple[Sparse, ...]:
        return (self._of_weight(size, self._along_inputs(prices.dtype), prices),)

    def _along_inputs(self, dtype: str) -> str:
        channels = self.product.k // self.product.taps
        return self.why or self._whole_groups(channels, "input channels", dtype)

    def _input(self, size: _Size, prices: _Prices) -> tuple[Sparse, ...]:
        p = self.product
        outputs = self._whole_groups(p.n, "output channels", prices.dtype)
        both = self._along_inputs(prices.dtype) or outputs
        weight = self._of_weight(size, both, prices)
        if reason := self.exact or outputs:
            return weight, Sparse(DZ, None, 0, "", reason)
        ms, bound = prices.of(_turned(size), True, False)
        packed = passes.pack_gradient(prices.machine, prices.dtype, p.m * p.n * p.batch, reads=2)
        return weight, Sparse(DZ, ms, packed * 1e3, bound, "")

    def _weight(self, size: _Size, prices: _Prices) -> tuple[Sparse, ...]:
        p = self.product
        if reason := self.why or self._whole_groups(p.m, "tokens", prices.dtype):
            return (Sparse(DZ, None, 0, "", reason),)
        ms, bound = prices.of(size, True, False)
        packed = passes.pack_gradient(prices.machine, prices.dtype, p.m * p.n * p.batch, reads=1)
        return (Sparse(DZ, ms, packed * 1e3, bound, ""),)

    def _of_weight(self, size: _Size, reason: str, prices: _Prices) -> Sparse:
        if reason:
            return Sparse(W, None, 0, "", reason)
        p = self.product
        ms, bound = prices.of(size, True, self.cold)
        packed = passes.pack_weight(prices.machine, prices.dtype, p.values) / self.uses
        return Sparse(W, ms, packed * 1e3, bound, "")


def _notes(model: nn.Module, traced: Traced, rows: Sequence[StepRow]) -> tuple[str, ...]:
    """Say in words what was assumed and left out."""
    products = traced.products
    found = [f"not priced: {', '.join(NOT_PRICED)}"]
    if any(p.positions is not None for p in products):
        found.append(NO_CONVOLUTION)
    if any(p.weight is None for p in products):
        found.append(ATTENTION)
    if any(row.product == WEIGHT and row.way(DZ) for row in rows):
        found.append(NO_ESTIMATE)
    if traced.anew:
        found.append("products that checkpoints compute a second time are not priced")
    if any(p.depthwise for p in products):
        found.append("depthwise convolutions are priced as one pass over their input and output")
    priced = {p.weight for p in products}
    unseen = [weight.name for weight in walk(model, eligibility="any").weights if weight.name not in priced]
    if unseen:
        found.append(f"without product in this step, so not priced: {', '.join(map(layer_of, unseen))}")
    return tuple(found)
