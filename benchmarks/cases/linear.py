"""Linear: the best dense kernel against the best 2:4 one, per shape, token count, thread count and cache state.

Both sides allocate their output and add the bias inside the timing; weights are prepared outside it. Dense candidates
are F.linear and oneDNN on a weight reordered for that token count; sparse ones are the rows of the kernel table that
can win at it. Cold copies are plain clones, without huge pages on either side. Every candidate is compared with
F.linear on the masked weight before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from cases.shapes import Shape
from twofour import measure, packing, patterns
from twofour.errors import KernelError, MeasureError
from twofour.kernels import Kernel, available
from twofour.measure import Cold, Record

PLAIN, ONEDNN = "F.linear", "oneDNN prepacked"
BASELINE = (PLAIN, ONEDNN)
# DESIGN.md: |err| <= 4 eps K^0.5 |x||w| in norm; against an fp32 reference both sides may be off by that much.
TOLERANCE = 8 * torch.finfo(torch.float32).eps


@dataclass
class Layer:
    """One shape, its masked weight and every layout of it that was needed so far."""

    shape: Shape
    weight: Tensor
    bias: Tensor
    packed: packing.Packed
    layouts: dict[str, list[Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, shape: Shape, seed: int = 0) -> Layer:
        """Make a random weight of the shape, mask it by magnitude and pack it."""
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(shape.rows, shape.columns, generator=generator) * shape.columns**-0.5
        weight *= patterns.parse("2:4").project(weight, absolute=True)
        bias = torch.randn(shape.rows, generator=generator)
        return cls(shape, weight, bias, packing.pack(weight, "2:4"))

    def copies(self, layout: str, count: int, make: Callable[[], Tensor]) -> list[Tensor]:
        """Return `count` copies of a layout, made once; oneDNN's opaque tensors are made anew, others cloned."""
        made = self.layouts.setdefault(layout, [make()])
        while len(made) < count:
            made.append(make() if made[0].is_mkldnn else made[0].clone())
        return made[:count]


def cells(
    shapes: Sequence[Shape], tokens: Sequence[int], threads: Sequence[int], states: Sequence[str], cold_tokens: int
) -> list[dict[str, object]]:
    """List the cells: all of one shape together, so that its weights are prepared once."""
    return [
        {
            "case": "linear",
            "dtype": "float32",
            "shape": shape.text,
            "name": shape.name,
            "weights": state,
            "threads": count,
            "tokens": number,
        }
        for shape in shapes
        for state in states
        for count in threads
        for number in tokens
        if state == "hot" or number <= cold_tokens
    ]


class Bench:
    """Measures cells, keeping the weights of the shape it is at."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.layer: Layer | None = None
        self.state = ""

    def __call__(self, cell: dict[str, object]) -> Record:
        """Measure one cell."""
        rows, columns = map(int, str(cell["shape"]).split("x"))
        layer = self._at(Shape(str(cell["name"]), rows, columns), str(cell["weights"]))
        cold = measure.copies_for_cold(layer.weight.nbytes) if cell["weights"] == "cold" else None
        return _measure(layer, cell, cold, self.seconds)

    def _at(self, shape: Shape, state: str) -> Layer:
        if self.layer is None or self.layer.shape != shape or self.state != state:
            self.layer = None  # the copies of the last shape are freed before the next ones are made
            self.layer, self.state = Layer.of(shape), state
        return self.layer


def _measure(layer: Layer, cell: dict[str, object], cold: Cold | None, seconds: float) -> Record:
    tokens, threads = int(str(cell["tokens"])), int(str(cell["threads"]))
    x = torch.randn(tokens, layer.shape.columns, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        candidates = _candidates(layer, x, cold.copies if cold else 1)
        _verify(layer, x, {name: calls[0] for name, calls in candidates.items()})
        return measure.compare(
            candidates,
            baseline=BASELINE,
            seconds=seconds,
            threads=threads,
            clock="thread" if threads == 1 else "wall",
            pin=threads == 1,
            weights=cold or "hot",
            noise=True,
            meta=cell,
        )


def _candidates(layer: Layer, x: Tensor, copies: int) -> dict[str, list[Callable[[], Tensor]]]:
    weight, bias = layer.weight, layer.bias
    # oneDNN keeps the plain order for a single token and one blocked order for all other counts.
    order = 1 if len(x) == 1 else 128
    blocked = partial(torch.ops.mkldnn._reorder_linear_weight, weight, order)
    linear = torch.ops.mkldnn._linear_pointwise
    found: dict[str, list[Callable[[], Tensor]]] = {
        PLAIN: [partial(torch.nn.functional.linear, x, w, bias) for w in layer.copies("dense", copies, weight.clone)],
        ONEDNN: [partial(linear, x, w, bias, "none", [], "") for w in layer.copies(f"onednn{order}", copies, blocked)],
    }
    for kernel in _sparse(len(x)):
        make = partial(kernel.prepare, layer.packed)
        found[kernel.name] = [
            partial(kernel.run, x, w, bias, layer.shape.rows) for w in layer.copies(kernel.layout, copies, make)
        ]
    return found


def _sparse(tokens: int) -> list[Kernel]:
    """Return the rows that can win: those for this token count, without scalar ones where there are better."""
    rows = [kernel for kernel in available("nm_matmul") if kernel.tokens_min <= tokens <= kernel.tokens_max]  # pyright: ignore
    if not rows:
        raise KernelError(f"no row of the kernel table takes {tokens} tokens here")
    return [kernel for kernel in rows if kernel.isa != "scalar"] or rows


def _verify(layer: Layer, x: Tensor, candidates: dict[str, Callable[[], Tensor]]) -> None:
    exact = torch.nn.functional.linear(x, layer.weight, layer.bias)
    scale = x.norm() * layer.weight.norm() + layer.bias.norm() * len(x) ** 0.5
    for name, call in candidates.items():
        error = float((call() - exact).norm() / scale)
        if not error <= TOLERANCE * layer.shape.columns**0.5:
            raise MeasureError(
                f"{name} is wrong and is not timed",
                got=f"error {error:.2e} of |x||w| at {layer.shape.text}, {len(x)} tokens",
                wanted=f"at most {TOLERANCE * layer.shape.columns**0.5:.2e}",
            )
