"""Linear: the best dense kernel against the best 2:4 one, per shape, token count, thread count and cache state.

Both sides allocate their output and add the bias inside the timing; weights are prepared outside it. Dense candidates
are those of `cases.dense`; sparse ones are the rows of the kernel table that can win at it, and dense rows of ours in
the same dtype count as dense. Every weight, dense or 2:4, stands in pages of 2 MB as `compile` holds it; what MKL,
fbgemm and OpenVINO pack is where they put it. Every candidate is compared with F.linear on the masked weight before it
is timed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cases import dense
from cases.shapes import Shape
from twofour import measure, packing, patterns
from twofour.engines import GROUP
from twofour.errors import KernelError, MeasureError
from twofour.kernels import Kernel, available
from twofour.kernels.base import Prepared
from twofour.kernels.problem import Problem
from twofour.measure import Cold, Record
from twofour.native import pages

BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5}
# Each product: |err| <= 4 eps K^0.5 |x||w| in norm; against an fp32 reference both sides may be off by that much.
TOLERANCE = 8 * torch.finfo(torch.float32).eps
# Against the product in float32, in norm: what the rounding of weights and activations to the dtype may cost.
ROUNDING = {"bfloat16": 0.01, "int8": 0.03, "int4": 0.2}


Peers = Callable[["Layer", Tensor, int], dict[str, list[Callable[[], Any]]]]
"""Of a layer, its input and a number of copies: further candidates, one callable per copy."""


@dataclass
class Layer:
    """One shape, its masked weight and every layout of it that was needed so far."""

    shape: Shape
    weight: Tensor
    bias: Tensor
    packed: packing.Packed
    operation: str = "nm_matmul"
    layouts: dict[str, list[Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, shape: Shape, dtype: str = "float32", seed: int = 0, pattern: str = "2:4") -> Layer:
        """Make a random weight of the shape, mask it by magnitude and pack it in `dtype`."""
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(shape.rows, shape.columns, generator=generator) * shape.columns**-0.5
        weight *= patterns.parse(pattern).project(weight, absolute=True)
        bias = torch.randn(shape.rows, generator=generator)
        operation = "block_matmul" if pattern.startswith("block") else "nm_matmul"
        return cls(shape, weight, bias, packing.pack(weight, pattern, dtype=dtype, group=GROUP), operation)

    def copies(self, count: int, layout: str, make: Callable[[], Any]) -> list[Any]:
        """Return `count` copies of a layout, made once; opaque ones are made anew, plain tensors copied.

        Fewer where so many of its own size leave the caches: of a weight in blocks a dense copy is ten times as large.
        """
        if layout.startswith("OpenVINO"):
            count = min(count, dense.OPENVINO_COPIES)
        made = self.layouts.setdefault(layout, [make()])
        if count > 1:
            count = min(count, measure.copies_for_cold(self._bytes(made[0])).copies)
        if layout.startswith(dense.MKL):
            count = min(count, max(2, dense.MKL_BYTES // (made[0].numel() * made[0].element_size())))
        plain = isinstance(made[0], Tensor) and not made[0].is_mkldnn
        again = made[0].copy if isinstance(made[0], Prepared) else make
        while len(made) < count:
            made.append(pages.copy(made[0]) if plain else again())
        return made[:count]

    def _bytes(self, made: Any) -> int:
        """Return the bytes of one copy; of what does not tell at least one of each weight."""
        if isinstance(made, Prepared):
            return made.nbytes
        if isinstance(made, Tensor):
            return made.numel() * made.element_size()
        return self.shape.rows * self.shape.columns


def cells(
    shapes: Sequence[Shape],
    tokens: Sequence[int],
    threads: Sequence[int],
    states: Sequence[str],
    cold_tokens: int,
    dtype: str = "float32",
) -> list[dict[str, object]]:
    """List the cells: all of one shape together, so that its weights are prepared once.

    Token counts that no sparse row of the dtype takes are left out: int4 serves few tokens alone.

    Raises:
        KernelError: No row takes any of the token counts.
    """
    if not any(_rows(dtype, number) for number in tokens):
        raise KernelError(f"no row of the kernel table takes {', '.join(map(str, tokens))} tokens in {dtype} here")
    return [
        {
            "case": "linear",
            "dtype": dtype,
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
        if (state == "hot" or number <= cold_tokens) and _rows(dtype, number)
    ]


class Bench:
    """Measures cells, keeping the weights of the shape it is at."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.layer: Layer | None = None
        self.at: tuple[object, ...] = ()

    def __call__(self, cell: dict[str, object]) -> Record:
        """Measure one cell."""
        rows, columns = map(int, str(cell["shape"]).split("x"))
        dtype, threads = str(cell["dtype"]), int(str(cell["threads"]))
        layer = self._layer(Shape(str(cell["name"]), rows, columns), dtype, str(cell["weights"]), threads)
        nbytes = int(rows * columns * BYTES[dtype])
        cold = measure.copies_for_cold(nbytes) if cell["weights"] == "cold" else None
        return measured(layer, cell, cold, self.seconds)

    def _layer(self, shape: Shape, dtype: str, state: str, threads: int) -> Layer:
        # Layouts of OpenVINO are compiled for a thread count; the others would serve every one.
        at = (shape, dtype, state, threads if dtype == "int4" else 0)
        if self.layer is None or self.at != at:
            self.layer = None  # the copies of the last shape are freed before the next ones are made
            self.layer, self.at = Layer.of(shape, dtype), at
        return self.layer


