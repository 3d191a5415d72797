"""The protocols of a criterion: a weight and what is known of its inputs in, the kept values out.

A weight comes as a matrix (groups, rows, in), as `calibration.matrix` lays it out: (1, out, in) for a Linear. Groups
of a pattern lie along the last axis.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, cast

from torch import Tensor

from twofour.calibration import Need, Statistics
from twofour.errors import RecipeError, one_of
from twofour.patterns import Block, Pattern

OVER = ("weight", "input", "model")
"""What is ranked together: each weight by itself, those that read one input, or, of blocks, all weights."""

NORMS = ("l1", "l2", "max")
"""What makes one score of a block's: see `Block.scores`."""


@dataclass(frozen=True, eq=False)
class Solution:
    """What a criterion decides for one weight, in the layout of the matrix it was given.

    Attributes:
        keep: Bool, True where a value is kept.
        values: The new values of the weight, or None when those kept stay as they are.
        note: What the reader of the report should know, or "".
    """

    keep: Tensor
    values: Tensor | None = None
    note: str = ""

    def applied(self, dense: Tensor) -> Tensor:
        """Return the pruned matrix of a dense one, in its type: the values that the model will hold."""
        return (dense if self.values is None else self.values.to(dense.dtype)).masked_fill(~self.keep, 0.0)


class Criterion(ABC):
    """How important each value of a weight is. An implementation is a frozen dataclass whose fields are its options.

    Attributes:
        kind: The name without options.
        need: What must be known of a weight's inputs; None when the weight itself is enough.
    """

    kind: ClassVar[str]
    need: ClassVar[Need | None] = None

    @property
    def name(self) -> str:
        """The text that `twofour.criteria.parse` turns into this criterion, with options that are not the defaults."""
        options = [
            f"{option.name}={getattr(self, option.name)}"
            for option in fields(cast(Any, self))
            if option.default is MISSING or getattr(self, option.name) != option.default
        ]
        return self.kind + (f":{','.join(options)}" if options else "")

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class Layerwise(Criterion):
    """A criterion that decides weight by weight.

    Attributes:
        over: What the blocks of a block pattern are ranked over: each "weight" by itself, or the "model", where each
            weight ends with a share of its own (`criteria.shares`). What the dense groups of "2:4+25%" are chosen over:
            each "weight", or all that read one "input", as query, key and value do: they are solved as one weight, so
            that the same groups are dense in all of them. Other patterns fix what stays of each group.
    """

    over: str = "weight"

    def __post_init__(self) -> None:
        one_of("the range of a ranking is not known", self.over, OVER, RecipeError, "over=weight is the default")

    @abstractmethod
    def solve(self, weight: Tensor, pattern: Pattern, statistics: Statistics | None, name: str) -> Solution:
        """Choose the kept values of one weight.

        Args:
            weight: The matrix (groups, rows, in), any floating dtype; it is not changed.
            pattern: The pattern along the last axis.
            statistics: What `need` asks for, in the same layout, or None.
            name: Name of the weight.

        Raises:
            PatternError: The scores hold NaN or infinity.
        """


@dataclass(frozen=True, kw_only=True)
class Scored(Layerwise):
    """A criterion that ranks the values of each group and leaves those kept as they are.

    Attributes:
        absolute: Whether the scores are to be ranked by their absolute value.
        norm: What makes the score of a block of those of its values: "max" the largest, as Narang et al. 2017, section
            3.1, take it, "l1" their mean, "l2" the root of their mean square. Other patterns have no blocks.
    """

    absolute: ClassVar[bool] = False

    norm: str = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("the norm of a block is not known", self.norm, NORMS, RecipeError, "norm=max is the default")

    @abstractmethod
    def score(self, weight: Tensor, statistics: Statistics | None = None, name: str = "") -> Tensor:
        """Return scores of the shape of `weight`; larger (in absolute value, if `absolute`) is more important."""

    def solve(self, weight: Tensor, pattern: Pattern, statistics: Statistics | None, name: str) -> Solution:
        """Keep the best-scored values of each group."""
        scores = self.score(weight, statistics, name)
        # As (out, in): patterns that tie rows together see those of all groups in order.
        return Solution(self.choose(scores.flatten(0, 1), pattern).view(scores.shape))

    def choose(self, scores: Tensor, pattern: Pattern) -> Tensor:
        """Return the mask of scores (out, in).

        Raises:
            PatternError: The scores hold NaN or infinity.
        """
        options = {"norm": self.norm} if isinstance(pattern, Block) else {}
        return pattern.project(scores, absolute=self.absolute, **options)
