"""How far an engine may be from the layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twofour import quantization
from twofour.compiler.codes import Codes
from twofour.compiler.conv import CompiledConv
from twofour.compiler.layer import CompiledLinear
from twofour.kernels.bits_matmul import BitWeight
from twofour.kernels.conv import finish
from twofour.kernels.nm_conv import nm_conv_reference
from twofour.measure.distance import distance
from twofour.packing import dense_of, encodings

AGREEMENT = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Computing type -> relative difference beyond which a graph does not compute what the layers do: fusion changes the
order of sums and leaves out roundings, which bfloat16 and whole numbers magnify."""

NOISE, DRAWS = 1e-6, 2
"""Size of float noise in front of a rounding, relative to the root mean square of a token, and how often it is drawn.
It stands for another order of sums: some roundings of float32."""

TIPPED = 2
"""How many times as far as such noise moves the layers an engine may be from them."""


@dataclass(frozen=True)
class Agreement:
    """How far an engine may be from the layers.

    Where layers round their inputs, noise of floats tips a code now and then, and what reads that layer then tips some
    more: of MiniLM in 4-bit weights and 8-bit inputs, one tip in the first layer moves the answer by some percent. So
    much is allowed, and the engine must agree as floats do where those layers do not round.

    Attributes:
        model: The model with compiled layers.
        floats: Relative difference of an engine that tips nothing.
        tipping: What noise in front of the roundings of inputs to few bits costs the layers; 0 without such layers.
    """

    model: nn.Module
    floats: float
    tipping: float = 0.0

    @property
    def allowed(self) -> float:
        """Relative difference beyond which an engine is not used."""
        return self.floats + TIPPED * self.tipping

    def judged(self, error: float, engine: Callable[[], Sequence[Any]], layers: Callable[[], Sequence[Any]]) -> float:
        """Return the difference of an engine, infinite where tipped codes are not all of it.

        Args:
            error: The difference that was found.
            engine: Runs the engine, by calls of the modules that `model` has.
            layers: Runs the layers.
        """
        if not self.floats < error <= self.allowed:
            return error
        return error if self.unrounded(engine, layers) <= self.floats else math.inf

    def unrounded(self, engine: Callable[[], Sequence[Any]], layers: Callable[[], Sequence[Any]]) -> float:
        """Return the difference of an engine where Linears do not round their inputs.

        Less what noise costs layers that still do: convolutions of low bits, and layers without a kernel.
        """
        with on_exact_activations(self.model):
            error = difference(engine(), layers())
            rest = TIPPED * tipping(self.model, layers) if error > self.floats else 0.0
        return max(0.0, error - rest)

    def said(self, error: float) -> str:
        """Return what a plan says of a difference that tipped codes make, "" of any other."""
        if not self.floats < error <= self.allowed:
            return ""
        return (
            f"; it differs from the layers by {error:.1e} on the example, since codes of rounded inputs tip: "
            f"float noise of {NOISE:g} in front of them moves the layers by {self.tipping:.1e}"
        )


def difference(found: Sequence[Any], want: Sequence[Any]) -> float:
    """Return how far an engine's answers are from the layers', infinite where a tensor is of another type."""
    pairs = [pair for pair in zip(found, want, strict=True) if isinstance(pair[1], Tensor)]
    return distance(found, want) if all(got.dtype == wanted.dtype for got, wanted in pairs) else math.inf


def amount(error: float) -> str:
    """Return how far an engine's answers are from the layers', in words where no number says it."""
    return f"by {error:.1e}" if math.isfinite(error) else "in the type or shape of an answer, or an infinity,"


def has_halves(values: Iterable[Any]) -> bool:
    """Tell whether a tensor among `values` is of 16 bits, so that roundings left out show."""
    return any(isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) for value in values)


