"""What a training step is said to take: its products, parts and sparse variants; `training_step` prices it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType

from twofour.errors import HardwareError, one_of
from twofour.hardware.fitted import FITTED
from twofour.hardware.machine import Machine
from twofour.hardware.reasons import ACTIVATIONS

FORWARD, INPUT, WEIGHT = PRODUCTS = ("forward", "input gradient", "weight gradient")

W, DZ = "W", "dZ"
"""The operand that is sparse: the weight, 2:4 along the product's reduction, or the gradient of the layer's output."""

VARIANTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "2:4 weights": MappingProxyType({FORWARD: W}),
        "both ways": MappingProxyType({FORWARD: W, INPUT: W}),
        "sdgp": MappingProxyType({INPUT: DZ}),
        "all three": MappingProxyType({FORWARD: W, INPUT: W, WEIGHT: DZ}),
    }
)
"""Which operand of which product is sparse: a 2:4 weight; a mask that is 2:4 along both axes; pruned gradients in the
paper's "rescaled" mode; both ways with the unbiased estimate of the gradient in the weight's."""


@dataclass(frozen=True)
class Sparse:
    """A product with one operand sparse.

    Attributes:
        operand: "W" or "dZ".
        ms: Milliseconds of the product; None where the pattern does not fit or the layer stays dense.
        pass_ms: Milliseconds to choose and pack the operand for this product; 0 where there is none.
        bound: "math", "memory" or "launch"; "" where there is none.
        reason: Why there is none, else "".
    """

    operand: str
    ms: float | None
    pass_ms: float
    bound: str
    reason: str


@dataclass(frozen=True)
class StepRow:
    """One product of a step.

    Attributes:
        layer: Name; "(activations)" for a product of two activations.
        product: "forward", "input gradient" or "weight gradient"; of two activations the gradients of the left one
            and of the right one.
        m: Rows of the operand that stays dense in inference: tokens, or places of an image.
        n: Columns.
        k: Reduction; a mean where a strided convolution sums over fewer taps at some places.
        batch: Products in the launch.
        dense_ms: Milliseconds dense.
        bound: "math", "memory" or "launch": what takes longest, dense.
        sparse: The ways in which one operand could be sparse.
        weight: Name of the parameter that is multiplied by; None of two activations.
    """

    layer: str
    product: str
    m: float
    n: float
    k: float
    batch: int
    dense_ms: float
    bound: str
    sparse: tuple[Sparse, ...] = ()
    weight: str | None = None

    def way(self, operand: str) -> Sparse | None:
        """Return what it takes with that operand sparse, None where it cannot be."""
        return next((way for way in self.sparse if way.operand == operand and way.ms is not None), None)


@dataclass(frozen=True)
class Variant:
    """A way of training with sparse operands.

    Attributes:
        name: Of `VARIANTS`.
        every_ms: Milliseconds of the step with every product sparse that can be, also where that loses.
        best_ms: Milliseconds with each product sparse where it is said to win, passes counted, else dense.
        pass_ms: Milliseconds of choosing, packing and masking in `best_ms`.
        every_pass_ms: The same in `every_ms`.
        taken: (layer, product) of each that is sparse in `best_ms`.
        fits: How many products the patterns fit.
        dense_ms: The dense step.
    """

    name: str
    every_ms: float
    best_ms: float
    pass_ms: float
    every_pass_ms: float
    taken: tuple[tuple[str, str], ...]
    fits: int
    dense_ms: float

    @property
    def saved(self) -> float:
        """Share of the dense step that `best_ms` saves, from 0."""
        return 1 - self.best_ms / self.dense_ms

    @property
    def every_saved(self) -> float:
        """Share of the dense step that `every_ms` saves; negative where it takes longer."""
        return 1 - self.every_ms / self.dense_ms


@dataclass(frozen=True)
class TrainingEstimate:
    """What one training step would take.

    Attributes:
        machine: The machine.
        dtype: Computing type of products; weights and the optimiser's state are float32.
        optimizer: "sgd" or "adamw".
        rows: One per product, in the order of the forward pass.
        norms_ms: Milliseconds of norms, forward and back.
        elementwise_ms: Milliseconds of every other operation that is no product, forward and back, nothing fused.
        optimizer_ms: Milliseconds of the optimiser's pass, and of casting weights and gradients.
        mask_ms: By the name of each weight that can be sparse: milliseconds of keeping its zeros, a step.
        cold: Whether weights were taken to come from memory.
        notes: What was assumed or left out, in words.
    """

    machine: Machine
    dtype: str
    optimizer: str
    rows: tuple[StepRow, ...]
    norms_ms: float
    elementwise_ms: float
    optimizer_ms: float
    mask_ms: Mapping[str, float] = field(hash=False)
    cold: bool
    notes: tuple[str, ...]

    @property
    def parts(self) -> dict[str, float]:
        """Milliseconds of each part of the dense step; they sum to `dense_ms`."""
        found = {
            name: sum(row.dense_ms for row in self.rows if row.product == name and row.layer != ACTIVATIONS)
            for name in PRODUCTS
        }
        found["attention"] = sum(row.dense_ms for row in self.rows if row.layer == ACTIVATIONS)
        return found | {
            "norms": self.norms_ms,
            "elementwise": self.elementwise_ms,
            "optimiser": self.optimizer_ms,
        }

    @property
    def shares(self) -> dict[str, float]:
        """Share of each part in the dense step; they sum to 1."""
        return {name: ms / self.dense_ms for name, ms in self.parts.items()}

    @property
    def dense_ms(self) -> float:
        """The dense step."""
        return sum(self.parts.values())

    @property
    def paper_saved(self) -> float:
        """Share of the step that SDGP's paper would count: half of each input gradient that it prunes, at no cost."""
        halved = sum(row.dense_ms / 2 for row in self.rows if row.product == INPUT and row.way(DZ))
        return halved / self.dense_ms

    def variant(self, name: str) -> Variant:
        """Return the step of one of `VARIANTS`.

        Raises:
            HardwareError: There is no such variant.
        """
        one_of(f"the variant {name!r} is unknown", name, tuple(VARIANTS), HardwareError, 'variant("sdgp")')
        every, best, spent, every_spent, fits = self.dense_ms, self.dense_ms, 0.0, 0.0, 0
        taken: list[tuple[str, str]] = []
        weights: dict[str | None, list[tuple[StepRow, Sparse]]] = {}
        for row in self.rows:
            operand = VARIANTS[name].get(row.product)
            if operand is not None and (way := row.way(operand)) is not None:
                weights.setdefault(row.weight, []).append((row, way))
        for weight, ways in weights.items():
            fits += len(ways)
            wins = [(row, way) for row, way in ways if row.dense_ms >= FITTED.margin * _whole(way)]
            lost, cost = self._changed(weight, ways)
            every, every_spent = every + lost, every_spent + cost
            change, cost = self._changed(weight, wins)
            if change < 0:
                best, spent = best + change, spent + cost
                taken += [(row.layer, row.product) for row, _ in wins]
        return Variant(name, every, best, spent, every_spent, tuple(taken), fits, self.dense_ms)

    def _changed(self, weight: str | None, ways: Sequence[tuple[StepRow, Sparse]]) -> tuple[float, float]:
        """Return by how much sparse products lengthen the step, and what passes take in it."""
        cost = sum(way.pass_ms for _, way in ways)
        cost += self.mask_ms[weight] if weight and any(way.operand == W for _, way in ways) else 0
        return sum((way.ms or 0) - row.dense_ms for row, way in ways) + cost, cost

    @property
    def variants(self) -> tuple[Variant, ...]:
        """All of them."""
        return tuple(map(self.variant, VARIANTS))

    def grouped(self) -> tuple[tuple[StepRow, ...], ...]:
        """Return the rows that are alike together, in the order of the first of each."""
        groups: dict[tuple[object, ...], list[StepRow]] = {}
        for row in self.rows:
            groups.setdefault((row.product, row.m, row.n, row.k, row.batch, row.sparse), []).append(row)
        return tuple(map(tuple, groups.values()))

    def __str__(self) -> str:
        shares = ", ".join(f"{name} {ms:.3f} ms ({ms / self.dense_ms:.0%})" for name, ms in self.parts.items() if ms)
        lines = [f"dense: {shares}", *(_line(variant) for variant in self.variants)]
        return "\n".join([*lines, *self.notes, self.summary()])

    def summary(self) -> str:
        """Say the whole step, and what becomes of SDGP's promise, in one sentence each."""
        best = min(self.variants, key=lambda variant: variant.best_ms)
        sdgp = self.variant("sdgp")
        gain = (
            f"{self.dense_ms / best.best_ms:.2f}x by {best.name}" if best.taken else "no sparse operand is said to win"
        )
        return (
            f"{self.machine.name}, {self.dtype}, {self.optimizer}: a training step of {self.dense_ms:.3f} ms dense, "
            f"{gain}. "
            f"SDGP saves {sdgp.saved:.1%} of it where it is said to win ({sdgp.every_saved:.1%} everywhere), "
            f"{self.paper_saved:.1%} by the paper's arithmetic."
        )

    def to_dict(self) -> dict[str, object]:
        """Return JSON-ready fields."""
        head = {"machine": self.machine.name, "dtype": self.dtype, "optimizer": self.optimizer, "cold": self.cold}
        variants = [
            {**asdict(variant), "saved": variant.saved, "every_saved": variant.every_saved} for variant in self.variants
        ]
        totals = {"dense_ms": self.dense_ms, "paper_saved": self.paper_saved, "parts_ms": self.parts}
        rows = [asdict(row) for row in self.rows]
        return {**head, **totals, "shares": self.shares, "variants": variants, "notes": list(self.notes), "rows": rows}


def _whole(way: Sparse) -> float:
    return (way.ms or 0) + way.pass_ms


def _line(variant: Variant) -> str:
    if not variant.fits:
        return f"{variant.name}: fits no product"
    return (
        f"{variant.name}: {variant.best_ms:.3f} ms, {variant.saved:.1%} saved, with {len(variant.taken)} of "
        f"{variant.fits} products sparse ({variant.pass_ms:.3f} ms of passes); {variant.every_ms:.3f} ms with all"
    )
