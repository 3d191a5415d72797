"""What holds for every layer of one compilation, and the times that all of it is chosen by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from twofour.compiler.choose import Choice, choose
from twofour.compiler.computing import Computing
from twofour.compiler.head_tables import HeadTable, head_tables
from twofour.compiler.prepared import PreparedWeights
from twofour.compiler.replaceable import LayerWeight
from twofour.errors import TwofourError
from twofour.graph import EXACT
from twofour.kernels import rows
from twofour.kernels.bits_matmul import BitWeight
from twofour.kernels.problem import Problem
from twofour.measure.cache import Cache
from twofour.measure.effort import FULL, Effort
from twofour.measure.travelling import MachineTimes
from twofour.packing import Packed


@dataclass(frozen=True)
class Terms:
    """What holds for every layer of one compilation.

    Attributes:
        computing: Computing type and how weights are written.
        memory: "fast" or "small".
        tokens: Token counts to measure besides the example's.
        given: Times that a saved model carries.
        fresh: Measure everything once more.
        rules: Which rules of algebra a graph is rewritten by, and which convolutions are measured: "exact" or "close".
        native: Whether kernels of this package alone are candidates, and the graph is the engine: for `to_runtime`.
        effort: How much is measured.
    """

    computing: Computing
    memory: str
    tokens: tuple[int, ...]
    given: tuple[MachineTimes, ...] = ()
    fresh: bool = False
    rules: str = EXACT
    native: bool = False
    effort: Effort = FULL

    @cached_property
    def cache(self) -> Cache:
        """The times that everything in this compilation is chosen by."""
        names, settings = [kernel.name for kernel in rows()], {"fresh": self.fresh, "effort": self.effort}
        return Cache.for_this_machine(names, self.computing.device, given=self.given, **settings)

    @cached_property
    def joined(self) -> dict[tuple[tuple[str, ...], tuple[str, ...]], PreparedWeights]:
        """Weights of joined layers by their names and layouts: several graphs of one model share them."""
        return {}

    @cached_property
    def tables(self) -> list[HeadTable]:
        """Tables that the weights of heads hold: the graphs of one model look their rows up there."""
        return []

    def share_tables(
        self,
        model: nn.Module,
        fast: nn.Module,
        weights: Mapping[str, LayerWeight],
        stored: Mapping[str, Packed | Tensor] | None = None,
    ) -> None:
        """Find the tables that the weights of heads hold; arguments as of `head_tables`."""
        if not self.native:  # whose programs have calls of tables that are apart
            self.tables.extend(head_tables(model, fast, weights, stored))

    def choose(
        self,
        name: str,
        weight: Packed | Tensor | BitWeight,
        bias: Tensor | None,
        count: int | None,
        footprint: int,
        problem: Problem,
        *,
        among: Sequence[int] | None = None,
        **options: Any,
    ) -> Choice:
        """Choose the kernels of one weight at these token counts and the example's; errors name the layer.

        Args:
            name: Of the layer.
            weight: As `choose` takes it.
            bias: float32 (out,) or None.
            count: The example's token count, or None.
            footprint: Bytes of the whole model's weights.
            problem: As `choose` takes it.
            among: Token counts to measure in place of `tokens`.
            options: More for `choose`.
        """
        tokens = set(self.tokens if among is None else among) | ({count} if count else set())
        terms = {"memory": self.memory, "cache": self.cache, "device": self.computing.device}
        terms |= {"dtype": self.computing.dtype, "problem": problem, "native_alone": self.native, **options}
        try:
            return choose(weight, bias, tokens, footprint=footprint, example=count, **terms)
        except TwofourError as error:
            raise error.for_layer(name) from None