def agreement(
    fast: nn.Module, dtype: str, leaves: Sequence[Any], run: Callable[[], Sequence[Any]], between: Iterable[Any] = ()
) -> Agreement:
    """Return the relative difference from the layers beyond which an engine is not used.

    Where inputs are rounded, other roundings cost as much: in int8 what the layers lose to the same weights on exact
    activations is allowed on top, in layers of low bits what float noise in front of the roundings costs.

    Args:
        fast: The model with compiled layers.
        dtype: Its computing type.
        leaves: The example.
        run: Runs the layers on it; returns the output's leaves.
        between: Tensors that the model's operators hand to each other.
    """
    low = dtype != "float32" or has_halves((*leaves, *fast.parameters(), *between))
    allowed = AGREEMENT[torch.bfloat16 if low else torch.float32]
    if not encodings.get(dtype).rounds_inputs:
        return Agreement(fast, allowed, tipping(fast, run))
    with on_exact_activations(fast):
        exact = run()
    lost = distance(run(), exact)
    return Agreement(fast, allowed + (lost if math.isfinite(lost) else 0.0), tipping(fast, run))


def tipping(model: nn.Module, run: Callable[[], Sequence[Any]]) -> float:
    """Return how far float noise in front of the roundings of inputs to few bits moves a model's answer.

    Args:
        model: The model, compiled or not.
        run: Runs it layer by layer; returns the output's leaves.

    Returns:
        The largest relative difference of `DRAWS` draws; 0 without such layers, and where it cannot be told.
    """
    held = quantization.of(model).items()
    layers = [model.get_submodule(name) for name, low in held if low.widths.inputs is not None]
    if not layers:
        return 0.0
    want, found = run(), []
    for seed in range(DRAWS):
        draw = torch.Generator().manual_seed(seed)

        def noisy(module: nn.Module, args: tuple[Any, ...], draw: torch.Generator = draw) -> tuple[Any, ...]:
            return _with_noise(args[0], 3 if isinstance(module, nn.Conv2d) else 1, draw), *args[1:]

        with ExitStack() as stack:
            for layer in layers:
                stack.callback(layer.register_forward_pre_hook(noisy).remove)
            found.append(distance(run(), want))
    return max(found) if all(map(math.isfinite, found)) else 0.0


def _with_noise(x: Tensor, axes: int, draw: torch.Generator) -> Tensor:
    """Return floats with noise on all but zeros, which other orders of sums leave as they are."""
    noise = torch.randn(x.shape, generator=draw, dtype=torch.float32, device="cpu").to(x)
    size = x.square().mean(tuple(range(-axes, 0)), keepdim=True).sqrt()
    return x + max(NOISE, torch.finfo(x.dtype).eps) * size * noise * (x != 0)


@contextmanager
def on_exact_activations(model: nn.Module) -> Iterator[None]:
    """Let compiled Linears and convolutions in int8 multiply activations as they are by opened weights inside."""
    products = [low.runs.product for low in quantization.of(model).values() if isinstance(low.runs, Codes)]
    with ExitStack() as stack:
        for layer in (*model.modules(), *products):
            if isinstance(layer, CompiledLinear):

                def forward(x: Tensor, layer: CompiledLinear = layer) -> Tensor:
                    held: Any = layer.prepared.source()
                    weight = held.real() if isinstance(held, BitWeight) else dense_of(held)
                    return F.linear(x.float(), weight.float(), layer.bias).to(x.dtype)

                object.__setattr__(layer, "forward", forward)
                stack.callback(object.__delattr__, layer, "forward")
            elif isinstance(layer, CompiledConv) and layer.dispatch.kernels[0].dtype == "int8":

                def image(x: Tensor, other: Tensor | None, layer: CompiledConv = layer) -> Tensor:
                    weight = dense_of(layer.prepared.source())
                    weight = weight if weight.ndim == 4 else weight.unsqueeze(2)
                    y = nm_conv_reference(x, weight, layer.bias, layer.geometry)
                    return finish(y, layer.problem.activation, other)

                object.__setattr__(layer, "_image", image)
                stack.callback(object.__delattr__, layer, "_image")
        yield
