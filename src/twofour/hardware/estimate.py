"""estimate: what a model would take on a machine that is not here, dense and sparse, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, overload

import numpy as np
from torch import nn

from twofour import quantization
from twofour.errors import HardwareError
from twofour.hardware.blocks import of_blocks, require_large
from twofour.hardware.costs import STATIC, Costs, costs
from twofour.hardware.fitted import FITTED
from twofour.hardware.low_bits import SINGLE_BITS, as_floats, of_low_bits
from twofour.hardware.machine import Machine
from twofour.hardware.machines import machine as find
from twofour.hardware.matmul_shapes import Product, linears, require_products, trace
from twofour.hardware.passes import OPTIMIZER, depthwise, is_cold, traffic, value_bytes
from twofour.hardware.reasons import DEPTHWISE, layer_of, reasons_of
from twofour.hardware.regions import of_regions
from twofour.hardware.training_estimate import TrainingEstimate
from twofour.hardware.training_step import estimate_step
from twofour.layers import require_module, walk
from twofour.patterns import Block, Hybrid, Pattern, parse
from twofour.quantization import LowBits

TWO_FOUR = "2:4"


@dataclass(frozen=True)
class Row:
    """One product of the model.

    Attributes:
        layer: The weight's layer; "(activations)" for a product of two activations.
        m: Tokens.
        n: Outputs.
        k: Reduction.
        batch: Products in the launch.
        dense_ms: Milliseconds dense.
        sparse_ms: Milliseconds with a sparse weight; None where the weight stays dense.
        bound: "math", "memory" or "launch": what takes longest, dense.
        sparse_bound: The same sparse; None where the weight stays dense.
        dense_mj: Millijoules dense.
        sparse_mj: Millijoules sparse; None where the weight stays dense.
        reason: Why the weight stays dense, or "" where it can be sparse.
        width: Widths of a layer of low bits, "w2a8", else "".
        low_bits_ms: Milliseconds in them, dense; None of other layers. `dense_ms` is what it takes in floats.
        margin: Least ratio at which sparse is said to win.
    """

    layer: str
    m: int
    n: int
    k: int
    batch: int
    dense_ms: float
    sparse_ms: float | None
    bound: str
    sparse_bound: str | None
    dense_mj: float
    sparse_mj: float | None
    reason: str
    width: str = ""
    low_bits_ms: float | None = None
    margin: float = 1.0

    @property
    def ratio(self) -> float | None:
        """Dense time over sparse time."""
        return None if self.sparse_ms is None else self.dense_ms / self.sparse_ms

    @property
    def wins(self) -> bool:
        """Whether sparse is said to be faster: its ratio reaches the margin."""
        return self.ratio is not None and self.ratio >= self.margin


@dataclass(frozen=True)
class Estimate:
    """What a model would take.

    Attributes:
        machine: The machine.
        dtype: Computing type.
        rows: One per product, in the order they run.
        other_ms: Everything else as traffic to memory, nothing fused; 0 where the model was not traced.
        cold: Whether weights were taken to come from memory: together they do not fit the cache.
        traced: Whether an example was followed through the model; else each linear weight was taken once.
        pattern: What sparse weights are.
        left_out: Where nothing was traced: layers whose weights are no linear layer's, which is not priced.
    """

    machine: Machine
    dtype: str
    rows: tuple[Row, ...]
    other_ms: float
    cold: bool
    traced: bool
    pattern: str = TWO_FOUR
    left_out: tuple[str, ...] = ()

    @property
    def dense_ms(self) -> float:
        """The whole model, dense."""
        return self.other_ms + sum(row.dense_ms for row in self.rows)

    @property
    def sparse_ms(self) -> float:
        """The whole model with every weight sparse that can be, also where that loses."""
        return self.other_ms + sum(row.dense_ms if row.sparse_ms is None else row.sparse_ms for row in self.rows)

    @property
    def best_ms(self) -> float:
        """The whole model, each layer sparse where that is said to win, else dense."""
        best = (row.sparse_ms if row.wins and row.sparse_ms is not None else row.dense_ms for row in self.rows)
        return self.other_ms + sum(best)

    @property
    def low_bits_ms(self) -> float:
        """The whole model with its layers of low bits in their widths, the others dense."""
        return self.other_ms + sum(row.dense_ms if row.low_bits_ms is None else row.low_bits_ms for row in self.rows)

    @property
    def single_bits(self) -> str:
        """What the machine has of products of single bits, which `low_bits_ms` does not count; "" without low bits."""
        return SINGLE_BITS.get(self.machine.family, "") if any(row.width for row in self.rows) else ""

    @property
    def loses(self) -> tuple[str, ...]:
        """Layers where sparse is not said to win, each once."""
        return tuple(dict.fromkeys(row.layer for row in self.rows if row.ratio is not None and not row.wins))

    def __str__(self) -> str:
        lines = [f"{label_of(rows)}: {_cell(rows[0], self.pattern)}" for rows in self.grouped()]
        return "\n".join([*lines, self.summary()])

    def grouped(self) -> tuple[tuple[Row, ...], ...]:
        """Return the rows that are alike together, in the order of the first of each: steps, heads, equal layers."""
        groups: dict[tuple[object, ...], list[Row]] = {}
        for row in self.rows:
            groups.setdefault((row.m, row.n, row.k, row.batch, row.reason, row.width), []).append(row)
        return tuple(map(tuple, groups.values()))

    def summary(self) -> str:
        """Say the whole model in two sentences."""
        layers = "1 layer" if len(self.loses) == 1 else f"{len(self.loses)} layers"
        lost = f"; sparse does not pay in {layers}" if self.loses else ""
        widths = ", ".join(dict.fromkeys(row.width for row in self.rows if row.width))
        lost += f"; {self.low_bits_ms:.3f} ms in its low bits ({widths})" if widths else ""
        lost += f"; {self.single_bits}" if self.single_bits else ""
        lost += f"; without {listed(self.left_out)}: they are priced with an example" if self.left_out else ""
        return (
            f"{self.machine.name}, {self.dtype}: {self.dense_ms:.3f} ms dense, {self.sparse_ms:.3f} ms with every "
            f"legal weight {self.pattern}, {self.best_ms:.3f} ms with the better in each: "
            f"{self.dense_ms / self.best_ms:.2f}x{lost}"
        )

    def to_dict(self) -> dict[str, object]:
        """Return JSON-ready fields."""
        totals = {"dense_ms": self.dense_ms, "sparse_ms": self.sparse_ms, "best_ms": self.best_ms}
        totals |= {"low_bits_ms": self.low_bits_ms, "single_bits": self.single_bits}
        rows = [{**asdict(row), "ratio": row.ratio, "wins": row.wins} for row in self.rows]
        place = {"machine": self.machine.name, "dtype": self.dtype, "cold": self.cold, "traced": self.traced}
        place |= {"pattern": self.pattern, "left_out": list(self.left_out)}
        return {**place, **totals, "other_ms": self.other_ms, "loses": list(self.loses), "rows": rows}


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def label_of(rows: Sequence[Row]) -> str:
    """Return the layers of rows that are alike, how often they run, and their size."""
    row, layers = rows[0], tuple(dict.fromkeys(row.layer for row in rows))
    times = f", {len(rows)} times" if len(rows) > 1 else ""
    return f"{listed(layers, 1)}{times}: {row.m} x {row.n} x {row.k}"


def _cell(row: Row, pattern: str) -> str:
    dense = f"{row.dense_ms:.4f} ms dense ({row.bound})"
    dense += f", {row.low_bits_ms:.4f} ms {row.width}" if row.low_bits_ms is not None else ""
    if row.sparse_ms is None:
        return f"{dense}, stays dense: {row.reason}"
    return f"{dense}, {row.sparse_ms:.4f} ms {pattern} ({row.sparse_bound}), {row.ratio:.2f}x"


@overload
def estimate(
    model: nn.Module,
    example: Any = ...,
    *,
    machine: str | Machine,
    dtype: str = ...,
    tokens: int | None = ...,
    skip: str | Sequence[str] = ...,
    pattern: str | Pattern = ...,
    training: Literal[False] = ...,
    optimizer: None = ...,
) -> Estimate: ...


@overload
def estimate(
    model: nn.Module,
    example: Any = ...,
    *,
    machine: str | Machine,
    dtype: str = ...,
    tokens: int | None = ...,
    skip: str | Sequence[str] = ...,
    pattern: str | Pattern = ...,
    training: Literal[True],
    optimizer: str | None = ...,
) -> TrainingEstimate: ...


def estimate(
    model: nn.Module,
    example: Any = None,
    *,
    machine: str | Machine | None = None,
    dtype: str = "bfloat16",
    tokens: int | None = None,
    skip: str | Sequence[str] = (),
    pattern: str | Pattern = TWO_FOUR,
    training: bool = False,
    optimizer: str | None = None,
) -> Estimate | TrainingEstimate:
    """Predict per layer and for the whole model the time on a machine that is not here, dense and sparse.

    The shapes of the example are followed through the model; nothing is computed and no weight is read. Which weights
    can be sparse is ASP's rule, as for `prune`. Layers of low bits (`twofour.quantize`) are priced in floats, and
    beside it in their own widths, by the rule of `hardware/low_bits.py`, which no measurement was there to fit.
    Products are priced one after the other; what is modelled and the error
    measured: docs/hardware.md.

    Args:
        model: Any module.
        example: A tensor, a tuple of positional arguments or a dict of keyword arguments; its batch is priced.
        machine: A name in `twofour.hardware.MACHINES`, or a machine; needed.
        dtype: Computing type of every product, one that the machine has a dense and a sparse unit for.
        tokens: Instead of an example: every linear weight is multiplied once by so many rows, as `advise` does.
        skip: Layer globs that stay dense.
        pattern: "2:4", which has units of its own; blocks of at least 16 by 16, "block:32x32@0.9", priced on the dense
            units by the rule of `hardware/blocks.py`; or 2:4 with dense groups, "2:4+25%", priced on the units of 2:4
            by the rule of `hardware/regions.py`, convolutions in groups of channels dense, as `compile` runs them. No
            measurement was there to fit either rule.
        training: Price one training step on the example instead: `TrainingEstimate`, and what is priced, there.
        optimizer: Of a training step alone: "adamw", also where None, or "sgd" with momentum.

    Raises:
        HardwareError: No machine is named, it is unknown or lacks a unit for the dtype or pattern, the model cannot be
            followed without values, it has no product, neither or both of example and tokens are given, or an optimiser
            without a training step; of a training step also what `estimate_step` names.
        LayerError: The model is none, or a glob of `skip` matches no layer.
    """
    require_module(model)
    device = find(machine)
    device.peak(dtype)
    rule = _sparse(device, dtype, pattern)
    if training:
        steps = OPTIMIZER if optimizer is None else optimizer
        return estimate_step(model, example, device, dtype, steps, skip, rule=rule, tokens=tokens)
    _require(example, tokens, optimizer)
    low = {f"{name}.weight".lstrip("."): held for name, held in quantization.of(model).items()}
    model = as_floats(model) if low else model
    traced = trace(model, example) if tokens is None else linears(model, tokens)
    require_products(model, traced)
    reasons = reasons_of(model, traced.products, None if isinstance(rule, Block) else dtype, skip, rule)
    cold = is_cold(device, dtype, traced.products)
    other = traffic(device, traced.values * value_bytes(dtype))
    rows = _rows(traced.products, reasons, device, dtype, cold, rule)
    rows = tuple(_with_width(row, p, low, device, dtype, cold) for row, p in zip(rows, traced.products, strict=True))
    name = TWO_FOUR if rule is None else rule.name
    left_out = () if tokens is None else _left_out(model, traced.products)
    return Estimate(device, dtype, rows, other * 1e3, cold, tokens is None, name, left_out)


def _require(example: Any, tokens: int | None, optimizer: str | None) -> None:
    """Refuse an optimiser of a forward pass, and sizes that are not known or said twice."""
    if optimizer is not None:
        raise HardwareError(
            "an optimiser says nothing of a forward pass",
            got=f"optimizer={optimizer!r} without training=True",
            wanted="an optimiser of a training step, or none",
            remedy="leave the optimiser out, or ask for a training step",
        )
    if (example is None) == (tokens is None) or (tokens is not None and tokens < 1):
        raise HardwareError(
            "the size of the input is not known",
            got=f"an example and tokens={tokens}" if example is not None else f"no example, tokens={tokens}",
            wanted="an example, or tokens from 1",
            remedy="estimate(model, example, machine=...) prices whatever the model runs",
        )


def _left_out(model: nn.Module, products: Sequence[Product]) -> tuple[str, ...]:
    """Return the layers with weights that no product has."""
    priced = {product.weight for product in products}
    found = [weight.name for weight in walk(model, eligibility="any").weights if weight.name not in priced]
    return tuple(dict.fromkeys(name.rpartition(".")[0] or name for name in found))


def _sparse(device: Machine, dtype: str, pattern: str | Pattern) -> Block | Hybrid | None:
    """Return the blocks or dense groups that weights are to have, None for 2:4.

    Raises:
        HardwareError: The machine has no unit for the pattern.
    """
    rule = parse(pattern)
    if isinstance(rule, Block):
        require_large(rule)
        return rule
    regions = rule if isinstance(rule, Hybrid) and rule.regular.name == TWO_FOUR else None
    if regions is None and rule.name != TWO_FOUR:
        raise HardwareError(
            "the machine has no unit for the pattern",
            got=rule.name,
            wanted='"2:4", with dense groups as "2:4+25%", or blocks such as "block:32x32@0.9"',
            remedy="what is 2:4 legal, as 1:4 is, takes the time of 2:4",
        )
    device.peak(dtype, sparse=True)
    return regions


def _rows(
    products: Sequence[Product],
    reasons: dict[str, str],
    device: Machine,
    dtype: str,
    cold: bool,
    rule: Block | Hybrid | None,
) -> tuple[Row, ...]:
    unique = list(dict.fromkeys((p.m, p.n, p.k, p.batch, p.repeats) for p in products))
    m, n, k, batch, repeats = np.array(unique, dtype=np.float64).T
    dense = costs(device, dtype, False, m, n, k, batch=batch, cold=cold, repeats=(repeats, 1))
    if rule is None:
        sparse = costs(device, dtype, True, m, n, k, batch=batch, cold=cold, repeats=(repeats, 1))
    elif isinstance(rule, Block):
        sparse = of_blocks(dense, device, dtype, rule, m, n, k, batch, cold=cold)
    else:
        sparse = of_regions(device, dtype, rule, m, n, k, batch, cold=cold, repeats=repeats)
    places = {size: index for index, size in enumerate(unique)}
    bounds = [cost.bound for cost in (dense, sparse)]
    found = tuple(
        _depthwise(p, device, dtype)
        if p.depthwise
        else _row(p, places[p.m, p.n, p.k, p.batch, p.repeats], reasons, [dense, sparse], bounds)
        for p in products
    )
    return found if isinstance(rule, Block) else tuple(replace(row, margin=FITTED.margin) for row in found)


def _with_width(row: Row, product: Product, low: Mapping[str, LowBits], device: Machine, dtype: str, cold: bool) -> Row:
    held = low.get(product.weight or "")
    if held is None:
        return row
    found = of_low_bits(product, held, device, dtype, cold=cold)
    return replace(row, width=held.widths.name, low_bits_ms=float(found.seconds[0]) * 1e3)


def _row(product: Product, at: int, reasons: dict[str, str], priced: list[Costs], bounds: list[list[str]]) -> Row:
    reason = "no weight" if product.weight is None else reasons.get(product.weight, "not a weight that can be pruned")
    dense, sparse = priced
    return Row(
        *(layer_of(product.weight), product.m, product.n, product.k, product.batch),
        dense_ms=float(dense.seconds[at]) * 1e3,
        sparse_ms=None if reason else float(sparse.seconds[at]) * 1e3,
        bound=bounds[0][at],
        sparse_bound=None if reason else bounds[1][at],
        dense_mj=float(dense.joules[at]) * 1e3,
        sparse_mj=None if reason else float(sparse.joules[at]) * 1e3,
        reason=reason,
    )


def _depthwise(product: Product, device: Machine, dtype: str) -> Row:
    seconds = depthwise(product, device, dtype)
    sizes = (layer_of(product.weight), product.m, product.n, product.k, product.batch)
    idle = device.watts * STATIC * seconds * 1e3  # a transfer costs nothing of its own, as in `costs`
    return Row(*sizes, seconds * 1e3, None, "memory", None, idle, None, DEPTHWISE)
