"""What the products of a layer run, chosen once for a shape: on operands that look like the example's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from twofour import measure
from twofour.kernels import Kernel
from twofour.kernels.nm_sddmm import row_for
from twofour.packing import kept
from twofour.patterns import Transposable
from twofour.training.both_ways.estimate import Estimate
from twofour.training.both_ways.masked_weight import MaskedWeight
from twofour.training.sparse_linear import EXACT, Call, Choice, Source, Workspace
from twofour.training.sparse_linear.chooser import measured
from twofour.training.sparse_linear.implementations import TORCH, on_gpu


def choices(
    gradient: str,
    every: int | None,
    kernels: str,
    state: str,
    seconds: float,
    shape: tuple[int, int],
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Choice]:
    """Return how every product of a layer runs.

    Args:
        gradient: "dense" or "2:4".
        every: Steps between two choices of the mask, over which building a layout anew is spread; None: never.
        kernels: "measured"; "dense": the fastest dense implementations; "sparse": the first 2:4 kernel, unmeasured,
            for tests, and where a machine is too busy.
        state: "dense" or "packed": what layouts are filled from.
        seconds: Time box of measuring one product.
        shape: (out, in) of the layer.
        tokens: Rows of its input.
        dtype: Computing type.
        device: Where it is computed.
    """
    weight = MaskedWeight(dense_parameter=False)
    estimate = Estimate(weight, 0, Workspace(), wanted=gradient == "2:4")
    sources: dict[str, Source] = {"forward": weight, "data": weight, "weight": estimate}
    out, columns = shape
    shapes = (out, columns), (tokens, columns), (tokens, out)
    if kernels == "sparse":
        empty = (torch.empty(size, dtype=dtype, device=device) for size in shapes)
        return _unmeasured(_calls(*empty), sources, state)
    generator = torch.Generator().manual_seed(0)
    w, x, dz = (torch.randn(size, generator=generator, dtype=torch.float32, device="cpu") for size in shapes)
    w *= columns**-0.5
    keep = Transposable().project(w, absolute=True)
    w, keep = w * keep, keep.to(device)
    if state == "packed":
        weight.put_places(kept.places_of(keep))
    else:
        weight.put(keep)
    found = {}
    for call in _calls(*(tensor.to(device, dtype) for tensor in (w, x, dz))):
        source = EXACT if kernels == "dense" else sources[call.product]
        building = {}
        if every is not None and source is weight:
            building = {kernel.name: _building(kernel, keep) / every for kernel in weight.kernels(call)[0]}
        if state == "packed":
            call = _held(call, weight) if source is weight else call._replace(dense=estimate.exact(call))
        found[call.product] = measured(call, source, seconds, building)
    return found


def _calls(weight: Tensor, x: Tensor, gradient: Tensor) -> tuple[Call, ...]:
    odd = f"{len(x)} tokens, no multiple of 4" if len(x) % 4 else ""
    last = Call("weight", gradient.t(), x.t(), obstacle=odd)
    return Call("forward", x, weight), Call("data", gradient, weight.t()), last


def _held(call: Call, weight: MaskedWeight) -> Call:
    """Return a call whose weight is as a parameter holds it."""
    assert weight.places is not None
    turned = call.product == "data"
    values = kept.gather(weight.places, call.b.t() if turned else call.b)
    return call._replace(b=values.t() if turned else values)


def _unmeasured(calls: Sequence[Call], sources: Mapping[str, Source], state: str) -> dict[str, Choice]:
    first = {call.product: _first(call, sources[call.product]) for call in calls}
    if state == "packed" and not first["weight"].sparse:
        first["weight"] = Choice(row_for(calls[0].a.dtype).name, False, "exact, not measured")
    return first


def _first(call: Call, source: Source) -> Choice:
    kernels, why = source.kernels(call._replace(obstacle=""))
    return Choice(kernels[0].name, True, "not measured") if kernels else Choice(TORCH, False, why)


def _building(kernel: Kernel, keep: Tensor) -> float:
    """Return the milliseconds of laying out a new mask."""
    if on_gpu(keep.device):
        return 0.0
    return measure.compare({"build": lambda: kernel.blank(keep)}, repeats=2).timings["build"].median * 1e3
