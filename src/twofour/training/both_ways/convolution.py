"""Convolutions whose weight is 2:4 along its input and along its output channels: forward pass and data gradient.

Rows of `kernels.nm_conv` read a weight as the layout "pairs" of a matrix (out, taps x in), which the rows of a Linear
can fill again when values move. The data gradient at stride 1 is a convolution too, of dL/dz with the weight turned
round: its channels exchanged, its taps in the opposite order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from twofour import measure
from twofour.kernels import Kernel, Prepared, available
from twofour.kernels.base import Row, widest
from twofour.kernels.conv import ConvKernel, ConvProblem, Geometry, PreparedConv
from twofour.kernels.nm_conv import LAYOUT, native_conv_rows, to_rows, to_turned_rows
from twofour.kernels.registration import register
from twofour.layers import CARRIED
from twofour.patterns import Transposable
from twofour.training.both_ways.estimate import Estimate
from twofour.training.both_ways.masked_weight import MaskedWeight, computes_in
from twofour.training.sparse_linear import Call, Choice, LayerPlan, LinearProducts, Workspace
from twofour.training.sparse_linear.chooser import measured
from twofour.training.sparse_linear.implementations import TORCH
from twofour.training.sparse_linear.module import as_autocast, first_derivative
from twofour.training.sparse_linear.products import numbered
from twofour.training.step_clock import part


@dataclass(frozen=True)
class Seen:
    """How a convolution was called.

    Attributes:
        geometry: Of the convolution.
        images: Images, height and width of its input.
        last: Whether they are channels-last.
    """

    geometry: Geometry
    images: tuple[int, int, int]
    last: bool

    @property
    def pixels(self) -> int:
        """Pixels of the output."""
        height, width = self.geometry.output(*self.images[1:])
        return self.images[0] * height * width


class MaskedFilter(MaskedWeight):
    """The source of "forward" and "data" of a convolution; both are given the weight itself, (out, in, height, width).

    Attributes:
        geometry: Of the convolution.
    """

    def __init__(self, dense_parameter: bool, geometry: Geometry) -> None:
        super().__init__(dense_parameter)
        self.geometry = geometry

    def put(self, keep: Tensor) -> None:
        """Put a mask of the weight's shape in force."""
        self.forget_layouts()
        self.keep = keep
        self.forget_values()

    def kernels(self, call: Call) -> tuple[list[Any], str]:
        """See `Source.kernels`."""
        if call.a.dtype is not torch.float32 or not call.a.is_cpu:
            name = str(call.a.dtype).removeprefix("torch.")
            return [], f"no 2:4 convolution in {name} on {call.a.device.type}"
        geometry = self._geometry(call.product)
        if geometry is None:
            return [], f"the data gradient of stride {self.geometry.stride} is no convolution of stride 1"
        rows = native_conv_rows()
        refused = [row.refuses(geometry) for row in rows]
        left = [row for row, reason in zip(rows, refused, strict=True) if reason is None]
        return list(widest(left)), "" if left else next(reason for reason in refused if reason)

    def takes(self, kernel: Row, call: Call) -> bool:  # type: ignore[override]
        """Whether a mask is in force, and the row computes in the call's type."""
        return self.keep is not None and computes_in(kernel) is call.a.dtype

    def packed(self, kernel: Any, call: Call) -> Prepared:
        """Return the layout of the weight as a row reads it, with the values that it has now."""
        assert self.keep is not None
        self.watch(call.b)
        weight, key, version = call.b, (call.product, kernel.name), self.keep._version
        if self._packed_mask != version:
            self.forget_layouts()
            self._packed_mask = version
        if key not in self._packed:
            self._packed[key] = _filler().blank(self._matrix(self.keep, call.product))
        state = (weight._version, weight.data_ptr())
        if self._packed_state != state:
            self._filled, self._packed_state = set(), state
        if key not in self._filled:
            values = self._matrix(weight.detach().to(computes_in(kernel)), call.product)
            self._packed[key] = _filler().refill(self._packed[key], values.contiguous())
            self._filled.add(key)
        geometry = self._geometry(call.product)
        assert geometry is not None
        return PreparedConv(kernel, self._packed[key].tensor, geometry=geometry)

    def multiply(self, kernel: Any, packed: Prepared, call: Call) -> Tensor:
        """Return the convolution, in the memory format of the images."""
        bias = None if call.bias is None else call.bias.float()
        prepared = cast(PreparedConv, packed)
        problem = ConvProblem(prepared.geometry.out_channels, geometry=prepared.geometry)
        return _in_format_of(call.a, cast(ConvKernel, kernel).run(call.a, prepared, bias, problem))

    def dense(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return both operands in one type, the weight masked where the parameter holds pruned values too."""
        keep = self.keep if self.dense_parameter else None
        if keep is None and call.b.dtype == call.a.dtype:
            return call.a, call.b
        self.watch(call.b)
        weight = call.b
        state = (weight._version, weight.data_ptr(), -1 if keep is None else keep._version, call.a.dtype)
        if self._dense is None or self._dense[0] != state:
            self._dense = state, (weight if keep is None else weight * keep).detach().to(call.a.dtype)
        return call.a, self._dense[1]

    def trial(self) -> Self:
        """Return itself, to be filled anew."""
        self.forget_values()
        self._filled = set()
        return self

    def _geometry(self, product: str) -> Geometry | None:
        """Return the convolution that a product is, or None."""
        of = self.geometry
        if product == "forward":
            return of
        around = [d * (k - 1) - p for d, k, p in zip(of.dilation, of.kernel, of.before, strict=True)]
        if of.stride != (1, 1) or min(around) < 0:
            return None
        zeros = around[0], around[1]
        return Geometry(of.out_channels, of.in_channels, of.kernel, (1, 1), zeros, zeros, of.dilation)

    def _matrix(self, weight: Tensor, product: str) -> Tensor:
        """Return a weight, or its mask, as rows over all inputs of the convolution that a product is."""
        return to_rows(weight) if product == "forward" else to_turned_rows(weight)


def _filler() -> Kernel:
    """Return a row of a Linear that fills the layout of `nm_conv`."""
    rows = available("nm_matmul")
    return next(row for row in rows if (row.layout, row.dtype) == (LAYOUT, "float32") and row.refills)


def _run_forward(x: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> Tensor:
    products = numbered(number)
    ways = {TORCH: partial(_convolved, source_of(products).geometry, bias)}
    return _in_format_of(x, products.run(Call("forward", x, weight, bias, dense=ways)))


def _run_data_gradient(gradient: Tensor, x: Tensor, weight: Tensor, number: int) -> Tensor:
    products = numbered(number)
    ways = {TORCH: partial(_data_gradient, source_of(products).geometry, x)}
    return _in_format_of(x, products.run(Call("data", gradient, weight, dense=ways)))


def _in_format_of(x: Tensor, found: Tensor) -> Tensor:
    """Return images in the memory format of those of x, which compiled graphs were promised."""
    return found.contiguous(memory_format=torch.contiguous_format if x.is_contiguous() else torch.channels_last)


def _shown_forward(x: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> Tensor:
    geometry = source_of(numbered(number)).geometry
    return _in_format_of(x, x.new_empty(len(x), len(weight), *geometry.sizes(*x.shape[2:])))


def _shown_data_gradient(gradient: Tensor, x: Tensor, weight: Tensor, number: int) -> Tensor:
    return _in_format_of(x, x.new_empty(x.shape))


register(
    "masked_convolution(Tensor x, Tensor weight, Tensor? bias, int number) -> Tensor",
    _shown_forward,
    CompositeExplicitAutograd=_run_forward,
)
register(
    "masked_convolution_gradient(Tensor gradient, Tensor x, Tensor weight, int number) -> Tensor",
    _shown_data_gradient,
    CompositeExplicitAutograd=_run_data_gradient,
)


class _Convolution(torch.autograd.Function):
    """The convolution of x (N, C, H, W), with a weight that is masked; opaque operators inside `torch.compile`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, number: int, *axes: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.number, ctx.axes, ctx.bias = number, axes, None if bias is None else bias.dtype
        if torch.compiler.is_compiling():
            return torch.ops.twofour.masked_convolution(x, weight, bias, number)
        ctx.products = numbered(number)  # the graph may outlive the layer
        return _run_forward(x, weight, bias, number)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        compiling, gradient = first_derivative(ctx.number), _in_format_of(x, gradients[0].to(x.dtype))
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            of = torch.ops.twofour.masked_convolution_gradient if compiling else _run_data_gradient
            dx = of(gradient, x, weight, ctx.number)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            wanted = [False, ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
            with nullcontext() if compiling else part("weight gradient"):
                _, dw, db = _exact(ctx.axes, gradient, x, weight.to(x.dtype), wanted)
            dw = None if dw is None else dw.to(weight.dtype)
            db = None if db is None else db.to(ctx.bias)
        return dx, dw, db, *[None] * 4


def source_of(products: LinearProducts) -> MaskedFilter:
    """Return the source of a convolution's forward pass and data gradient."""
    return cast(MaskedFilter, products.sources["forward"])


def _convolved(geometry: Geometry, bias: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:
    bias = None if bias is None else bias.to(x.dtype)
    return functional.conv2d(x, weight, bias, geometry.stride, geometry.before, geometry.dilation)


def _data_gradient(geometry: Geometry, x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    return cast(Tensor, _exact(_axes(geometry), gradient, x, weight, [True, False, False])[0])


def _axes(geometry: Geometry) -> tuple[list[int], list[int], list[int]]:
    return list(geometry.stride), list(geometry.before), list(geometry.dilation)


def _exact(
    axes: tuple[list[int], ...], gradient: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]
) -> tuple[Tensor | None, ...]:
    """Return those gradients of input, weight and bias that are wanted, as torch computes them."""
    around = (*axes, False, [0, 0], 1)
    return torch.ops.aten.convolution_backward(gradient, x, weight, [len(weight)], *around, wanted)


class SparseConv2d(nn.Conv2d):
    """A Conv2d while products are attached to it."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _through_products(self.__dict__[CARRIED], input, weight, bias)


def _through_products(products: LinearProducts, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    (x,) = as_autocast(x)
    if not torch.compiler.is_compiling():
        products.meet(x.dtype)
    images, axes = x if x.ndim == 4 else x.unsqueeze(0), _axes(source_of(products).geometry)
    with torch.autocast(x.device.type, enabled=False):
        y = cast(Tensor, _Convolution.apply(images, weight, bias, products.number, *axes))
    return y if x.ndim == 4 else y.squeeze(0)


def obstacle(module: nn.Conv2d) -> str | None:
    """Return why a convolution cannot take part, or None."""
    if module.padding_mode != "zeros":
        return f"padding_mode={module.padding_mode!r}: zeros are wanted"
    geometry = Geometry.of(module)
    if geometry.groups > 1:
        return f"{geometry.groups} groups of channels: one is wanted"
    return None if geometry.symmetric else f"uneven padding {geometry.before} and {geometry.after}"


def conv_choices(
    every: int | None, kernels: str, seconds: float, seen: Seen, dtype: torch.dtype
) -> Mapping[str, Choice]:
    """Return how the products of a convolution run; arguments as in `choose.choices`.

    Building the layouts of a new mask takes longer than filling them; it is spread over the steps between two.
    """
    of = seen.geometry
    generator = torch.Generator().manual_seed(0)
    form = torch.channels_last if seen.last else torch.contiguous_format

    def random(*size: int) -> Tensor:
        found = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")
        return found.contiguous(memory_format=form)

    weight = random(of.out_channels, of.in_channels, *of.kernel) * of.columns**-0.5
    source = MaskedFilter(False, of)
    keep = Transposable().project(weight.movedim(1, -1), absolute=True).movedim(-1, 1)
    weight = (weight * keep).to(dtype)
    source.put(keep)
    n, height, width = seen.images
    x = random(n, of.in_channels, height, width).to(dtype)
    dz = random(n, of.out_channels, *of.output(height, width)).to(dtype)
    calls = (
        Call("forward", x, weight, dense={TORCH: partial(_convolved, of, None)}),
        Call("data", dz, weight, dense={TORCH: partial(_data_gradient, of, x)}),
    )
    found = {"weight": Choice(TORCH, False, "exact")}
    for call in calls:
        rows, why = source.kernels(call)
        if kernels == "sparse":
            found[call.product] = Choice(rows[0].name, True, "not measured") if rows else Choice(TORCH, False, why)
            continue
        building = {} if every is None else {row.name: _building(source, keep, call) / every for row in rows}
        found[call.product] = measured(call, source, seconds, building)
    return {product: found[product] for product in ("forward", "data", "weight")}


def _building(source: MaskedFilter, keep: Tensor, call: Call) -> float:
    """Return the milliseconds of laying out a new mask."""
    build = partial(_filler().blank, source._matrix(keep, call.product))
    return measure.compare({"build": build}, repeats=2).timings["build"].median * 1e3


def products_of(
    title: str, geometry: Geometry, dense_parameter: bool, plan: LayerPlan, anew: Callable[..., Mapping[str, Choice]]
) -> LinearProducts:
    """Return what an attached convolution carries."""
    source = MaskedFilter(dense_parameter, geometry)
    exact = Estimate(source, 0, Workspace(), wanted=False)
    return LinearProducts(title, {"forward": source, "data": source, "weight": exact}, plan, anew=anew)
