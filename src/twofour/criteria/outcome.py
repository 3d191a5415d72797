"""What came of pruning: the choice of each weight, its outcome for the report, and all of them together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from twofour.calibration import PER_INPUT
from twofour.layers import PrunableWeight
from twofour.patterns import Pattern


@dataclass(frozen=True)
class Outcome:
    """What pruning did to one weight.

    Attributes:
        name: Full parameter name.
        pattern: The pattern's text.
        criterion: The criterion's text; "left" where the weight obeyed the pattern before and its values stay.
        error: ||X (W - W')^T|| / ||X W^T|| over the calibration inputs that reach the weight in the model pruned so
            far; None without data, and where the inputs cannot be observed or all are zero: then `note` says why.
        rows: How many rows X has: tokens, or positions of a convolution.
        note: What the criterion has to say, or "".
        inputs: How many inputs each row has; 0 where the criterion does not rank by them.
    """

    name: str
    pattern: str
    criterion: str
    error: float | None = None
    rows: int = 0
    note: str = ""
    inputs: int = 0

    @property
    def few(self) -> bool:
        """Whether there were fewer than `PER_INPUT` rows for each input."""
        return 0 < self.rows < PER_INPUT * self.inputs

    @property
    def fitted(self) -> bool:
        """Whether there were fewer rows than inputs: whatever the task, values can be fitted to these rows."""
        return 0 < self.rows < self.inputs

    def with_doubt(self) -> Outcome:
        """Return the outcome whose note says so where its error is of rows that could be fitted."""
        if not self.fitted or self.error is None:
            return self
        said = f"the error is measured on the rows it was fitted to, {self.rows} for {self.inputs} inputs"
        return replace(self, note=f"{self.note}; {said}: of others it says little".removeprefix("; "))


def few_data(outcomes: Sequence[Outcome]) -> str:
    """Say which weights saw fewer than `PER_INPUT` rows for each input, and how many more are enough; "" for none."""
    few = [outcome for outcome in outcomes if outcome.few]
    if not few:
        return ""
    least = max(few, key=lambda outcome: outcome.inputs / outcome.rows)
    others = f" and {len(few) - 1} more" if len(few) > 1 else ""
    times = math.ceil(PER_INPUT * least.inputs / least.rows)
    return (
        f"few data for `{least.name}`{others} of {len(outcomes)} weights: {least.rows} rows for {least.inputs} inputs; "
        f"give {times} times as much data"
    )


@dataclass(frozen=True, eq=False)
class Choice:
    """The mask chosen for one weight, bool of the weight's own shape, True where a value is kept."""

    weight: PrunableWeight
    pattern: Pattern
    keep: Tensor
    outcome: Outcome


@dataclass(eq=False)
class Solved:
    """All choices; weights that a criterion updates hold their new values already, `undo` brings the old ones back.

    Attributes:
        choices: One for each weight pruned.
        refused: Weights that stay dense although asked for, by name, each with its reason.
        settled: Of weights that obeyed their patterns before, whose values stay: nothing is solved for them.
    """

    choices: list[Choice] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    settled: Sequence[Choice] = ()
    _before: dict[nn.Parameter, Tensor] = field(default_factory=dict)

    @property
    def before(self) -> Mapping[nn.Parameter, Tensor]:
        """What each parameter that has new values held before."""
        return self._before

    @property
    def masked(self) -> list[Choice]:
        """Every mask to attach."""
        return [*self.choices, *self.settled]

    @property
    def fitted(self) -> bool:
        """Whether a weight saw fewer rows than it has inputs."""
        return any(choice.outcome.fitted for choice in self.choices)

    def told(self, dense: int) -> str:
        """Say what was pruned, and which weights saw few data, in one line.

        Args:
            dense: How many parameters with two or more axes were left out beside those that are refused.
        """
        patterns = Counter(choice.pattern.name for choice in self.choices)
        values = sum(choice.keep.numel() for choice in self.masked)
        parts = [f"{count} weights to {name}" for name, count in patterns.items()] or ["no weight"]
        parts += [f"{len(self.settled)} left as they were"] if self.settled else []
        left = f"{dense + len(self.refused)} parameters with two or more axes stay dense"
        short = few_data([choice.outcome for choice in self.choices])
        return f"pruned {', '.join(parts)}: {values:,} values under a mask; {left}{short and f'; {short}'}"

    @torch.no_grad()
    def undo(self) -> None:
        """Give every parameter the values it had before."""
        for parameter, values in self._before.items():
            parameter.copy_(values)
        self._before.clear()
        torch.clear_autocast_cache()

    @torch.no_grad()
    def values(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return copies of the new values that parameters hold now, for `write` to bring them back after an `undo`."""
        return [(parameter, parameter.detach().clone()) for parameter in self._before]

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Give a parameter new values of its own shape, and remember those that it had at first."""
        if parameter not in self._before:
            self._before[parameter] = parameter.detach().clone()
        parameter.copy_(values)
        torch.clear_autocast_cache()  # a caller's autocast would go on with what it casted of the old values