def measured(
    layer: Layer, cell: dict[str, object], cold: Cold | None, seconds: float, peers: Peers | None = None
) -> Record:
    """Compare every candidate for a layer, and what `peers` makes of it and its input, after checking their answers."""
    tokens, threads, dtype = int(str(cell["tokens"])), int(str(cell["threads"])), str(cell["dtype"])
    x = torch.randn(tokens, layer.shape.columns, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor")
        torch.set_num_threads(threads)
        candidates = _candidates(layer, dtype, x, cold.copies if cold else 1)
        candidates |= peers(layer, x, cold.copies if cold else 1) if peers else {}
        torch.set_num_threads(1)
        _verify(layer, dtype, x, {name: calls[0] for name, calls in candidates.items()})
        return measure.compare(
            candidates,
            baseline=baseline(dtype, candidates),
            seconds=seconds,
            threads=threads,
            clock="thread" if threads == 1 else "wall",
            pin=threads == 1,
            weights=cold or "hot",
            noise=True,
            meta=cell,
        )


def baseline(dtype: str, names: Sequence[str] | dict[str, Any]) -> tuple[str, ...]:
    """Return the dense candidates that the sparse ones are compared with."""
    return tuple(name for name in names if name in dense.BASELINES[dtype] or name.startswith("dense_matmul"))


def _candidates(layer: Layer, dtype: str, x: Tensor, copies: int) -> dict[str, list[Callable[[], Any]]]:
    found = dense.candidates(dtype, layer.weight, layer.bias, x, partial(layer.copies, copies))
    x = x.bfloat16() if dtype == "bfloat16" else x
    for kernel in _rows(dtype, len(x), layer.operation):
        source = layer.packed if kernel.sparse else layer.weight
        weights = layer.copies(copies, kernel.layout, partial(kernel.prepare, source))
        found[kernel.name] = [partial(kernel.run, x, w, layer.bias, Problem(layer.shape.rows)) for w in weights]
    return found


def _rows(dtype: str, tokens: int, operation: str = "nm_matmul") -> list[Kernel]:
    """Return the rows that can win: those for this token count, without scalar ones where there are better.

    Empty where no sparse row takes this many tokens.
    """
    sparse = [kernel for kernel in available(operation) if kernel.dtype == dtype and kernel.serves(tokens)]
    if not sparse:
        return []
    return ([kernel for kernel in sparse if kernel.isa != "scalar"] or sparse) + own_dense(dtype)


def own_dense(dtype: str) -> list[Kernel]:
    """Return the dense rows of this project in `dtype`: torch's, oneDNN's and MKL's stand in cases.dense."""
    rows = [kernel for kernel in available("dense_matmul") if kernel.dtype == dtype and kernel.isa != "scalar"]
    return [kernel for kernel in rows if not kernel.name.endswith(("__onednn", "__mkl", "__torch"))]


def _verify(layer: Layer, dtype: str, x: Tensor, candidates: dict[str, Callable[[], Any]]) -> None:
    exact = torch.nn.functional.linear(x, layer.weight)
    biased = exact + layer.bias
    size = x.norm() * layer.weight.norm() + layer.bias.norm() * len(x) ** 0.5
    largest = TOLERANCE * layer.shape.columns**0.5
    for name, call in candidates.items():
        if name == dense.STATIC_U8:
            continue  # its answer is in levels of a made-up scale
        difference = torch.as_tensor(call()).float() - (exact if name == dense.TORCH else biased)
        error = float(difference.norm() / (size if dtype == "float32" else exact.norm()))
        if not error <= ROUNDING.get(dtype, largest):
            raise MeasureError(
                f"{name} is wrong and is not timed",
                got=f"error {error:.2e} of {'|x||w|' if dtype == 'float32' else 'the product'} "
                f"at {layer.shape.text}, {len(x)} tokens",
                wanted=f"at most {ROUNDING.get(dtype, largest):.2e}",
            )
