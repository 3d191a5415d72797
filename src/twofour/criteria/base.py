"""The protocol of a criterion: a weight in, scores of the same shape out."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Criterion(ABC):
    """How important each value of a weight is."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The text that `twofour.criteria.parse` turns into this criterion."""

    @property
    @abstractmethod
    def absolute(self) -> bool:
        """Whether the scores are to be ranked by their absolute value."""

    @abstractmethod
    def score(self, weight: Tensor) -> Tensor:
        """Return scores of the shape of `weight`; larger (in absolute value, if `absolute`) is more important."""

    def __str__(self) -> str:
        return self.name
