"""How many bytes the weights of a training take, and what an optimiser remembers of them, beside a dense training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor, nn
from torch.optim import Optimizer

from twofour.layers import stored_shape


@dataclass(frozen=True)
class Memory:
    """Bytes of the layers that take part; gradients come and go and are not counted.

    Attributes:
        weights: Parameters, and masks or the places of kept values.
        state: What the optimisers that have stepped them remember; 0 before a first step.
        layouts: The same values as the products read them: W and W^T; 0 before a first forward pass.
        dense_weights: The parameters of a dense training.
        dense_state: What the same optimisers would remember of those.
    """

    weights: int
    state: int
    layouts: int
    dense_weights: int
    dense_state: int

    @property
    def ratio(self) -> float:
        """Weights and state over those of a dense training: what a checkpoint's worth of values takes."""
        return (self.weights + self.state) / (self.dense_weights + self.dense_state)

    @property
    def whole_ratio(self) -> float:
        """The same with the layouts: what the process holds."""
        return (self.weights + self.state + self.layouts) / (self.dense_weights + self.dense_state)

    def __str__(self) -> str:
        held = self.weights + self.state, self.weights + self.state + self.layouts
        rows = ("weights", self.weights, self.dense_weights), ("optimiser state", self.state, self.dense_state)
        sums = ("together", held[0], dense := self.dense_weights + self.dense_state), ("with layouts", held[1], dense)
        layouts = "layouts", self.layouts, 0
        found = (_row(*row) for row in (*rows, sums[0], layouts, sums[1]))
        notes = [] if self.state else ["no optimiser has stepped yet: its state is not counted"]
        notes += [] if self.layouts else ["no layouts of W and W^T: no forward pass yet, or all products are dense"]
        return "\n".join((f"{'':<16}{'MB':>10}{'dense MB':>10}  of dense", *found, *notes))


def _row(name: str, held: int, dense: int) -> str:
    ratio = f"{held / dense:.2f}" if dense else "-"
    return f"{name:<16}{held / 1e6:>10.1f}{dense / 1e6:>10.1f}{ratio:>10}"


def memory(parameters: Sequence[nn.Parameter], places: int, layouts: int, optimizers: Iterable[Optimizer]) -> Memory:
    """Count what these parameters take.

    Args:
        parameters: As they are held.
        places: Bytes of masks, or of the places of kept values.
        layouts: Bytes of packed layouts.
        optimizers: Those that have stepped some of them.
    """
    held = dense = 0
    for optimizer in optimizers:
        for parameter in parameters:
            state = [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor)]
            held += sum(value.nbytes for value in state)
            of_values = sum(value.nbytes for value in state if value.shape == parameter.shape)
            dense += sum(value.nbytes for value in state) + of_values * (_times(parameter) - 1)
    weights = sum(parameter.nbytes for parameter in parameters)
    whole = sum(parameter.nbytes * _times(parameter) for parameter in parameters)
    return Memory(weights + places, held, layouts, whole, dense)


def _times(parameter: Tensor) -> int:
    """Return how many times as many values the dense weight has."""
    return prod(stored_shape(parameter)) // parameter.numel()
