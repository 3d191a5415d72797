"""Wanda and RIA: magnitudes weighed by the norm of the input that each weight is multiplied with."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.calibration import Statistics
from twofour.criteria.base import Scored


class _ByNorms(Scored):
    """What ranks by the weight and the norms of its inputs has in common."""

    need = "norms"

    @abstractmethod
    def weighed(self, size: Tensor, norms: Tensor) -> Tensor:
        """Return the scores of magnitudes (groups, rows, in) by the norms (groups, 1, in), not negative."""

    def score(self, weight: Tensor, statistics: Statistics | None = None, name: str = "") -> Tensor:
        """Return float32 scores; inputs that never were other than zero come last, by magnitude: those are negative."""
        assert statistics is not None, "asked for by `need`"
        # Divided by the root of the rows, so that long data do not leave the range of float32.
        norms = (statistics.norms / max(statistics.rows, 1) ** 0.5).unsqueeze(1)
        size = weight.detach().to(torch.float64 if weight.dtype == torch.float64 else torch.float32).abs()
        return live_first(self.weighed(size, norms), size, norms > 0)


@dataclass(frozen=True)
class Wanda(_ByNorms):
    """Rank by |W_ij| ||X_j||_2 (Sun, Liu, Bair, Kolter 2023, "A Simple and Effective Pruning Approach", eq. 1)."""

    kind = "wanda"

    def weighed(self, size: Tensor, norms: Tensor) -> Tensor:
        """Return |W_ij| ||X_j||_2."""
        return size * norms.to(size.dtype)


@dataclass(frozen=True)
class RIA(_ByNorms):
    """Rank by relative importance and activations (Zhang et al. 2024, "Plug-and-Play", eqs. 2 and 4).

    (|W_ij| / sum over the row i + |W_ij| / sum over the column j) * ||X_j||_2^power.

    Attributes:
        power: The paper's a, 0.5.
    """

    kind = "ria"

    power: float = 0.5

    def weighed(self, size: Tensor, norms: Tensor) -> Tensor:
        """Return the relative importance times ||X_j||_2^power."""
        tiny = torch.finfo(size.dtype).tiny
        relative = size / size.sum(-1, keepdim=True).clamp_min(tiny) + size / size.sum(-2, keepdim=True).clamp_min(tiny)
        return relative * norms.pow(self.power).to(size.dtype)


def live_first(scores: Tensor, size: Tensor, live: Tensor) -> Tensor:
    """Return non-negative `scores`; those of inputs that are not `live` become negative, in the order of `size`."""
    return torch.where(live, scores, -1 / (1 + size))
