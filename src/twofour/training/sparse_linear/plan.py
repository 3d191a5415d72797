"""What each layer runs: for each of its three products a kernel or a dense implementation, the times, the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from twofour.layers.grouped import grouped

PRODUCTS = ("forward", "data", "weight")
"""The products of a Linear in training: Y = X W^T, dX = dZ W, dW = dZ^T X."""


AT_KEPT_PLACES = "nm_sddmm_"
"""How the names of rows begin that multiply at the kept places of a weight alone (`kernels.nm_sddmm`)."""


@dataclass(frozen=True)
class Choice:
    """How one product runs.

    Attributes:
        kernel: Name of the row of the kernel table, or of the dense implementation ("torch", "onednn").
        sparse: Whether it is a 2:4 kernel.
        reason: Why.
        dense: The best dense implementation, taken where the kernel cannot be: before a mask is in force, say.
        dense_ms: Its time, milliseconds; None where nothing was measured.
        sparse_ms: Time of the best 2:4 kernel with packing included; None where there is none or nothing was measured.
        kept_ms: Time of the product at kept places alone, which is exact; None where there is none.
    """

    kernel: str
    sparse: bool
    reason: str
    dense: str = "torch"
    dense_ms: float | None = None
    sparse_ms: float | None = None
    kept_ms: float | None = None

    @property
    def at_kept_places(self) -> bool:
        """Whether the product is taken at kept places alone, exactly."""
        return not self.sparse and self.kernel.startswith(AT_KEPT_PLACES)

    @property
    def ms(self) -> float | None:
        """Time of what runs; None where nothing was measured."""
        return self.sparse_ms if self.sparse else self.kept_ms if self.at_kept_places else self.dense_ms

    def without_mask(self) -> Choice:
        """Return what runs in a layer that has no mask."""
        if not self.sparse:
            return self
        return replace(self, kernel=self.dense, sparse=False, reason=f"2:4 {self.reason}, without a mask")

    def __str__(self) -> str:
        known = ("dense", self.dense_ms), ("2:4", self.sparse_ms), ("kept places", self.kept_ms)
        times = [f"{name} {ms:.2f}" for name, ms in known if ms is not None]
        return f"{self.kernel} ({', '.join([*times, self.reason])})"


@dataclass(frozen=True)
class LayerPlan:
    """One layer.

    Attributes:
        name: Name of the layer.
        shape: (out, in).
        tokens: Rows of the input that was measured; 0 before there was one.
        dtype: Computing type.
        choices: Product (of `PRODUCTS`) -> how it runs.
        pruned: Where its gradient was pruned last; "" where none is.
        unmasked: Whether its weight is left dense, since its products gain too little from 2:4.
        note: What else is to be said of it.
        idle: Products that no step takes, of an input or a weight without a gradient; they are not counted.
    """

    name: str
    shape: tuple[int, int]
    tokens: int
    dtype: str
    choices: Mapping[str, Choice]
    pruned: str = ""
    unmasked: bool = False
    note: str = ""
    idle: tuple[str, ...] = ()

    @property
    def described(self) -> str:
        """All but the name: layers of one description are alike."""
        size = f", {self.tokens} tokens, {self.dtype}" if self.tokens else ""
        lines = [f"{self.shape[0]} x {self.shape[1]}{size}"]
        lines += [f"  {product:<8} {choice}" for product, choice in self.choices.items()]
        mask = "none: its products gained less than 5 % from 2:4 when it was attached" if self.unmasked else ""
        idle = f"{' and '.join(self.idle)} product: no gradient is wanted of what it is of" if self.idle else ""
        said = ("pruned", self.pruned), ("mask", mask), ("not run", idle), ("note", self.note)
        lines += [f"  {name:<8} {text}" for name, text in said if text]
        return "\n".join(lines)

    @property
    def counted(self) -> list[Choice]:
        """How the products run that a step takes."""
        return [choice for product, choice in self.choices.items() if product not in self.idle]

    @property
    def dense_ms(self) -> float:
        """Time of the best dense implementations of a step's products together; 0 where nothing was measured."""
        return sum(choice.dense_ms or 0.0 for choice in self.counted)

    @property
    def chosen_ms(self) -> float:
        """Time of what was chosen together, packing included."""
        return sum(choice.ms or 0.0 for choice in self.counted)

    @property
    def gain(self) -> float:
        """Time of the best dense implementations over that of what was chosen; 1 where nothing was measured."""
        return self.dense_ms / self.chosen_ms if self.chosen_ms else 1.0

    def without_mask(self) -> LayerPlan:
        """Return the plan of the layer without a mask."""
        choices = {product: choice.without_mask() for product, choice in self.choices.items()}
        return replace(self, choices=choices, unmasked=True)


@dataclass(frozen=True)
class Plan:
    """What `attach` chose.

    Attributes:
        layers: The layers with sparse weights.
        skipped: Layers that stay as they are -> the reason.
        functions: Functions between the layers, by shape -> what runs them, and why; those that were called
            and served, or left to torch for a reason that is named, and modules whose functions no mode sees.
    """

    layers: tuple[LayerPlan, ...]
    skipped: Mapping[str, str]
    functions: Mapping[str, str] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """How many products run 2:4, and what the products of a step take beside the best dense ones."""
        counted = [choice for layer in self.layers for choice in layer.counted]
        sparse, kept = sum(choice.sparse for choice in counted), sum(choice.at_kept_places for choice in counted)
        exact = f", {kept} at kept places" if kept else ""
        lines = [f"{len(self.layers)} layers: {sparse} of {len(counted)} products run 2:4{exact}"]
        dense, chosen = (sum(getattr(layer, of) for layer in self.layers) for of in ("dense_ms", "chosen_ms"))
        if dense and chosen:
            whole = f"{dense:.1f} ms dense, {chosen:.1f} ms as chosen: {dense / chosen:.2f} times as fast"
            lines.append(f"products of a step, packing included, timed one by one: {whole}")
        if unmasked := sum(layer.unmasked for layer in self.layers):
            why = "the products of each gained less than 5 % from 2:4 when they were attached"
            lines.append(f"{unmasked} layers have no mask: {why}")
        return "\n".join(lines)

    def __str__(self) -> str:
        lines = [self.summary]
        lines += _folded([layer.name for layer in self.layers], [layer.described for layer in self.layers])
        lines += _folded(list(self.skipped), [f"dense: {reason}" for reason in self.skipped.values()])
        lines += [f"{call}  {choice}" for call, choice in self.functions.items()]
        return "\n".join(lines)


def _folded(names: list[str], texts: list[str]) -> list[str]:
    """Return what is said of each, once for those that are alike."""
    groups = grouped(names, texts)
    return ["  ".join(filter(None, (one.pattern, one.count, texts[one.members[0]]))) for one in groups]
