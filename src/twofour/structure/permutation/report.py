"""What a permutation of a model won, group by group, and what stayed as it was and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from twofour.structure.coupling import Refusal
from twofour.structure.coupling.group import some


def _nothing() -> None:
    """Undo nothing."""


@dataclass(frozen=True)
class Gain:
    """What one group of channels won.

    Attributes:
        consumers: Names of the weights that sum over the channels.
        producers: Names of the other tensors that moved along.
        size: How many channels stand in one order.
        blocks: How many orders the group took: heads, groups of a convolution.
        before: Share of the scores that the mask kept of the channels in their old order.
        after: Share that it keeps now.
        efficacy: Share of the loss against the best of each row that was won back; 0 where nothing moved.
        reason: Why nothing was searched, "" where it was.
    """

    consumers: tuple[str, ...]
    producers: tuple[str, ...]
    size: int
    blocks: int
    before: float = 0.0
    after: float = 0.0
    efficacy: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        size = f"{self.blocks} x {self.size}" if self.blocks > 1 else str(self.size)
        what = self.reason or f"kept {self.before:.2%} -> {self.after:.2%}, efficacy {self.efficacy:.1%}"
        return f"{some(self.consumers)} ({size} channels): {what}"


@dataclass(frozen=True)
class Report:
    """What `permute` did to a model.

    Attributes:
        groups: Each group of channels that may move.
        refused: Channels that may not, with the reason.
        unused: Parameters that the example's forward did not use; they were not moved.
        magnitude_before: Share of the sum of |weight| that the patterns kept, over all weights, before.
        magnitude_after: The same after.
        scores_before: The same of the scores that were searched by.
        scores_after: The same after.
        error: Largest difference of an output before and after, relative to the output's largest value.
        judged: What the pruned model's output lost on data held back, in the old order and in the new one; None where
            there were no data to judge by.
        kept: Whether the new order stands; it is put back where it lost more.
        undo: Puts every channel back, once; for as long as the model's tensors have not changed their shape.
    """

    groups: tuple[Gain, ...]
    refused: tuple[Refusal, ...]
    unused: tuple[str, ...]
    magnitude_before: float
    magnitude_after: float
    scores_before: float
    scores_after: float
    error: float
    judged: tuple[float, float] | None = None
    kept: bool = True
    undo: Callable[[], None] = field(repr=False, compare=False, default=_nothing)

    def final(self) -> Report:
        """Return the report without the way back, which holds on to the model."""
        return replace(self, undo=_nothing)

    def __str__(self) -> str:
        lines = [
            f"magnitude kept {self.magnitude_before:.2%} -> {self.magnitude_after:.2%}, scores kept "
            f"{self.scores_before:.2%} -> {self.scores_after:.2%}; outputs differ by {self.error:.1e}"
        ]
        if self.judged is not None:
            verdict = "the new one stands" if self.kept else "put back"
            lines.append(
                f"  on data held back the pruned model lost {self.judged[0]:.4f} in the old order and "
                f"{self.judged[1]:.4f} in the new one: {verdict}"
            )
        lines += [f"  {gain}" for gain in self.groups]
        for refusal in self.refused:
            lines.append(f"  {some(refusal.consumers)} ({refusal.size} channels) as it was: {refusal.reason}")
        if self.unused:
            lines.append(f"  {len(self.unused)} parameters unused by the example, `{self.unused[0]}` first: not moved")
        return "\n".join(lines)
